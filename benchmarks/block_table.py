"""How fast the block table's `append` is: jitted and donated, against loops over the sequences in Python.

Run it from the root of the repository: `JAX_PLATFORMS=cpu python benchmarks/block_table.py`. A transition gives every
row a token, and one row in `BLOCK_SIZE` a new block: they are out of step. What it is compared with: `a call a row`
makes the same transition on the same arrays for one sequence after another; `python lists` keeps the table in lists on
the host, from where every step would have to upload it. Variants take turns, so that what else the machine does meets
all of them. Prints a table, and a line of JSON a case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import block_table
from pagedjax.block_table import BlockTable

NUM_ROWS, MAX_BLOCKS_PER_SEQ, BLOCK_SIZE = 256, 512, 16
NUM_BLOCKS = (65_536, 1_048_576)


@dataclasses.dataclass(frozen=True)
class Case:
    """Medians over transitions, in microseconds of wall time.

    Attributes:
        append_us: one call of `append` for all rows, waited for.
        call_a_row_us: as many calls as rows.
        lists_us: the same in lists.
    """

    num_blocks: int
    append_us: float
    call_a_row_us: float
    lists_us: float

    @property
    def per_second(self) -> float:
        return 1e6 / self.append_us


class Lists:
    """The table as a straightforward allocator has it."""

    def __init__(self, num_blocks: int, lengths: Sequence[int]) -> None:
        self.free = list(range(num_blocks - 1, block_table.NULL_BLOCK, -1))
        self.blocks: list[list[int]] = [[] for _ in lengths]
        self.lengths = [0] * len(lengths)
        self.append(lengths)

    def append(self, num_new_tokens: Sequence[int]) -> None:
        for row, count in enumerate(num_new_tokens):
            self.lengths[row] += count
            while len(self.blocks[row]) * BLOCK_SIZE < self.lengths[row]:
                self.blocks[row].append(self.free.pop())


class Arrays:
    """The real table, in an array program that updates it in place."""

    def __init__(self, num_blocks: int, lengths: Sequence[int]) -> None:
        table = block_table.create(num_blocks, BLOCK_SIZE, len(lengths), MAX_BLOCKS_PER_SEQ)
        self.table: BlockTable = jax.tree.map(lambda leaf: leaf + 0, table)  # a buffer each: all are donated
        example = np.zeros(len(lengths), np.int32)
        self._append = jax.jit(block_table.append, donate_argnums=0).lower(self.table, example).compile()
        self.append(np.array(lengths, np.int32))

    def append(self, num_new_tokens: Any) -> None:
        self.table, _, _ = self._append(self.table, num_new_tokens)

    def wait(self) -> None:
        jax.block_until_ready(self.table)


def measure(num_blocks: int, *, num_rows: int = NUM_ROWS, num_steps: int = 200, num_slow_steps: int = 5) -> Case:
    """One pool's case."""
    lengths = [1 + row % BLOCK_SIZE for row in range(num_rows)]  # out of step with each other
    at_once, one_by_one, lists = (make(num_blocks, lengths) for make in (Arrays, Arrays, Lists))
    all_rows = jnp.ones(num_rows, jnp.int32)
    each_row = [jnp.asarray(line) for line in np.eye(num_rows, dtype=np.int32)]

    def call_a_row() -> None:
        for row in each_row:
            one_by_one.append(row)
        one_by_one.wait()

    def call() -> None:
        at_once.append(all_rows)
        at_once.wait()

    seconds: dict[Callable[[], None], list[float]] = {
        call: [],
        call_a_row: [],
        (in_lists := lambda: lists.append([1] * num_rows)): [],
    }
    for step in range(num_steps):
        for function, times in seconds.items():
            if function is call_a_row and step >= num_slow_steps:
                continue
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    for arrays, steps in ((at_once, num_steps), (one_by_one, num_slow_steps)):
        block_table.check(arrays.table)
        assert arrays.table.seq_lens.tolist() == [length + steps for length in lengths]
    medians = [1e6 * statistics.median(seconds[function]) for function in (call, call_a_row, in_lists)]
    return Case(num_blocks, *medians)


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=list(NUM_BLOCKS))
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--steps", type=int, default=200, help="that a figure is the median of")
    options = parser.parse_args(arguments)
    print(f"a token for each of {options.rows} rows of up to {MAX_BLOCKS_PER_SEQ} blocks; microseconds, medians")
    print(f"{'blocks':>10}{'append':>9}{'a second':>11}{'a call a row':>14}{'as slow':>9}{'python lists':>14}")
    cases = []
    for num_blocks in options.blocks:
        case = measure(num_blocks, num_rows=options.rows, num_steps=options.steps)
        print(
            f"{num_blocks:>10,}{case.append_us:>9,.0f}{case.per_second:>11,.0f}{case.call_a_row_us:>14,.0f}"
            f"{case.call_a_row_us / case.append_us:>8,.0f}x{case.lists_us:>14,.0f}",
            flush=True,
        )
        cases.append(case)
    for case in cases:
        print(json.dumps(dataclasses.asdict(case)))
    return cases


if __name__ == "__main__":
    main()
