"""A block table small enough to read, and short words to drive it and look inside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import block_table as bt

ROWS, WIDTH, BLOCKS, PAGE = 4, 8, 16, 4


def new(page: int = PAGE, blocks: int = BLOCKS) -> bt.BlockTable:
    return bt.create(blocks, page, ROWS, WIDTH)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def only(row: int, value: int) -> jax.Array:
    return jnp.zeros(ROWS, jnp.int32).at[row].set(value)


def mask(*rows: int) -> jax.Array:
    return jnp.zeros(ROWS, bool).at[jnp.array(rows)].set(True)


def grow(table: bt.BlockTable, *news: int) -> bt.BlockTable:
    table, copies, ok = bt.append(table, ints(*news))
    assert bool(ok)
    assert int(copies.count) == 0
    return table


def entries(table: bt.BlockTable, row: int) -> list[int]:
    """The row's blocks, in order."""
    return np.asarray(table.block_tables)[row, : -(-int(table.seq_lens[row]) // table.block_size)].tolist()


def pairs(copies: bt.BlockCopies) -> set[tuple[int, int]]:
    return {(int(copies.src[i]), int(copies.dst[i])) for i in range(int(copies.count))}


def adoption(*chains: list[int]) -> jax.Array:
    return jnp.array([chain + [0] * (WIDTH - len(chain)) for chain in chains], jnp.int32)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
