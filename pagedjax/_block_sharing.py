"""The transitions by which a block gains and loses holders: rows that share blocks, and the prefix cache's references.

Letters: R rows, P blocks per row at most, N blocks in the pool, K block ids, A adoptions.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax._block_state import (
    LANES,
    NULL_BLOCK,
    BlockTable,
    as_integers,
    for_each_block,
    give_back,
    hold,
    num_held,
    pack,
    swap_entries,
    total,
)


@jax.jit
def fork(table: BlockTable, parents: jax.Array) -> BlockTable:
    """Makes row i, released first, a fork of row `parents[i]`: it shares the blocks; `append` copies what it writes.

    All parents are read from the incoming table, so a row may be a parent and be replaced at once (as beams are).

    Args:
        table: the table.
        parents: i32[R]; a row whose parent is -1 (or another number that is no row), or itself, is left as it is.
    """
    parents = as_integers("parents", parents, table.seq_lens.shape)
    rows = jnp.arange(table.max_num_seqs, dtype=jnp.int32)
    forks = (parents >= 0) & (parents < table.max_num_seqs) & (parents != rows)
    parents = jnp.where(forks, parents, rows)
    seq_lens = table.seq_lens[parents]
    longest = num_held(jnp.max(jnp.where(forks, jnp.maximum(seq_lens, table.seq_lens), 0)), table.block_size)

    # A turn takes whole columns of all children: what a parent holds there is read before any child, which may be a
    # parent itself, is written.
    children = pack(forks, rows)
    num_children = jnp.maximum(total(forks), 1)
    lanes = jnp.arange(max(LANES, table.max_num_seqs), dtype=jnp.int32)
    nth_column = lax.div(lanes, num_children)
    columns_per_turn = lax.div(jnp.int32(lanes.shape[0]), num_children)
    child = children[lax.rem(lanes, num_children)]
    idle = nth_column >= columns_per_turn
    parent = jnp.where(idle, table.max_num_seqs, parents[child])
    child = jnp.where(idle, table.max_num_seqs, child)

    def turn(carry: tuple[jax.Array, BlockTable]) -> tuple[jax.Array, BlockTable]:
        first, table = carry
        column = first + nth_column
        shared = table.block_tables.at[parent, column].get(mode="fill", fill_value=NULL_BLOCK)
        table, old = swap_entries(hold(table, shared), child, column, shared)
        return first + columns_per_turn, give_back(table, old)

    table = lax.while_loop(lambda carry: carry[0] < longest, turn, (jnp.int32(0), table))[1]
    return dataclasses.replace(table, seq_lens=seq_lens)


@jax.jit
def adopt(table: BlockTable, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array) -> BlockTable:
    """Starts rows, released first, from blocks that are written already.

    An adoption that names a free block, a null block after another block, or more tokens than a row can hold is left
    out: its row stays as it was.

    Args:
        table: the table.
        rows: i32[A], the rows to start; -1 (or another number that is no row) is padding. Of several adoptions by one
            row the last counts.
        block_ids: i32[A, P], blocks in token order; those past the tokens' last block are ignored. Leading ones may be
            `NULL_BLOCK`, where a sliding window has passed. The cache or a row has to hold each when the call begins.
        num_tokens: i32[A], tokens the row starts with; 0 empties it. Where it is no multiple of the block size the last
            block is a shared tail, which `append` copies.
    """
    rows = as_integers("rows", rows, (None,))
    block_ids = as_integers("block_ids", block_ids, (rows.shape[0], table.max_blocks_per_seq))
    num_tokens = as_integers("num_tokens", num_tokens, rows.shape)
    rows, counts = _adoptions(table, rows, block_ids, num_tokens)

    def adopted(lane: jax.Array, nth: jax.Array) -> jax.Array:
        within = nth < counts.at[lane].get(mode="fill", fill_value=0)
        return jnp.where(within, block_ids.at[lane, nth].get(mode="clip"), NULL_BLOCK)

    def share(table: BlockTable, rank: jax.Array, lane: jax.Array, nth: jax.Array) -> BlockTable:
        return hold(table, adopted(lane, nth))

    def replace(table: BlockTable, rank: jax.Array, lane: jax.Array, nth: jax.Array) -> BlockTable:
        row = rows.at[lane].get(mode="fill", fill_value=table.max_num_seqs)
        table, old = swap_entries(table, row, nth, adopted(lane, nth))
        return give_back(table, old)

    # All blocks gain their new holders before any loses one: a block that only changes rows must not be freed between.
    table = for_each_block(counts, share, table)
    held = num_held(table.seq_lens.at[rows].get(mode="fill", fill_value=0), table.block_size)
    table = for_each_block(jnp.maximum(counts, held), replace, table)
    return dataclasses.replace(table, seq_lens=table.seq_lens.at[rows].set(num_tokens, mode="drop"))


@jax.jit
def retain(table: BlockTable, block_ids: jax.Array) -> BlockTable:
    """Takes a reference of its own (the prefix cache's) to each block, so that it outlives the rows that hold it.

    Args:
        table: the table.
        block_ids: i32[K]; an id named twice is retained twice. `NULL_BLOCK` is padding; a free block, or a number that
            is no block, is left out.
    """
    block_ids = as_integers("block_ids", block_ids, (None,))
    held = table.ref_counts.at[_in_pool(table, block_ids)].get(mode="fill", fill_value=0) > 0
    block_ids = jnp.where(held, block_ids, NULL_BLOCK)
    retain_counts = table.retain_counts.at[_in_pool(table, block_ids)].add(1, mode="drop")
    return hold(dataclasses.replace(table, retain_counts=retain_counts), block_ids)


@jax.jit
def drop(table: BlockTable, block_ids: jax.Array) -> BlockTable:
    """Gives back references that `retain` took; a block nobody else holds becomes free.

    Args:
        table: the table.
        block_ids: i32[K]; an id named twice is dropped twice. `NULL_BLOCK` is padding. A drop of what was not retained
            is left out, so it can never take a row's block.
    """
    block_ids = as_integers("block_ids", block_ids, (None,))
    retained = table.retain_counts.at[_in_pool(table, block_ids)].get(mode="fill", fill_value=0) > 0
    block_ids = jnp.where(retained, block_ids, NULL_BLOCK)
    named = _in_pool(table, block_ids)
    retain_counts = table.retain_counts.at[named].add(-1, mode="drop")
    left = retain_counts[block_ids]
    # Ids named more often than they were retained: the counts gain the difference before every lane takes one.
    ref_counts = table.ref_counts.at[named].set(table.ref_counts[block_ids] + jnp.maximum(-left, 0), mode="drop")
    retain_counts = retain_counts.at[named].set(jnp.maximum(left, 0), mode="drop")
    return give_back(dataclasses.replace(table, retain_counts=retain_counts, ref_counts=ref_counts), block_ids)


def _in_pool(table: BlockTable, block_ids: jax.Array) -> jax.Array:
    """The ids that name a block; for the others, and for the null block, an index past the pool."""
    return jnp.where((block_ids > NULL_BLOCK) & (block_ids < table.num_blocks), block_ids, table.num_blocks)


def _adoptions(
    table: BlockTable, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """i32[A], i32[A]: rows, and how many blocks each adopts, with R and 0 for adoptions that are left out."""
    lanes = jnp.arange(rows.shape[0], dtype=jnp.int32)
    most = table.max_blocks_per_seq * table.block_size
    valid = (rows >= 0) & (rows < table.max_num_seqs) & (num_tokens >= 0) & (num_tokens <= most)
    counts = jnp.where(valid, num_held(num_tokens, table.block_size), 0)

    def inspect(valid: jax.Array, rank: jax.Array, lane: jax.Array, nth: jax.Array) -> jax.Array:
        block_id = block_ids.at[lane, nth].get(mode="clip")
        before = block_ids.at[lane, jnp.maximum(nth - 1, 0)].get(mode="clip")
        held = table.ref_counts.at[_in_pool(table, block_id)].get(mode="fill", fill_value=0) > 0
        passed = (block_id == NULL_BLOCK) & (before == NULL_BLOCK)
        return valid.at[lane].min(held | passed, mode="drop")

    valid = for_each_block(counts, inspect, valid)
    targets = jnp.where(valid, rows, table.max_num_seqs)
    last = jnp.zeros(table.max_num_seqs, jnp.int32).at[targets].max(lanes, mode="drop")
    valid &= last.at[targets].get(mode="fill", fill_value=0) == lanes
    return jnp.where(valid, rows, table.max_num_seqs), jnp.where(valid, counts, 0)
