"""pagedjax.capacity: how many rows run, predicted from lengths, against the real scheduler."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from host_loop import Loop

from pagedjax import capacity
from pagedjax.capacity import KVShape
from pagedjax.capacity.lengths import BlockCounts

Lengths = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool, limits, and requests drawn from lognormal lengths."""

    lengths: Lengths
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    window: int | None

    @staticmethod
    def draw(seed: int) -> Case:
        rng = random.Random(seed)
        block_size = rng.choice([4, 8, 16])
        return Case(
            lengths=[(lognormal(rng, 30), lognormal(rng, 40)) for _ in range(rng.randint(10, 40))],
            num_blocks=rng.randint(200 // block_size + 2, 1000 // block_size),
            block_size=block_size,
            max_num_seqs=rng.choice([2, 8, 64]),
            max_num_batched_tokens=rng.choice([16, 64, 256]),
            watermark=rng.choice([0.0, 0.01, 0.1]),
            window=rng.choice([None, None, 24, 50]),
        )

    def plan(self) -> capacity.CapacityPlan:
        options = dataclasses.asdict(self)
        shape = KVShape(1, 1, 8, window=options.pop("window"))
        return capacity.plan(shape, trace=options.pop("lengths"), **options)


def lognormal(rng: random.Random, mean: float) -> int:
    return max(1, min(100, int(rng.lognormvariate(math.log(mean) - 0.5, 1))))


class Measured:
    """What the scheduler does with a case, weighted by the inner steps of its plans."""

    def __init__(self, case: Case, decode_steps: int, arrivals: list[int] | None = None) -> None:
        self.loop = Loop(
            case.num_blocks,
            case.block_size,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            watermark=case.watermark,
            window=case.window,
            max_model_len=2048,
            decode_steps=decode_steps,
        )
        self.loop.during = self._look
        self._lines: list[tuple[int, int, int, int]] = []  # running, waiting, live tokens, slots
        weights = []
        todo = list(zip(arrivals or [0] * len(case.lengths), case.lengths, strict=True))
        while todo or self.loop.scheduler.running or self.loop.scheduler.waiting:
            while todo and todo[0][0] <= sum(weights):
                self.loop.add(*todo.pop(0)[1])
            weights.append(self.loop.step().num_steps)
        self.num_steps = sum(weights)
        self.num_preemptions = self.loop.scheduler.num_preemptions
        lines = list(zip(weights, self._lines, strict=True))
        in_wait = [(weight, line) for weight, line in lines if line[1]]
        self.mean_running, self.live_share = self._means(lines)
        self.mean_running_waiting, self.live_share_waiting = self._means(in_wait)
        self.num_steps_waiting = sum(weight for weight, _ in in_wait)

    def _look(self) -> None:
        size = self.loop.scheduler.block_size
        running = self.loop.scheduler.running
        held = sum(block is not None for sequence in running for block in sequence.blocks)
        live = sum(sequence.num_computed - size * sequence.blocks.count(None) for sequence in running)
        self._lines.append((len(running), len(self.loop.scheduler.waiting), live, held * size))

    def _means(self, lines: list[Any]) -> tuple[float, float]:
        total = [sum(weight * line[index] for weight, line in lines) for index in range(4)]
        return total[0] / max(sum(weight for weight, _ in lines), 1), total[2] / max(total[3], 1)


@pytest.mark.parametrize("seed", range(16))
def test_the_replay_is_what_the_scheduler_does(seed: int) -> None:
    case = Case.draw(seed)
    measured, replayed = Measured(case, decode_steps=1), case.plan().replay
    assert replayed is not None
    for name in ("num_steps", "num_steps_waiting", "num_preemptions"):
        assert getattr(replayed, name) == getattr(measured, name), name
    for name in ("mean_running", "mean_running_waiting", "live_share", "live_share_waiting"):
        assert getattr(replayed, name) == pytest.approx(getattr(measured, name)), name


def test_the_cases_are_of_all_kinds() -> None:
    """What the cases above would not notice is not shown by them."""
    plans = [Case.draw(seed).plan() for seed in range(16)]
    replays = [plan.replay for plan in plans if plan.replay is not None]
    assert sum(replay.num_preemptions > 0 for replay in replays) >= 3
    assert sum(replay.peak_running == plan.max_num_seqs for replay, plan in zip(replays, plans, strict=True)) >= 3
    assert sum(plan.shape.window is not None for plan in plans) >= 3


def test_the_watermark_holds_for_those_that_start_together() -> None:
    case = Case([(3, 5)] * 12, 11, 8, 64, 256, 0.2, None)
    replayed = case.plan().replay
    assert replayed is not None
    assert replayed.peak_running == 8
    assert replayed.mean_running == Measured(case, decode_steps=1).mean_running


@pytest.mark.parametrize("seed", range(4))
def test_several_inner_steps_change_little(seed: int) -> None:
    case = Case.draw(seed)
    measured, plan = Measured(case, decode_steps=8), case.plan()
    assert plan.mean_running == pytest.approx(measured.mean_running, rel=0.1)
    assert plan.mean_running_waiting == pytest.approx(measured.mean_running_waiting, rel=0.1)


def test_arrivals() -> None:
    case = dataclasses.replace(Case.draw(1), num_blocks=100)
    rng = random.Random(0)
    arrivals = sorted(rng.randrange(60) for _ in case.lengths)
    arrivals[0] = 0
    measured = Measured(case, decode_steps=1, arrivals=arrivals)
    fields = dataclasses.asdict(case)
    shape = KVShape(1, 1, 8, window=fields.pop("window"))
    plan = capacity.plan(shape, trace=fields.pop("lengths"), arrivals=arrivals, **fields)
    assert plan.replay is not None
    assert plan.replay.num_steps == measured.num_steps
    assert plan.mean_running == pytest.approx(measured.mean_running)


def test_nobody_runs_between_arrivals_far_apart() -> None:
    plan = capacity.plan(KVShape(1, 1, 8), num_blocks=9, trace=[(3, 5), (2, 4)], arrivals=[7, 1000])
    assert plan.replay is not None
    assert (plan.replay.num_steps, plan.mean_running) == (9, 1.0)
    assert plan.mean_running_waiting is None
    assert "nobody waits" in str(plan)


@pytest.mark.parametrize(("prompt_len", "output_len"), [(40, 60), (10, 90), (80, 12)])
def test_the_formula_for_constant_lengths(prompt_len: int, output_len: int) -> None:
    """Rows x mean blocks = what the pool carries; the beginning, when all are young, still shows."""
    lengths = [(prompt_len, output_len)] * 150
    case = Case(lengths, 101, 8, 64, 256, 0.01, None)
    plan = capacity.plan(
        *(KVShape(1, 1, 8),),
        num_blocks=101,
        block_size=8,
        max_num_batched_tokens=256,
        mean_prompt_len=prompt_len,
        mean_output_len=output_len,
    )
    mean_blocks = sum(math.ceil((prompt_len + t) / 8) for t in range(output_len)) / output_len
    assert plan.mean_running == pytest.approx(99 / mean_blocks)
    assert plan.mean_running == pytest.approx(Measured(case, decode_steps=1).mean_running_waiting, rel=0.1)


@pytest.mark.parametrize("window", [None, 5, 16])
def test_blocks_over_a_life_are_what_a_row_holds(window: int | None) -> None:
    """Alone, in an endless pool, step by step."""
    for prompt_len, output_len in ((1, 30), (13, 25), (30, 1)):
        loop = Loop(100, 4, window=window)
        loop.add(prompt_len, output_len)
        held = []

        def look(loop: Loop = loop, held: list[int] = held) -> None:
            held.append(sum(block is not None for block in loop.scheduler.running[0].blocks))

        loop.during = look
        while loop.scheduler.waiting or loop.scheduler.running:
            loop.step()
        counts = BlockCounts(4, window, 64)
        assert counts.over_life(prompt_len, output_len).tolist() == held
        assert max(held) <= counts.at_most(prompt_len + output_len - 1)
        assert counts.at_most(prompt_len + output_len - 1) == loop.ledger.room(0, prompt_len + output_len - 1)


def test_lengths_beyond_the_model_are_cut() -> None:
    plan = capacity.plan(KVShape(1, 1, 8), num_blocks=9, max_model_len=10, trace=[(4, 100)])
    assert plan.lengths == ((4, 6),)
