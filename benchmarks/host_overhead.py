"""What a step costs on the host: against the running rows, the size of the pool, and the length of the queue.

Run it from the root of the repository: `python benchmarks/host_overhead.py`. Measured where as many requests start and
end as in any long run: every row generates `OUTPUT_LEN` tokens, the rows are out of step with each other, and each that
ends is followed by one from the queue, to which one is added. Prints a table, and a line of JSON a case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flax import nnx
from simulated_chip import H100_8B
from simulation import Setup, Simulation

from pagedjax import LLM, ModelConfig, SamplingParams
from pagedjax.decoder import Decoder
from pagedjax.plan import StepPlan

PROMPT_LEN, OUTPUT_LEN = 64, 128
BLOCK_SIZE = 64
BLOCKS_EACH = (PROMPT_LEN + OUTPUT_LEN) // BLOCK_SIZE

RUNNING = (1, 16, 64, 256, 1024)
NUM_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
WAITING = (10, 100, 1_000, 10_000, 100_000)
FEW_ROWS = 64  # that run where the pool or the queue is varied

# As small as a model can be: what it computes is not measured, and its pool of 1,000,000 blocks has to fit.
TINY = ModelConfig("llama", 8, 2, 2, 1, 1, 1, 2, PROMPT_LEN + OUTPUT_LEN)


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Medians over steps, in microseconds: CPU time of the thread, so that what else the machine does is not in it.

    Attributes:
        schedule_us: making the plan.
        plan_us: its counts as an array, and their sum.
        update_us: the rest of `Engine.step`, with a chip that is not counted.
        table_us: the plan's release and append in the block table, called and waited for, on the CPU; wall time.
    """

    num_running: int
    num_blocks: int
    num_waiting: int
    schedule_us: float
    plan_us: float
    update_us: float
    table_us: float


@dataclasses.dataclass(frozen=True)
class RunnerCost:
    """Medians as in `HostCost`, of a real runner's steps.

    Attributes:
        apply_us: from the plan to the call of the program.
        fetch_us: taking the result to the host, without the time it is waited for.
    """

    apply_us: float
    fetch_us: float


def measure(num_running: int, num_blocks: int, num_waiting: int, *, num_steps: int = 300) -> HostCost:
    """The cost of a step with so many rows running, blocks in the pool and requests waiting."""
    setup = Setup(
        "host overhead",
        num_blocks - 1,
        num_running,
        PROMPT_LEN + OUTPUT_LEN,
        BLOCK_SIZE,
        watermark=0.0,
        max_num_batched_tokens=(PROMPT_LEN + 1) * num_running,
    )
    simulation = Simulation(setup, H100_8B)
    for index in range(num_running):
        simulation.add(PROMPT_LEN, 1 + (index + 1) * (OUTPUT_LEN - 1) // num_running)
    for _ in range(num_waiting):
        simulation.add(PROMPT_LEN, OUTPUT_LEN)
    total = num_running + num_waiting

    def step() -> None:
        simulation.step()
        while len(simulation.engine.requests) < total:
            simulation.add(PROMPT_LEN, OUTPUT_LEN)

    def count(plan: StepPlan) -> tuple[np.ndarray, int]:
        return plan.num_new_tokens, plan.total_new_tokens

    for _ in range(3):  # the first compiles
        step()
    counts = Timed(count)
    schedules = Timed(simulation.scheduler.schedule, after=counts)
    tables = Timed(simulation.chip.run, time.perf_counter)
    simulation.scheduler.schedule, simulation.chip.run = schedules, tables  # type: ignore[method-assign]
    parts: list[tuple[float, float, float]] = []  # of each step: schedule, plan, update

    def timed_step() -> None:
        first = len(schedules.seconds)
        step()
        schedule, plan = sum(schedules.seconds[first:]), sum(counts.seconds[first:])  # two, where the first had no room
        parts.append((schedule, plan, simulation.timeline.host_seconds[-1] - schedule - plan))

    _run(timed_step, num_steps)
    medians = [_median_us(seconds) for seconds in (*zip(*parts, strict=True), tables.seconds)]
    return HostCost(num_running, num_blocks, num_waiting, *medians)


def measure_runner(num_running: int, num_blocks: int, *, num_steps: int = 30) -> RunnerCost:
    """The cost of a real runner's part, where all rows decode."""
    llm = LLM(
        Decoder(TINY, rngs=nnx.Rngs(0)),
        max_model_len=PROMPT_LEN + OUTPUT_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running,
        decode_steps=1,
        enable_prefix_caching=False,
        batch_invariant=True,
    )
    for index in range(num_running):
        llm.add_request(str(index), [1], SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True))
    for _ in range(3):
        llm.step()
    runner = llm._runner
    fetches = Timed(runner._fetch)
    runs = Timed(runner.run)
    runner._fetch, runner.run = fetches, runs  # type: ignore[method-assign]
    _run(lambda: llm.step(), num_steps)
    applies = [run - fetch for run, fetch in zip(runs.seconds, fetches.seconds, strict=True)]
    return RunnerCost(_median_us(applies), _median_us(fetches.seconds))


