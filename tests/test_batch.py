"""The packed view of a step, against a loop over sequences in plain Python."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pagedjax import block_table
from pagedjax.batch import make_batch

BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 4, 40, 5


def expected(table: block_table.BlockTable, counts: list[int], places: int) -> dict[str, list[int]]:
    rows, positions, slots = [], [], []
    for row, count in enumerate(counts):
        for position in range(int(table.seq_lens[row]) - count, int(table.seq_lens[row])):
            rows.append(row)
            positions.append(position)
            block = int(table.block_tables[row, position // BLOCK_SIZE])
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
    padding = places - len(rows)
    return {
        "rows": rows + [NUM_ROWS] * padding,
        "positions": positions + [0] * padding,
        "slot_mapping": slots + [NUM_BLOCKS * BLOCK_SIZE] * padding,
    }


@pytest.mark.parametrize(
    "counts", [[0, 0, 0, 0, 0], [3, 0, 5, 1, 0], [0, 1, 1, 0, 1], [16, 0, 0, 0, 0], [0, 0, 0, 0, 9]]
)
def test_places_rows_one_after_another(counts: list[int]) -> None:
    table = block_table.create(NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, 8)
    for before in ([5, 0, 2, 7, 4], counts):
        table, _, ok = block_table.append(table, np.array(before, np.int32))
        assert ok
    batch = jax.jit(make_batch, static_argnums=2)(table, np.array(counts, np.int32), 16)
    for name, want in expected(table, counts, 16).items():
        np.testing.assert_array_equal(getattr(batch, name), want, err_msg=name)
    np.testing.assert_array_equal(batch.query_start_loc, np.cumsum([0, *counts]))
    np.testing.assert_array_equal(batch.seq_lens, table.seq_lens)
    assert batch.num_tokens == sum(counts)
    assert batch.by_token().num_tokens == sum(counts)


def test_one_place_is_a_decode_step() -> None:
    table = block_table.create(NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, 8)
    assert make_batch(table, np.zeros(NUM_ROWS, np.int32), 1).max_query_len == 1
    assert make_batch(table, np.zeros(NUM_ROWS, np.int32), 1, 4).max_query_len == 1
    assert make_batch(table, np.zeros(NUM_ROWS, np.int32), 2).max_query_len is None
    assert make_batch(table, np.zeros(NUM_ROWS, np.int32), 8, 4).max_query_len == 4
