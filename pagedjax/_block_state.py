"""The block table's state, and the few vector operations on it from which every transition is made.

The operations work on *lanes*: short vectors of block ids or table entries, all at once. A lane with nothing to do
holds `NULL_BLOCK`, or an index past the end, which scatters drop. Each operation reads and writes only the places its
lanes name, so that under donation nothing else of the state is touched. XLA updates an array in place only if it knows
that every read of it comes first; so what an update writes, or where, depends on what was last read from its array.

Letters: R rows, P blocks per row at most, N blocks in the pool, K lanes, C copies at most.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

NULL_BLOCK = 0
"""The block nothing is stored in: table padding, and entries that a sliding window has passed, point at it."""

LANES = 128
"""Blocks visited per turn of a loop: wide enough to make turns few, narrow enough that idle lanes are cheap."""

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """Which blocks of the KV pool each row holds. Entries past a row's last block are `NULL_BLOCK`.

    Attributes:
        block_tables: i32[R, P], a row's blocks in token order; leading ones are `NULL_BLOCK` where a window has passed.
        seq_lens: i32[R], tokens in the row.
        ref_counts: i32[N], holders of each block: table entries and retained references.
        retain_counts: i32[N], the part of `ref_counts` that `retain` took and `drop` may give back.
        free_blocks: i32[N - 1], a stack: its first `num_free_blocks` are the free blocks, the last of those is next.
        num_free_blocks: i32[], blocks nobody holds.
        block_size: tokens per block (static).
    """

    block_tables: jax.Array
    seq_lens: jax.Array
    ref_counts: jax.Array
    retain_counts: jax.Array
    free_blocks: jax.Array
    num_free_blocks: jax.Array
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """N: blocks in the pool, the null block among them."""
        return self.ref_counts.shape[0]

    @property
    def max_num_seqs(self) -> int:
        """R: rows."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_seq(self) -> int:
        """P: blocks a row can hold."""
        return self.block_tables.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCopies:
    """Block contents to copy within the KV pool, before K/V of this step is written. No source is a destination.

    Attributes:
        src: i32[C], blocks to copy from; `NULL_BLOCK` past `count`.
        dst: i32[C], blocks to copy to; `NULL_BLOCK` past `count`.
        count: i32[], how many of the C are copies.
    """

    src: jax.Array
    dst: jax.Array
    count: jax.Array


def as_integers(name: str, values: jax.Array, shape: tuple[int | None, ...]) -> jax.Array:
    """`values` as i32 of `shape`, in which None stands for any size.

    Raises:
        ValueError: they are no integers, or have another shape.
    """
    values = jnp.asarray(values)
    fits = len(values.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, values.shape, strict=True)
    )
    if not fits or not jnp.issubdtype(values.dtype, jnp.integer):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} is {values.dtype}{list(values.shape)}; for this table pass int32[{wanted}]")
    return values.astype(jnp.int32)


def only(mask: jax.Array, index: jax.Array, target: jax.Array) -> jax.Array:
    """`index` where `mask` is true, elsewhere an index past the end of `target`."""
    return jnp.where(mask, index, target.shape[0])


def total(values: jax.Array) -> jax.Array:
    """The sum as i32[], also where 64-bit types are on."""
    return jnp.sum(values, dtype=jnp.int32)


def ranks(mask: jax.Array) -> jax.Array:
    """i32[K]: for each true lane, how many true lanes come before it."""
    return jnp.cumsum(mask, dtype=jnp.int32) - 1


def pack(mask: jax.Array, values: jax.Array) -> jax.Array:
    """The values of the true lanes, in order, moved to the front; zeros after them."""
    return jnp.zeros_like(values).at[only(mask, ranks(mask), values)].set(values, mode="drop")


def num_held(seq_lens: jax.Array, block_size: int) -> jax.Array:
    """Table entries that `seq_lens` tokens take."""
    return lax.div(seq_lens + (block_size - 1), jnp.int32(block_size))


