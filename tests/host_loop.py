"""The engine's loop without jax: a scheduler, and a device in plain Python that counts blocks and keeps histories.

The loop checks the scheduler's promises at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedjax.outputs import RequestMetrics
from pagedjax.plan import StepPlan
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.text import OutputText


def next_token(tokens: list[int]) -> int:
    state = 17
    for token in tokens:
        state = (state * 31 + token + 7) % 1009
    return state % 50


class Row:
    """A sequence as the device knows it: copied at admission, never looked at on the host again."""

    def __init__(self, sequence: Sequence) -> None:
        self.tokens = list(sequence.token_ids)
        self.end_len, self.stop_ids = sequence.end_len, sequence.stop_ids
        self.num_computed = 0
        self.active = True


class Device:
    """Rows and blocks. Fails where the scheduler has promised something that is not so."""

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self.num_usable_blocks, self.block_size = num_usable_blocks, block_size
        self.rows: dict[int, Row] = {}

    def blocks(self, row: int) -> int:
        return -(-self.rows[row].num_computed // self.block_size)

    @property
    def num_free_blocks(self) -> int:
        return self.num_usable_blocks - sum(map(self.blocks, self.rows))

    def run(self, plan: StepPlan) -> dict[int, list[int]]:
        """Returns each scheduled row's sampled tokens."""
        for row in plan.releases:
            del self.rows[row]
        for sequence in plan.admits:
            assert sequence.row is not None
            assert sequence.row not in self.rows, "admitted to a row that is taken"
            self.rows[sequence.row] = Row(sequence)
        sampled: dict[int, list[int]] = {row: [] for row in plan.scheduled}
        for step in range(plan.num_steps):
            for row, part in plan.scheduled.items():
                state = self.rows[row]
                if not state.active:
                    continue
                if step == 0:
                    assert state.num_computed == part.first_position
                state.num_computed += part.num_tokens if step == 0 else 1
                assert state.num_computed <= len(state.tokens), "computes tokens that nobody knows"
                if state.num_computed == len(state.tokens):
                    token = next_token(state.tokens)
                    state.tokens.append(token)
                    sampled[row].append(token)
                    state.active = token not in state.stop_ids and len(state.tokens) < state.end_len
            assert self.num_free_blocks >= 0, "the device ran out of blocks"
        return sampled


class Loop:
    """Scheduler and device, and what the engine does between them; checks the scheduler's promises at each step."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **options: Any) -> None:
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200, "watermark": 0.0}
        self.scheduler = Scheduler(num_blocks=num_blocks, block_size=block_size, **(defaults | options))
        self.device = Device(num_blocks - 1, block_size)
        self.arrivals: list[Sequence] = []
        self.during: Callable[[], None] = lambda: None  # runs between the dispatch of a plan and its result
        self.ended: list[Sequence] = []

    def add(self, prompt: int | list[int], max_tokens: int = 10, stop_ids: tuple[int, ...] = ()) -> Sequence:
        ids = [len(self.arrivals) + 1] * prompt if isinstance(prompt, int) else prompt
        request = Request(str(len(self.arrivals)), None, ids, SamplingParams(), RequestMetrics(0.0))
        end_len = min(len(ids) + max_tokens, self.scheduler.max_model_len)
        sequence = Sequence(request, 0, 0, frozenset(stop_ids), end_len, OutputText(None))
        request.sequences = [sequence]
        self.scheduler.add(sequence)
        self.arrivals.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, "abort")
        self.ended.append(sequence)

    def step(self) -> StepPlan:
        oldest = self.scheduler.running[:1]
        computed = [s.num_computed for s in oldest]
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        if oldest:
            assert oldest[0].num_computed > computed[0], "the oldest running sequence stands still"
        sampled = self.device.run(plan)
        num_free_blocks, lens = self.device.num_free_blocks, {r: s.num_computed for r, s in self.device.rows.items()}
        assert self.scheduler.num_free_blocks <= num_free_blocks, "the bound of a plan in flight is above the truth"
        self.during()
        if plan.scheduled:
            self.scheduler.settle(num_free_blocks)
        for row, part in sorted(plan.scheduled.items()):
            if part.sequence.epoch == part.epoch:
                self._take(part.sequence, sampled[row], lens[row])
        self._check_state()
        return plan

    def run(self, max_steps: int = 1000) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            max_steps -= 1
            assert max_steps >= 0, "no end in sight"
            self.step()
        self.step()  # the last releases
        assert not self.device.rows
        assert self.scheduler.num_free_blocks == self.device.num_usable_blocks

    def _take(self, sequence: Sequence, tokens: list[int], num_computed: int) -> None:
        sequence.num_computed = num_computed
        for token in tokens:
            assert not sequence.finished, "a token after the end"
            at_length = sequence.num_tokens + 1 >= sequence.end_len
            sequence.push(token, stopped=token in sequence.stop_ids, at_length=at_length)
        if sequence.finished:
            self.scheduler.finish(sequence)
            self.ended.append(sequence)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.total_new_tokens <= self.scheduler.max_num_batched_tokens
        assert all(part.num_tokens > 0 for part in plan.scheduled.values())
        assert {s.row for s in self.scheduler.running} == set(plan.scheduled), "a running sequence gets nothing"
        assert not plan.preempted or not plan.admits
        assert plan.num_steps == 1 or all(part.num_tokens == 1 for part in plan.scheduled.values())

    def _check_state(self) -> None:
        scheduler = self.scheduler
        order = [self.arrivals.index(s) for s in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order), "somebody was overtaken"
        assert len(set(self.ended)) == len(self.ended)
        releasable = sum(self.device.blocks(row) for row in scheduler._releases)
        assert scheduler.num_free_blocks <= self.device.num_free_blocks + releasable, "the bound is above the truth"
        for sequence in scheduler.running:
            row = self.device.rows[sequence.row]  # type: ignore[index]
            assert (row.tokens, row.num_computed) == (sequence.token_ids, sequence.num_computed)


def alone(prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """What a sequence generates if nothing comes between."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
