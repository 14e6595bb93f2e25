"""Decides, step by step, which sequences get how many tokens: continuous batching with chunked prefill.

There is no prefill or decode phase: every sequence's `num_computed` catches up with its `num_tokens`, within a budget
of tokens a step and a pool of blocks. The scheduler decides how many, never which block ids.

Invariants:
- Sequences are admitted in arrival order, and a preempted one goes back to the front: `waiting` and `running` are both
  ordered by arrival, and everything running arrived before everything waiting.
- Blocks are reserved in arrival order and only later arrivals are preempted for earlier ones, so the oldest running
  sequence advances in every step; since a sequence that cannot fit the empty pool is refused, it ends.
- A row is given up in one place, `_release`.
"""

from __future__ import annotations

import math
from collections import deque

from pagedjax.block_budget import BlockBudget
from pagedjax.outputs import FinishReason
from pagedjax.plan import Scheduled, StepPlan
from pagedjax.request import Sequence


class Scheduler:
    """Holds every unfinished sequence and makes the plans.

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens a block.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step.
        max_model_len: tokens a sequence.
        decode_steps: most inner steps a plan may ask for.
        watermark: share of the pool that an admission leaves free while others run, so that they can grow.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        decode_steps: int = 1,
        watermark: float = 0.01,
    ) -> None:
        self.num_usable_blocks = num_blocks - 1
        self.block_size = block_size
        self.num_rows = max_num_seqs
        # Every running row gets at least one token a step.
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.decode_steps = decode_steps
        self.watermark_blocks = math.ceil(watermark * self.num_usable_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.least_free_blocks = self.num_usable_blocks  # since the start, as the host knew it
        self._budget = BlockBudget(self.num_usable_blocks)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._releases: list[int] = []  # rows given up since the last plan

    @property
    def num_free_blocks(self) -> int:
        """Lower bound on the free blocks, those of rows about to be released included."""
        return self._budget.available

    @property
    def has_releases(self) -> bool:
        """Whether rows wait for a plan to give their blocks back."""
        return bool(self._releases)

    def check_fits(self, num_prompt_tokens: int, end_len: int) -> None:
        """Refuses a sequence that could never be finished.

        Args:
            num_prompt_tokens: length of the prompt.
            end_len: tokens at which it would end by length, at most `max_model_len`.

        Raises:
            ValueError: with the arithmetic and what to change.
        """
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room to generate within max_model_len="
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        # The last token that is sampled is never computed, so it needs no slot.
        needed = self._blocks(end_len - 1)
        if needed > self.num_usable_blocks:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens + {end_len - num_prompt_tokens} to generate need {needed} "
                f"blocks of {self.block_size} tokens, and the pool has {self.num_usable_blocks} usable ones "
                f"({self.num_usable_blocks * self.block_size} tokens); raise num_blocks or kv_cache_memory_bytes, "
                "or lower max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; raises ValueError if it can never fit."""
        self.check_fits(len(sequence.request.prompt_ids), sequence.end_len)
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """Takes a sequence out, in whatever state it is: its row and blocks are released with the next plan.

        Args:
            sequence: waiting or running.
            reason: recorded unless the sequence has finished by itself.
        """
        if reason is not None and not sequence.finished:
            sequence.finish(reason)
        if sequence.row is not None:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def preempt_all(self) -> None:
        """Sends every running sequence back to the front of the queue, in order; everything is recomputed."""
        for sequence in reversed(self.running):
            self._release(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()

    def reset(self) -> None:
        """The device's state is fresh: nothing is held there, nothing is in flight."""
        self.preempt_all()
        self._releases.clear()
        self._budget.reset(self.num_usable_blocks)

    def schedule(self) -> StepPlan:
        """Makes the next plan.

        Returns:
            A plan; one without scheduled tokens has only releases, or nothing at all, and gets no result.
        """
        plan = StepPlan(self.num_rows)
        budget = self._allot(plan)
        if not plan.preempted:
            self._admit(plan, budget)
        plan.num_steps = self._extend(plan)
        self.least_free_blocks = min(self.least_free_blocks, self.num_free_blocks)
        plan.releases, self._releases = self._releases, []
        if plan.scheduled:  # only then a result comes back; else the credits count towards the next plan that has one
            self._budget.dispatch()
        return plan

    def settle(self, num_free_blocks: int) -> None:
        """Takes the device's count of free blocks from the oldest plan's result."""
        self._budget.settle(num_free_blocks)

    # How a plan comes about: tokens first, then blocks, then newcomers, then further inner steps.

    def _allot(self, plan: StepPlan) -> int:
        """Gives running sequences their tokens and blocks; returns the tokens left of the budget."""
        budget = self.max_num_batched_tokens
        tokens: dict[Sequence, int] = {}
        later = len(self.running)  # rows that still must get a token
        for sequence in sorted(self.running, key=lambda s: s.num_pending > 1):  # stable: decode rows, then by arrival
            later -= 1
            tokens[sequence] = min(sequence.num_pending, budget - later)
            budget -= tokens[sequence]
        for sequence in list(self.running):
            if sequence.row is None:
                continue  # preempted for an earlier one in this very plan
            if self._reserve(sequence, tokens[sequence], plan):
                self._schedule(sequence, tokens[sequence], plan)
        return self.max_num_batched_tokens - plan.total_new_tokens

    def _reserve(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Debits the blocks for `num_tokens` more, preempting later arrivals; False if it had to give way itself."""
        needed = self._growth(sequence, num_tokens)
        while needed > self._budget.available:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        self._budget.debit(needed)
        return True

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Starts waiting sequences while rows, tokens and blocks last.

        A sequence starts only if all its known tokens will fit beside what earlier ones still have to prefill.
        """
        owed = sum(self._growth(s, s.num_pending) for s in self.running)
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            needed = self._blocks(sequence.num_tokens)
            watermark = self.watermark_blocks if self.running else 0
            if needed + watermark + owed > self._budget.available:
                break
            self.waiting.popleft()
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)
            plan.admits.append(sequence)
            num_tokens = min(sequence.num_tokens, budget)
            budget -= num_tokens
            self._budget.debit(self._growth(sequence, num_tokens))
            self._schedule(sequence, num_tokens, plan)
            owed += self._growth(sequence, sequence.num_pending)

    def _extend(self, plan: StepPlan) -> int:
        """How many inner steps: no more than the shortest remaining work, and one while anyone prefills."""
        parts = list(plan.scheduled.values())
        if not parts or any(p.num_tokens > 1 or p.sequence.num_pending > 0 for p in parts):
            return 1
        steps = min(self.decode_steps, *(p.sequence.end_len - p.sequence.num_tokens for p in parts))
        while steps > 1:
            needed = sum(self._growth(p.sequence, steps - 1) for p in parts)
            if needed <= self._budget.available:
                self._budget.debit(needed)
                break
            steps -= 1
        return steps

    def _schedule(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        assert sequence.row is not None
        plan.scheduled[sequence.row] = Scheduled(sequence, sequence.epoch, sequence.num_computed, num_tokens)
        sequence.num_computed += num_tokens

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        assert sequence.row is not None
        plan.scheduled.pop(sequence.row, None)
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        plan.preempted.append(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """The one way out of a row: finish, abort, preemption and errors all come here."""
        assert sequence.row is not None
        self._budget.credit(self._blocks(sequence.num_computed))
        self._releases.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.num_computed = 0
        sequence.epoch += 1

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `num_tokens` more would take."""
        return self._blocks(sequence.num_computed + num_tokens) - self._blocks(sequence.num_computed)
