"""A trace run through the scheduler's rules, without a model: how many rows run, and how full their blocks are.

The rules are those of `pagedjax.scheduler` for plain requests: every running row gets a token a step, prompts are
computed in chunks within the budget; where blocks are short, the latest arrival is preempted and nobody is admitted;
else the queue is admitted in order while rows and tokens last, and the blocks of all known tokens fit beside the
watermark. Nothing is shared. A step here is one token a row; the engine may run several between two looks at the queue.

Dimensions: N requests in order of arrival, R rows that run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from pagedjax.capacity.lengths import BlockCounts


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay has seen. Means are over steps, which are as long as one another here.

    Attributes:
        num_steps: steps in which anything ran.
        mean_running: rows that ran.
        peak_running: the most of them.
        live_share: tokens with K/V over the slots of the blocks that held them.
        num_preemptions: how often a row had to give way.
        num_steps_waiting: steps at whose end requests waited.
        mean_running_waiting: rows that ran in these; 0.0 where nobody ever waited.
        live_share_waiting: as `live_share`, in these.
    """

    num_steps: int
    mean_running: float
    peak_running: int
    live_share: float
    num_preemptions: int
    num_steps_waiting: int
    mean_running_waiting: float
    live_share_waiting: float


def replay(
    lengths: Sequence[tuple[int, int]],
    *,
    num_usable_blocks: int,
    counts: BlockCounts,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    watermark: float,
    arrivals: Sequence[float] | None = None,
) -> Replay:
    """Runs a trace to its end.

    Args:
        lengths: prompt and output tokens of each request, in order of arrival.
        num_usable_blocks: of the pool, without the null block.
        counts: blocks by tokens.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step.
        watermark: share of the pool that an admission leaves free while others run.
        arrivals: the step at which each request arrives, ascending; None: all at once.

    Raises:
        ValueError: a request that could never be finished.
    """
    _check_fit(lengths, num_usable_blocks, counts)
    run = _Run(lengths, num_usable_blocks, counts, min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens)
    run.watermark_blocks = math.ceil(watermark * num_usable_blocks)
    times = [0.0] * len(lengths) if arrivals is None else list(arrivals)
    clock, num_arrived = 0.0, 0
    while num_arrived < len(lengths) or run.waiting or run.rows.size:
        if not run.waiting and not run.rows.size:
            clock = max(clock, times[num_arrived])  # idle until then
        while num_arrived < len(lengths) and times[num_arrived] <= clock:
            run.waiting.append(num_arrived)
            num_arrived += 1
        run.step()
        clock += 1
    return run.result()


def _check_fit(lengths: Sequence[tuple[int, int]], num_usable_blocks: int, counts: BlockCounts) -> None:
    for number, (prompt_len, output_len) in enumerate(lengths):
        needed = counts.at_most(prompt_len + output_len - 1)
        if needed > num_usable_blocks:
            raise ValueError(
                f"request {number} of the trace, {prompt_len} prompt and {output_len} output tokens, needs {needed} "
                f"blocks of {counts.block_size} tokens, and the pool has {num_usable_blocks} usable ones; give more "
                "memory, or lower max_model_len"
            )