class Timed:
    """A function that remembers the seconds of its calls.

    Args:
        function: what is called.
        clock: whose seconds.
        after: called with each result; not in the time.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        clock: Callable[[], float] = time.thread_time,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self._function, self._clock, self._after = function, clock, after
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        start = self._clock()
        result = self._function(*args)
        self.seconds.append(self._clock() - start)
        if self._after is not None:
            self._after(result)
        return result


def _run(step: Callable[[], Any], num_steps: int) -> None:
    gc.collect()
    gc.freeze()  # else the collector would look at every waiting request, over and over
    for _ in range(num_steps):
        step()
    gc.unfreeze()


def _median_us(seconds: Iterable[float]) -> float:
    return 1e6 * statistics.median(seconds)


def host_costs(
    running: Sequence[int] = RUNNING,
    num_blocks: Sequence[int] = NUM_BLOCKS,
    waiting: Sequence[int] = WAITING,
    *,
    num_steps: int = 300,
) -> dict[str, list[HostCost]]:
    """One thing varied at a time, by its name; the others stay at their smallest that fits."""
    pool = max(running) * BLOCKS_EACH + 1
    few = min(FEW_ROWS, max(running))
    return {
        "num_running": [measure(rows, pool, 0, num_steps=num_steps) for rows in running],
        "num_blocks": [measure(few, blocks, 0, num_steps=num_steps) for blocks in num_blocks],
        "num_waiting": [measure(few, pool, length, num_steps=num_steps) for length in waiting],
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(RUNNING))
    parser.add_argument("--blocks", type=int, nargs="+", default=[NUM_BLOCKS[0], NUM_BLOCKS[-1]])
    parser.add_argument("--steps", type=int, default=300, help="that a figure is the median of")
    options = parser.parse_args(arguments)
    columns = ("schedule", "plan", "apply", "fetch", "update", "table")
    print("microseconds a step, medians; * is schedule + plan + update")
    print(f"{'rows':>6}{'blocks':>11}" + "".join(f"{name:>10}" for name in columns) + f"{'*':>10}")
    cases = []
    for rows in options.rows:
        for blocks in options.blocks:
            if rows * BLOCKS_EACH >= blocks:
                continue  # they don't fit
            cost = measure(rows, blocks, 0, num_steps=options.steps)
            case = dataclasses.asdict(cost) | dataclasses.asdict(measure_runner(rows, blocks))
            case["schedule_plan_update_us"] = cost.schedule_us + cost.plan_us + cost.update_us
            figures = [case[f"{name}_us"] for name in (*columns, "schedule_plan_update")]
            print(f"{rows:>6}{blocks:>11,}" + "".join(f"{figure:>10,.0f}" for figure in figures), flush=True)
            cases.append(case)
    for case in cases:
        print(json.dumps(case))
    return cases


if __name__ == "__main__":
    main()