def for_each_block(counts: jax.Array, visit: Callable[[T, jax.Array, jax.Array, jax.Array], T], state: T) -> T:
    """Visits `counts[r]` blocks of every row r, `LANES` at a time: the cost follows their sum, however uneven they are.

    Args:
        counts: i32[R], blocks to visit in each row.
        visit: `(state, rank, row, nth) -> state`. Per lane, i32[K]: its place among all visits, its row, and which of
            the row's visits it is. An idle lane has row R, which scatters drop.
        state: what visits carry along.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts

    def turn(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        first, state = carry
        rank = first + jnp.arange(LANES, dtype=jnp.int32)
        row = jnp.searchsorted(ends, rank, side="right", method="scan_unrolled").astype(jnp.int32)
        nth = rank - starts.at[row].get(mode="clip")
        return first + LANES, visit(state, rank, row, nth)

    return lax.while_loop(lambda carry: carry[0] < ends[-1], turn, (jnp.int32(0), state))[1]


def elect(ref_counts: jax.Array, block_ids: jax.Array, candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Picks one of the candidate lanes that name the same block.

    The blocks' own counts, which are 0, serve as scratch: an array of its own would cost the pool's size to clear.

    Returns:
        The counts, with scratch values for the candidates' blocks, which the caller overwrites; bool[K], lanes picked.
    """
    marks = jnp.arange(1, block_ids.shape[0] + 1, dtype=jnp.int32)
    ref_counts = ref_counts.at[only(candidates, block_ids, ref_counts)].max(marks, mode="drop")
    return ref_counts, candidates & (ref_counts[block_ids] == marks)


def hold(table: BlockTable, block_ids: jax.Array) -> BlockTable:
    """One more holder for each lane's block."""
    named = only(block_ids != NULL_BLOCK, block_ids, table.ref_counts)
    return dataclasses.replace(table, ref_counts=table.ref_counts.at[named].add(1, mode="drop"))


def give_back(table: BlockTable, block_ids: jax.Array) -> BlockTable:
    """One holder less for each lane's block; a block left with none goes on the free stack, once."""
    named = block_ids != NULL_BLOCK
    ref_counts = table.ref_counts.at[only(named, block_ids, table.ref_counts)].add(-1, mode="drop")
    ref_counts, freed = elect(ref_counts, block_ids, named & (ref_counts[block_ids] == 0))
    places = only(freed, table.num_free_blocks + ranks(freed), table.free_blocks)
    return dataclasses.replace(
        table,
        ref_counts=ref_counts.at[only(freed, block_ids, ref_counts)].set(0, mode="drop"),
        free_blocks=table.free_blocks.at[places].set(block_ids, mode="drop"),
        num_free_blocks=table.num_free_blocks + total(freed),
    )


def swap_entries(
    table: BlockTable, row: jax.Array, column: jax.Array, block_ids: jax.Array
) -> tuple[BlockTable, jax.Array]:
    """Puts `block_ids` at (row, column), no place named twice; returns what was there, `NULL_BLOCK` for idle lanes."""
    old = table.block_tables.at[row, column].get(mode="fill", fill_value=NULL_BLOCK)
    row = only(block_ids != old, row, table.block_tables)
    block_tables = table.block_tables.at[row, column].set(block_ids, mode="drop")
    return dataclasses.replace(table, block_tables=block_tables), old


def clear_entries(table: BlockTable, starts: jax.Array, counts: jax.Array) -> BlockTable:
    """Gives back the `counts[r]` entries of row r from column `starts[r]` on; they become `NULL_BLOCK`."""

    def visit(table: BlockTable, rank: jax.Array, row: jax.Array, nth: jax.Array) -> BlockTable:
        column = starts.at[row].get(mode="clip") + nth
        table, old = swap_entries(table, row, column, jnp.full_like(row, NULL_BLOCK))
        return give_back(table, old)

    return for_each_block(counts, visit, table)