class _Run:
    """The rows and the queue, and the sums that become means."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        num_usable_blocks: int,
        counts: BlockCounts,
        max_running: int,
        budget: int,
    ) -> None:
        self.num_usable_blocks, self.counts = num_usable_blocks, counts
        self.max_running, self.budget = max_running, budget
        self.watermark_blocks = 0
        table = np.array(lengths, np.int64).reshape(-1, 2)
        self.known = table[:, 0].copy()  # [N] tokens, prompt and drawn
        self.end = table.sum(axis=1)  # [N] known tokens at which a request has ended
        self.computed = np.zeros_like(self.known)  # [N]
        self.rows = np.zeros(0, np.int64)  # [R] requests that run, by arrival
        self.waiting: deque[int] = deque()
        self.num_preemptions = self.peak_running = 0
        # Steps, rows, live tokens, slots: in all steps, and in those that ended with a queue.
        self.sums = np.zeros((2, 4))

    def step(self) -> None:
        tokens = self._allot()
        if not self._preempt(tokens):
            tokens = self._admit(tokens)
        tokens = tokens[: self.rows.size]
        rows, before = self.rows, self.computed[self.rows]
        held = self.counts.covering(before + tokens) - self.counts.passed(before)
        self.computed[rows] += tokens
        self._count(int(held.sum()), int((before + tokens - self.counts.passed(before) * self.counts.block_size).sum()))
        drew = rows[self.computed[rows] == self.known[rows]]
        self.known[drew] += 1
        self.rows = rows[self.known[rows] < self.end[rows]]

    def result(self) -> Replay:
        (steps, running, live, slots), in_wait = self.sums.tolist()
        steps_waiting, running_waiting, live_waiting, slots_waiting = in_wait
        return Replay(
            num_steps=int(steps),
            mean_running=running / steps,
            peak_running=self.peak_running,
            live_share=live / slots,
            num_preemptions=self.num_preemptions,
            num_steps_waiting=int(steps_waiting),
            mean_running_waiting=running_waiting / max(steps_waiting, 1),
            live_share_waiting=live_waiting / max(slots_waiting, 1),
        )

    def _allot(self) -> np.ndarray:
        """i64[R] tokens of each row: those that decode first, then prompts by arrival; each gets at least one."""
        pending = self.known[self.rows] - self.computed[self.rows]
        tokens = np.ones_like(pending)
        left = self.budget - tokens.size
        for place in np.flatnonzero(pending > 1):
            tokens[place] += min(pending[place] - 1, left)
            left -= tokens[place] - 1
        return tokens

    def _preempt(self, tokens: np.ndarray) -> bool:
        """Sends latest arrivals back until the others' blocks suffice; whether there was any."""
        before = self.computed[self.rows]
        held = np.cumsum(self.counts.covering(before + tokens) - self.counts.passed(before))  # by the first rows
        num_kept = int(np.searchsorted(held, self.num_usable_blocks, side="right"))
        victims = self.rows[num_kept:]
        self.waiting.extendleft(victims[::-1].tolist())
        self.computed[victims] = 0
        self.rows = self.rows[:num_kept]
        self.num_preemptions += victims.size
        return victims.size > 0

    def _admit(self, tokens: np.ndarray) -> np.ndarray:
        """Starts what fits, and gives the tokens of all rows."""
        if not self.waiting or self.rows.size >= self.max_running:
            return tokens
        counts, before = self.counts, self.computed[self.rows]
        after = before + tokens
        available = self.num_usable_blocks - int((counts.covering(after) - counts.passed(before)).sum())
        left = self.budget - int(tokens.sum())  # if there are any, all rows have computed what they know
        started: list[tuple[int, int]] = []  # requests, and their tokens
        while self.waiting and left > 0 and self.rows.size + len(started) < self.max_running:
            known = int(self.known[self.waiting[0]])
            watermark = self.watermark_blocks if self.rows.size or started else 0
            if counts.at_most(known) + watermark > available:
                break
            chunk = min(known, left)
            started.append((self.waiting.popleft(), chunk))
            left -= chunk
            available -= counts.covering(chunk)  # one that is not computed whole is the last
        if not started:
            return tokens
        new = np.array(started, np.int64)
        self.rows = np.concatenate([self.rows, new[:, 0]])
        return np.concatenate([tokens, new[:, 1]])

    def _count(self, num_blocks: int, live: int) -> None:
        line = (1, self.rows.size, live, num_blocks * self.counts.block_size)
        self.sums[0] += line
        if self.waiting:
            self.sums[1] += line
        self.peak_running = max(self.peak_running, self.rows.size)
