"""Decides, step by step, which sequences get how many tokens: continuous batching with chunked prefill.

There is no prefill or decode phase: every sequence's `num_computed` catches up with its `num_tokens`, within a budget
of tokens a step and a pool of blocks. The scheduler decides how many, never which block ids.

Invariants:
- `waiting` and `running` are both ordered by arrival, and sequences are admitted in this order. Only one that is held,
  because an earlier one is just computing a prefix that it will share, is passed by later arrivals.
- Blocks are reserved in arrival order and only later arrivals are preempted for earlier ones, so the oldest running
  sequence advances in every step; since a sequence that cannot fit the empty pool is refused, it ends.
- A row is given up in one place, `_release`.
- A running sequence that does not prefill has one pending token when a plan begins, known or about to be drawn, and
  none when it is made. So a plan looks closely only at the rows that prefill, need a block, start or end.
- A plan may be made while the result of the last one is still to come (`runs_ahead`). It counts on every row going on;
  one that has stopped computes nothing on the device, and `epoch` keeps its part of the result from being taken.
- A beam search has its rows and all the blocks it may come to need set aside when it starts, and is not preempted: its
  beams go on together. An older sequence may have to wait for it, but not for ever: it ends.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable

from pagedjax.beam_reserve import BeamReserve
from pagedjax.block import NULL_BLOCK, Block, BlockKey
from pagedjax.block_ledger import BlockLedger
from pagedjax.events import Preemption, PreemptionReason
from pagedjax.outputs import FinishReason
from pagedjax.plan import Admission, Parts, StepPlan
from pagedjax.prefix_cache import PrefixCache
from pagedjax.request import Request, Sequence
from pagedjax.sequence_start import Start, find_start, keys_to_come
from pagedjax.wait_queue import WaitQueue

MOST_HELD = 256  # waiting sequences that a plan looks past: they wait for a prefix, and later ones may not


class Scheduler:
    """Holds every unfinished sequence and makes the plans.

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens a block.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step.
        max_model_len: tokens a sequence.
        decode_steps: most inner steps a plan may ask for.
        num_speculative_tokens: most proposals of a row in each of them.
        watermark: share of the pool that an admission leaves free while others run, so that they can grow.
        enable_prefix_caching: keep full blocks for later sequences that begin alike.
        window: the largest sliding window, where every layer has one; None keeps all blocks.
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
        num_speculative_tokens: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = False,
        window: int | None = None,
    ) -> None:
        self.num_usable_blocks = num_blocks - 1
        self.block_size = block_size
        self.num_rows = max_num_seqs
        # Every running row gets at least one token a step.
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.decode_steps = decode_steps
        self.num_speculative_tokens = num_speculative_tokens
        self.watermark_blocks = math.ceil(watermark * self.num_usable_blocks)
        self.waiting = WaitQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._preemptions: list[Preemption] = []  # not yet taken
        self.least_available_blocks = self.num_usable_blocks  # since the start, as the host knew it
        self.num_prompt_tokens = 0  # of the sequences started, each the first time
        self.num_cached_tokens = 0  # of those, found in the prefix cache
        self.ledger = BlockLedger(
            self.num_usable_blocks,
            block_size,
            PrefixCache() if enable_prefix_caching else None,
            window,
            max_num_batched_tokens,
        )
        self._num_arrivals = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._prefilling: dict[Sequence, None] = {}  # running, with tokens left that they know
        self._last_parts: Parts | None = None  # of the last plan
        self._releases: list[int] = []  # rows given up since the last plan
        # Of each plan whose result has not come: the tokens of its first inner step, and how many each then gets.
        self._in_flight: deque[tuple[dict[Sequence, int], int]] = deque()
        self._beams = BeamReserve(self.ledger)
        self._forks: dict[Request, list[int]] = {}  # beams that change places in the next plan

    @property
    def has_changes(self) -> bool:
        """Whether rows or cached blocks wait for a plan to give them back."""
        return bool(self._releases or self.ledger.drops)

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
        needed = self.ledger.room(0, end_len - 1)
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
        self._arrive(sequence)
        self.waiting.add(sequence)

    def check_beams_fit(self, request: Request) -> None:
        """Raises ValueError if a beam search can never fit."""
        self._beams.check_fits(request, self.max_running)

    def add_beams(self, request: Request) -> None:
        """Queues a beam search; raises ValueError if it can never fit."""
        self.check_beams_fit(request)
        self.add(request.sequences[0])

    def resume(self, sequence: Sequence, blocks: list[Block | None], num_tokens: int, weights_version: int) -> int:
        """A sequence arrives that goes on in a row, with K/V that the device holds for it already.

        Args:
            sequence: neither waiting nor running, of no beam search.
            blocks: that hold its tokens, shared with sequences that came before or will come; None behind the window.
            num_tokens: how many they hold.
            weights_version: of the weights they were computed with.

        Returns:
            Its row; there must be a free one.
        """
        self._arrive(sequence)
        sequence.row = self._free_rows.pop()
        sequence.weights_version = weights_version
        self.running.append(sequence)
        self._prefilling[sequence] = None
        self.ledger.resume(sequence, blocks, num_tokens)
        return sequence.row

    def _arrive(self, sequence: Sequence) -> None:
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1

    def fork(self, request: Request, parents: list[int]) -> None:
        """Beam i of a search goes on from where beam `parents[i]` is, with the tokens it has now."""
        self._forks[request] = parents

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
        else:  # a beam may neither run nor wait
            self.waiting.remove(sequence)
        self._forks.pop(sequence.request, None)

    def preempt_all(self, reason: PreemptionReason) -> None:
        """Sends every running sequence back into the queue."""
        searches = list(self._beams.running)
        for sequence in self.running:
            self._log_preemption(sequence, reason)
            self._release(sequence)
            if sequence.request.beams is None:
                self.waiting.add(sequence)
        for request in searches:
            request.restart_beams()
            self.waiting.add(request.sequences[0])
        self.running.clear()
        self._forks.clear()

    def change_weights(self, *, recompute: bool) -> None:
        """New weights are in force: nothing computed with older ones is shared any more.

        Args:
            recompute: running sequences start over; else they go on with what they have.
        """
        self.ledger.change_weights()
        if recompute:
            self.preempt_all("weights")
            for sequence in self.waiting:
                sequence.scores.clear()

    def reset(self) -> None:
        """The device's state is fresh: nothing is held there, nothing is in flight."""
        self.preempt_all("failure")
        self._releases.clear()
        self._in_flight.clear()
        self.ledger.reset()

    def take_preemptions(self) -> list[Preemption]:
        """Those since the last time, for whatever reason."""
        preemptions, self._preemptions = self._preemptions, []
        return preemptions

    def schedule(self) -> StepPlan:
        """Makes the next plan.

        Returns:
            A plan; one without scheduled tokens has only releases, or nothing at all, and gets no result.
        """
        plan = StepPlan(self.num_rows, weights_version=self.ledger.weights_version)
        if not self.running:
            self.ledger.settle_idle()
        self._fork_beams(plan)
        tokens = self._allot(plan)
        if not plan.preempted and (tokens or not self.running):
            self._admit(plan, tokens)
        self._prefilling = {sequence: None for sequence in self._prefilling if sequence.num_pending > 0}
        plan.parts = self._last_parts = Parts.of(tokens, self._last_parts)
        plan.num_steps, plan.num_proposals = self._extend(tokens)
        self.least_available_blocks = min(self.least_available_blocks, self.ledger.num_available_blocks)
        plan.releases, self._releases = self._releases, []
        plan.drops = self.ledger.take_drops()
        if tokens:  # only then a result comes back; else the credits count towards the next plan that has one
            self.ledger.dispatch()
            self._in_flight.append((tokens, plan.num_later_tokens))
        return plan

    def settle(self, num_free_blocks: int) -> None:
        """The result of the oldest plan in flight is there, with the device's count of free blocks."""
        self.ledger.settle(num_free_blocks)
        self._in_flight.popleft()

    def runs_ahead(self, plan: StepPlan) -> bool:
        """Whether the next plan can be made before the last one's result is there.

        Not where only the result says how far a row has come, or what has passed a window; and not where someone waits
        while a row comes to its end, whose place would stay empty for a step.
        """
        if plan.num_proposals or self._beams.running or self.ledger.window is not None:
            return False
        return not self.waiting or not any(_at_end(sequence) for sequence in plan.parts.sequences)

    # How a plan comes about: tokens first, then blocks, then newcomers, then further inner steps.

    def _allot(self, plan: StepPlan) -> dict[Sequence, int]:
        """Gives running sequences their tokens and blocks; returns how many tokens each computes."""
        going = [s for s in self.running if not _at_end(s)] if self._in_flight else self.running
        tokens = dict.fromkeys(going, 1)
        left = self.max_num_batched_tokens - len(tokens)
        for sequence in sorted(self._prefilling, key=_arrival):
            more = min(sequence.num_pending - 1, left)
            tokens[sequence] += more
            left -= more
        growths = self.ledger.growths(tokens)
        needed = sum(growths.values())
        if needed <= self._num_available_blocks:
            self.ledger.debit(needed)
            self.ledger.advance_all(tokens, growths)
            return tokens
        if self._in_flight:  # before anybody gives way, the result is awaited: it may bring an end
            return {}
        scheduled: dict[Sequence, int] = {}
        for sequence, num_tokens in tokens.items():
            if sequence.row is None:
                continue  # preempted for an earlier one in this very plan
            if self._reserve(sequence, num_tokens, plan):
                self.ledger.advance(sequence, sequence.num_computed + num_tokens)
                scheduled[sequence] = num_tokens
        return scheduled

    def _reserve(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Debits the blocks for `num_tokens` more, preempting later arrivals; False if it had to give way itself."""
        needed = self.ledger.growth(sequence, num_tokens)
        while sequence.request.beams is None and needed > self._num_available_blocks:
            victim = next(s for s in reversed(self.running) if s.request.beams is None)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        self.ledger.debit(needed)
        return True

    def _admit(self, plan: StepPlan, tokens: dict[Sequence, int]) -> None:
        """Starts waiting sequences while rows, tokens and blocks last, and adds what they compute to `tokens`.

        A sequence starts only if all its known tokens will fit beside what earlier ones still have to prefill.
        """
        if not self.waiting or len(self.running) + self._beams.num_rows >= self.max_running:
            return
        held: list[Sequence] = []
        try:
            self._start_waiting(plan, tokens, held)
        finally:
            for sequence in held:
                self.waiting.add(sequence)

    def _start_waiting(self, plan: StepPlan, tokens: dict[Sequence, int], held: list[Sequence]) -> None:
        """Starts sequences in order of arrival, and moves those that have to wait for a prefix to `held`."""
        budget = self.max_num_batched_tokens - sum(tokens.values())
        owed = sum(self.ledger.room(s.num_computed, self.reserved_len(s)) for s in self.owing())
        coming = self._keys_to_come(tokens)
        while self.waiting and budget > 0 and len(held) < MOST_HELD:
            sequence = self.waiting.first
            num_rows = 1 if sequence.request.beams is None else len(sequence.request.sequences)
            if len(self.running) + self._beams.num_rows + num_rows > self.max_running:
                break
            if held and held[-1].request is sequence.request:  # its samples wait together
                held.append(self.waiting.pop())
                continue
            start = find_start(self.ledger, sequence, tokens, plan, coming)
            if start is None:
                held.append(self.waiting.pop())
                continue
            watermark = self.watermark_blocks if self.running else 0
            if self._start_cost(sequence, start) + watermark + owed > self._num_available_blocks:
                break
            self.waiting.pop()
            self._start_row(sequence, start, plan)
            tokens[sequence] = num_tokens = min(sequence.num_pending, budget)
            budget -= num_tokens
            self.ledger.debit(self.ledger.growth(sequence, num_tokens))
            self.ledger.advance(sequence, sequence.num_computed + num_tokens)
            coming |= self._keys_to_come({sequence: num_tokens})
            owed += self.ledger.room(sequence.num_computed, self.reserved_len(sequence))

    def _keys_to_come(self, tokens: dict[Sequence, int]) -> set[BlockKey]:
        """Of the sequences that fill a block in this plan or one in flight, or prefill."""
        if self.ledger.cache is None:
            return set()
        tokens = dict(tokens)
        for earlier, more in self._in_flight:
            tokens |= {s: tokens.get(s, 0) + count + more for s, count in earlier.items() if s.row is not None}
        size, prefilling = self.block_size, self._prefilling
        fill = {s: count for s, count in tokens.items() if s.num_computed % size < count or s in prefilling}
        return keys_to_come(self.ledger, fill)

    def owing(self) -> Iterable[Sequence]:
        """Running sequences that may have computed less than `reserved_len` when all have their tokens."""
        return self._prefilling

    def reserved_len(self, sequence: Sequence) -> int:
        """Tokens for which an admitted sequence has room set aside: those it knows. What it generates has to find its
        own, by preemption if need be; that is what fills the pool."""
        return sequence.num_tokens

    def _start_cost(self, sequence: Sequence, start: Start) -> int:
        """Blocks that starting there takes from those available, for all known tokens of the sequence."""
        num_shared = start.num_tokens // self.block_size
        shared = [block for block in start.blocks[:num_shared] if block is not None]
        woken = sum(block.num_rows == 0 for block in shared)
        if sequence.request.beams is not None:
            return self._beams.most_blocks(sequence.request) - len(shared) + woken
        return self.ledger.room(num_shared * self.block_size, self.reserved_len(sequence)) + woken

    def _start_row(self, sequence: Sequence, start: Start, plan: StepPlan) -> None:
        sequence.row = self._free_rows.pop()
        sequence.weights_version = self.ledger.weights_version
        insort(self.running, sequence, key=_arrival)
        self._prefilling[sequence] = None
        if sequence.request.beams is not None:
            self._beams.running[sequence.request] = None
        cached = start.blocks if start.parent is None else []
        ids = tuple(NULL_BLOCK if block is None else block.known_id for block in cached)
        plan.admits.append(Admission(sequence, start.num_tokens, ids, start.parent))
        self.ledger.share(sequence, start.blocks, start.num_tokens)
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start.num_tokens
            self.num_cached_tokens += start.num_tokens
            self.num_prompt_tokens += len(request.prompt_ids)

    def _extend(self, tokens: dict[Sequence, int]) -> tuple[int, int]:
        """How many inner steps: no more than the shortest remaining work, and one while anyone prefills or searches.
        And how many proposals of a row in each: none in these cases. Where blocks are short, steps go first."""
        one_at_most = self.decode_steps == 1 and not self.num_speculative_tokens
        if one_at_most or not tokens or self._prefilling or self._beams.running or max(tokens.values()) > 1:
            return 1, 0
        left = [sequence.end_len - sequence.num_computed for sequence in tokens]
        steps = min(self.decode_steps, *left)
        places = self.max_num_batched_tokens // len(tokens)
        proposals = min(self.num_speculative_tokens, places - 1, max(left) - 1)
        if proposals > 0 and any(sequence.next_score is not None for sequence in tokens):
            proposals = 0  # a step that verifies has no logprobs of known tokens
        while steps > 1 or proposals > 0:
            # A row's last token is never computed: all but one of those left need a slot, and one of them has it.
            more = [min(steps * (1 + proposals), tokens_left) - 1 for tokens_left in left]
            growths = self.ledger.growths(later := dict(zip(tokens, more, strict=True)))
            needed = sum(growths.values())
            if needed <= self._num_available_blocks:
                self.ledger.debit(needed)
                if not proposals:  # else only the result says how many it were
                    self.ledger.advance_all(later, growths)
                break
            steps, proposals = (steps - 1, proposals) if steps > 1 else (1, proposals - 1)
        return steps, proposals

    # Beam searches

    @property
    def _num_available_blocks(self) -> int:
        """Blocks that can be had without those set aside for beam searches."""
        return self.ledger.num_available_blocks - self._beams.num_blocks

    def _fork_beams(self, plan: StepPlan) -> None:
        for request, parents in self._forks.items():
            sequences = request.sequences
            rows = [sequences[parent].row for parent in parents]
            self.ledger.fork(sequences, parents)
            for sequence, row in zip(sequences, rows, strict=True):
                if sequence.row is None:
                    sequence.row, sequence.arrival = self._free_rows.pop(), sequences[0].arrival
                    sequence.weights_version = sequences[0].weights_version
                    insort(self.running, sequence, key=_arrival)
                plan.admits.append(Admission(sequence, sequence.num_computed, parent=row))
        self._forks.clear()

    # Rows

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        assert sequence.row is not None
        self.running.remove(sequence)
        self._log_preemption(sequence, "blocks")
        self._release(sequence)
        self.waiting.add(sequence)
        plan.preempted.append(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _log_preemption(self, sequence: Sequence, reason: PreemptionReason) -> None:
        preemption = Preemption(sequence.request.request_id, sequence.index, sequence.num_computed, reason)
        self._preemptions.append(preemption)

    def _release(self, sequence: Sequence) -> None:
        """The one way out of a row: finish, abort, preemption and errors all come here."""
        assert sequence.row is not None
        for tokens, more in self._in_flight:
            if sequence in tokens:
                self.ledger.take_back(sequence, tokens[sequence] + more)
        self.ledger.release(sequence)
        self._releases.append(sequence.row)
        self._free_rows.append(sequence.row)
        self._prefilling.pop(sequence, None)
        sequence.row = None
        sequence.epoch += 1
        searches = sequence.request.beams is not None
        if searches and all(other.row is None for other in sequence.request.sequences):
            self._beams.running.pop(sequence.request, None)


def _at_end(sequence: Sequence) -> bool:
    """Whether it has come to its length once all plans in flight have run: its last token needs no K/V."""
    return sequence.num_computed >= sequence.end_len - 1


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
