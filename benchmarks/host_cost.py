"""What a step costs on the host: against the running rows, the size of the pool, and the length of the queue.

Measured where as many requests start and end as in any long run: every row generates `OUTPUT_LEN` tokens, the rows are
out of step with each other, and each that ends is followed by one from the queue, to which one is added.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from simulated_chip import H100_8B
from simulation import Setup, Simulation

PROMPT_LEN, OUTPUT_LEN = 64, 64
BLOCK_SIZE = 16
BLOCKS_EACH = (PROMPT_LEN + OUTPUT_LEN) // BLOCK_SIZE

RUNNING = (1, 4, 16, 64, 256, 1024)
NUM_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
WAITING = (10, 100, 1_000, 10_000, 100_000)
FEW_ROWS = 64  # that run where the pool or the queue is varied


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Medians over steps, in microseconds.

    Attributes:
        schedule_us: making the plan; CPU time of the thread, as `update_us`: what else the machine does is not in it.
        update_us: the rest of `Engine.step` but for outputs.
        table_us: the plan's release and append in the block table, called and waited for, on the CPU.
    """

    num_running: int
    num_blocks: int
    num_waiting: int
    schedule_us: float
    update_us: float
    table_us: float


def measure(num_running: int, num_blocks: int, num_waiting: int, *, num_steps: int = 300) -> HostCost:
    """The cost of a step with so many rows running, blocks in the pool and requests waiting."""
    setup = Setup(
        "host cost",
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

    for _ in range(3):  # the first compiles
        step()
    schedule_seconds = _timed(simulation.scheduler, "schedule")
    table_seconds = _timed(simulation.chip, "run", time.perf_counter)
    first = len(simulation.timeline.host_seconds)
    gc.collect()
    gc.freeze()  # else the collector would look at every waiting request, over and over
    for _ in range(num_steps):
        step()
    gc.unfreeze()
    updates = [
        host - schedule
        for host, schedule in zip(simulation.timeline.host_seconds[first:], schedule_seconds, strict=True)
    ]
    medians = [1e6 * statistics.median(seconds) for seconds in (schedule_seconds, updates, table_seconds)]
    return HostCost(num_running, num_blocks, num_waiting, *medians)


def _timed(owner: Any, name: str, clock: Callable[[], float] = time.thread_time) -> list[float]:
    """The seconds of every later call of a method."""
    real, seconds = getattr(owner, name), []

    def call(*args: Any) -> Any:
        start = clock()
        result = real(*args)
        seconds.append(clock() - start)
        return result

    setattr(owner, name, call)
    return seconds


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
