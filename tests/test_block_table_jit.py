"""Transitions under jit: the same values as eagerly, strict dtypes, and donated state updated in place."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_block_table import BLOCKS, PAGE, ROWS, WIDTH, assert_same, grow, ints, mask, new

from pagedjax import block_table as bt


def scenario(table: bt.BlockTable) -> list[Any]:
    """Every transition once, the table passed on."""
    seen: list[Any] = []
    table, copies, ok = bt.append(table, ints(5, 8, 0, 1))
    seen += [table, copies, ok]
    table = bt.retain(table, jnp.concatenate([table.block_tables[1, :3], ints(0)]))
    seen.append(table)
    table = bt.fork(table, ints(-1, -1, 0, 1))
    seen.append(table)
    table, copies, ok = bt.append(table, ints(1, 0, 1, 2))
    seen += [table, copies, ok]
    table = bt.release(bt.truncate(table, ints(3, 7, 9, 9)), mask(0))
    seen.append(table)
    table = bt.adopt(table, ints(0, -1), table.block_tables[1:3], ints(5, 0))
    seen.append(table)
    table = bt.drop(bt.free_outside_window(table, jnp.int32(2)), jnp.concatenate([table.block_tables[1, :3], ints(0)]))
    seen.append(table)
    return [*seen, *bt.defragment(table)]


def test_dtypes_are_strict() -> None:
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(scenario, bt.create(BLOCKS + 1, PAGE, ROWS, WIDTH))


def test_jit_equals_eager() -> None:
    """The fast sample: the transition with the fewest operations that still counts, copies and frees."""
    table = bt.retain(grow(new(), 8, 0, 0, 0), ints(1, 1, 2, 0))
    jitted = bt.drop(table, ints(1, 1, 2, 2))
    with jax.disable_jit():
        eager = bt.drop(table, ints(1, 1, 2, 2))
    assert_same(jitted, eager)


@pytest.mark.slow
def test_jit_equals_eager_for_every_transition() -> None:
    jitted = jax.jit(scenario)(new())
    with jax.disable_jit():
        eager = scenario(new())
    assert_same(jitted, eager)
    assert bool(jitted[2])
    assert bool(jitted[7])


def short_step(table: bt.BlockTable, n: jax.Array, ids: jax.Array, chains: jax.Array) -> Any:
    table, copies, ok = bt.append(bt.release(table, n > 5), n)
    return bt.truncate(table, n), copies, ok


def long_step(table: bt.BlockTable, n: jax.Array, ids: jax.Array, chains: jax.Array) -> Any:
    table = bt.drop(bt.release(table, n > 5), ids)
    table = bt.fork(bt.adopt(table, ids, chains, ids), n)
    table, copies, ok = bt.append(table, n)
    table = bt.retain(bt.truncate(table, n), ids)
    return bt.free_outside_window(table, n[0]), copies, ok


@pytest.mark.parametrize("step", [short_step, pytest.param(long_step, marks=pytest.mark.slow)])
def test_a_donated_table_is_updated_in_place(step: Any) -> None:
    """Several transitions in one program, whose temporaries have no room for a copy of the pool's or table's arrays."""
    table = bt.create(65536, 16, 64, 512)
    smallest = min(table.block_tables.nbytes, table.ref_counts.nbytes, table.free_blocks.nbytes)
    args = jnp.zeros(64, jnp.int32), jnp.zeros(8, jnp.int32), jnp.zeros((8, 512), jnp.int32)
    program = jax.jit(step, donate_argnums=0).lower(table, *args).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(table))
    assert memory.temp_size_in_bytes < smallest
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(table)]
    after, _, _ = program(table, *args)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == places
