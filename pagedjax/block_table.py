"""The block table: who holds which block of the KV pool, as a value, and pure transitions from one value to the next.

Every transition is a jitted function over all rows at once; called inside a `jax.jit` that donates the table, it
updates in place. Its cost follows the blocks it allots or gives back, not the pool's or the table's size (but for
`create` and `defragment`).

What holds before and after each transition, and `check` verifies:
- a block is on the free stack, once, or has a ref count above zero; the null block is neither;
- a ref count is the number of holders: table entries, and references taken with `retain`;
- a row of n tokens has ceil(n / block_size) entries, of which a leading run may be `NULL_BLOCK` (a sliding window has
  passed them), and only `NULL_BLOCK` after them.

Nothing can raise under jit: an input that makes no sense is left out, as each transition says. Only `append` can run
out of blocks; `ok` tells.

Letters: R rows, P blocks per row at most, N blocks in the pool.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax._block_sharing import adopt, drop, fork, retain
from pagedjax._block_state import (
    NULL_BLOCK,
    BlockCopies,
    BlockTable,
    as_integers,
    clear_entries,
    elect,
    for_each_block,
    num_held,
    only,
    pack,
    total,
)
from pagedjax._block_table_check import BlockTableError, check

__all__ = [
    "NULL_BLOCK",
    "BlockCopies",
    "BlockTable",
    "BlockTableError",
    "adopt",
    "append",
    "check",
    "create",
    "defragment",
    "drop",
    "fork",
    "free_outside_window",
    "release",
    "retain",
    "truncate",
]

_MAX_INT32 = 2**31 - 1


def create(num_blocks: int, block_size: int, max_num_seqs: int, max_blocks_per_seq: int) -> BlockTable:
    """A table in which every row is empty and every block but the null block free.

    Args:
        num_blocks: N, blocks in the KV pool, the null block among them.
        block_size: tokens per block.
        max_num_seqs: R, rows.
        max_blocks_per_seq: P, blocks a row can hold.

    Raises:
        ValueError: a size is too small, or token slots would not fit 32-bit indices.
    """
    if num_blocks < 2:
        raise ValueError(f"num_blocks is {num_blocks}; block {NULL_BLOCK} is never allotted, so pass at least 2")
    sizes = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_blocks_per_seq": max_blocks_per_seq}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; pass at least 1")
    for name, blocks in (("num_blocks", num_blocks), ("max_blocks_per_seq", max_blocks_per_seq)):
        most = _MAX_INT32 // block_size - 1
        if blocks > most:
            raise ValueError(
                f"{name} {blocks} x block_size {block_size} is {blocks * block_size} token slots, more than 32-bit "
                f"indices can name; pass at most {most} blocks"
            )
    return BlockTable(
        block_tables=jnp.full((max_num_seqs, max_blocks_per_seq), NULL_BLOCK, jnp.int32),
        seq_lens=jnp.zeros(max_num_seqs, jnp.int32),
        ref_counts=jnp.zeros(num_blocks, jnp.int32),
        retain_counts=jnp.zeros(num_blocks, jnp.int32),
        free_blocks=jnp.arange(num_blocks - 1, NULL_BLOCK, -1, dtype=jnp.int32),
        num_free_blocks=jnp.array(num_blocks - 1, jnp.int32),
        block_size=block_size,
    )


@jax.jit
def append(table: BlockTable, num_new_tokens: jax.Array) -> tuple[BlockTable, BlockCopies, jax.Array]:
    """Makes room for more tokens: allots blocks, and copies a partly filled last block that others hold too.

    Where all holders of a shared last block append at once, one keeps it and the others copy; else every appender
    copies. A retained reference is a holder that never appends.

    Args:
        table: the table.
        num_new_tokens: i32[R], tokens to make room for; 0 leaves the row untouched.

    Returns:
        The table; the copies to make before the new tokens' K/V is written, at most R; and `ok`, bool[]. `ok` is false
        if the free blocks do not suffice, a row would need more than P blocks, or a number is negative: then the table
        is the one that came in, and there are no copies.
    """
    new = as_integers("num_new_tokens", num_new_tokens, table.seq_lens.shape)
    fits = (new >= 0) & (new <= table.max_blocks_per_seq * table.block_size - table.seq_lens)
    new = jnp.where(fits, new, 0)
    held = num_held(table.seq_lens, table.block_size)
    grown = num_held(table.seq_lens + new, table.block_size) - held

    rows = jnp.arange(table.max_num_seqs, dtype=jnp.int32)
    writes_tail = (new > 0) & (lax.rem(table.seq_lens, jnp.int32(table.block_size)) != 0)
    tails = jnp.where(writes_tail, table.block_tables[rows, jnp.maximum(held - 1, 0)], NULL_BLOCK)
    count = table.ref_counts[tails]
    shared = count > 1
    shared_tails = only(shared, tails, table.ref_counts)
    ref_counts = table.ref_counts.at[shared_tails].add(-1, mode="drop")
    others = ref_counts[tails]
    all_append = shared & (others == 0)
    ref_counts, keeps = elect(ref_counts, tails, all_append)
    # A tail that a window gave back (and truncate uncovered) is copied from the null block: a recycled block's tokens
    # must not show.
    copies = writes_tail & ((shared & ~keeps) | (tails == NULL_BLOCK))

    takes = grown + copies.astype(jnp.int32)
    ok = jnp.all(fits) & (total(takes) <= table.num_free_blocks)
    # A failure gates what goes into the updates; selecting between two tables would copy them.
    new, takes, copies = jnp.where(ok, new, 0), jnp.where(ok, takes, 0), ok & copies
    count = jnp.where(ok, jnp.where(all_append, 1, others), count)
    ref_counts = ref_counts.at[shared_tails].set(count, mode="drop")
    table = dataclasses.replace(table, seq_lens=table.seq_lens + new, ref_counts=ref_counts)
    table, first_ids = _allot(table, held - copies.astype(jnp.int32), takes)
    return table, BlockCopies(pack(copies, tails), pack(copies, first_ids), total(copies)), ok


@jax.jit
def truncate(table: BlockTable, seq_lens: jax.Array) -> BlockTable:
    """Shortens rows and gives back the blocks they no longer reach.

    Keys that `free_outside_window` gave back stay lost: a row shortened so far that it sees them reads the null block.

    Args:
        table: the table.
        seq_lens: i32[R], new lengths in tokens. One at or above the row's length leaves it untouched; one below 0 is 0.
    """
    return _shorten(table, as_integers("seq_lens", seq_lens, table.seq_lens.shape))


@jax.jit
def release(table: BlockTable, rows: jax.Array) -> BlockTable:
    """Empties rows and gives their blocks back. Empty rows stay as they are, so a second release does nothing.

    Args:
        table: the table.
        rows: bool[R], the rows to empty.
    """
    rows = jnp.asarray(rows)
    if rows.dtype != jnp.bool_ or rows.shape != table.seq_lens.shape:
        raise ValueError(f"rows is {rows.dtype}{list(rows.shape)}; pass a mask of the rows, bool[{table.max_num_seqs}]")
    return _shorten(table, jnp.where(rows, 0, table.seq_lens))


@jax.jit
def free_outside_window(table: BlockTable, window: jax.Array | int) -> BlockTable:
    """Gives back the blocks that no later query sees through a sliding window; their entries become `NULL_BLOCK`.

    Query i sees keys i - window + 1 .. i. Keys from seq_len - window on are kept, which is what queries at seq_len - 1
    (the last token, should it be computed again) and later see. So call it once all of a row's tokens are computed,
    before the next `append`; pass `window + k` where `truncate` may afterwards take up to k + 1 tokens back.

    Args:
        table: the table.
        window: i32[], in tokens, may be traced; below 1 it is no window, and nothing is given back.
    """
    window = as_integers("window", jnp.asarray(window), ())
    window = jnp.where(window < 1, _MAX_INT32, window)
    kept_from = lax.div(jnp.maximum(table.seq_lens - window, 0), jnp.int32(table.block_size))
    rows = jnp.arange(table.max_num_seqs, dtype=jnp.int32)
    # The entries given back earlier are a leading run; bisection finds its end.
    low, high = jnp.zeros_like(kept_from), kept_from
    for _ in range(table.max_blocks_per_seq.bit_length()):
        middle = lax.div(low + high, jnp.int32(2))
        gone = (table.block_tables[rows, middle] == NULL_BLOCK) & (low < high)
        low, high = jnp.where(gone, middle + 1, low), jnp.where(gone, high, middle)
    return clear_entries(table, low, kept_from - low)


@jax.jit
def defragment(table: BlockTable) -> tuple[BlockTable, BlockCopies]:
    """Moves the used blocks to the front of the pool: U of them get ids 1 .. U. Those already there stay.

    Unlike the other transitions it looks at the whole pool and table. Block ids kept elsewhere (the prefix cache's)
    have to follow the copies.

    Returns:
        The table, and the copies to make before the pool is used again, at most N // 2.
    """
    block_ids = jnp.arange(table.num_blocks, dtype=jnp.int32)
    used = table.ref_counts > 0
    num_used = total(used)
    leaves = used & (block_ids > num_used)
    src = pack(leaves, block_ids)[: table.num_blocks // 2]
    dst = pack(~used & (block_ids > NULL_BLOCK) & (block_ids <= num_used), block_ids)[: table.num_blocks // 2]
    new_ids = block_ids.at[only(src > NULL_BLOCK, src, block_ids)].set(dst, mode="drop")

    def moved(counts: jax.Array) -> jax.Array:
        return jnp.zeros_like(counts).at[only(used, new_ids, counts)].set(counts, mode="drop")

    table = dataclasses.replace(
        table,
        block_tables=new_ids[table.block_tables],
        ref_counts=moved(table.ref_counts),
        retain_counts=moved(table.retain_counts),
        free_blocks=block_ids[:NULL_BLOCK:-1],
    )
    return table, BlockCopies(src, dst, total(leaves))


def _allot(table: BlockTable, starts: jax.Array, counts: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Takes `counts[r]` free blocks for row r's entries from column `starts[r]` on; the stack has that many.

    Returns:
        The table; and i32[R], the first block each row took. (Read from the table they would hold up its next update.)
    """
    top = table.num_free_blocks

    def visit(
        state: tuple[BlockTable, jax.Array], rank: jax.Array, row: jax.Array, nth: jax.Array
    ) -> tuple[BlockTable, jax.Array]:
        table, first_ids = state
        block_ids = table.free_blocks[jnp.maximum(top - 1 - rank, 0)]
        column = starts.at[row].get(mode="clip") + nth
        taken = only(row < table.max_num_seqs, block_ids, table.ref_counts)
        table = dataclasses.replace(
            table,
            block_tables=table.block_tables.at[row, column].set(block_ids, mode="drop"),
            ref_counts=table.ref_counts.at[taken].set(1, mode="drop"),
        )
        return table, first_ids.at[only(nth == 0, row, first_ids)].set(block_ids, mode="drop")

    table, first_ids = for_each_block(counts, visit, (table, jnp.zeros_like(counts)))
    return dataclasses.replace(table, num_free_blocks=top - total(counts)), first_ids


def _shorten(table: BlockTable, seq_lens: jax.Array) -> BlockTable:
    seq_lens = jnp.clip(seq_lens, 0, table.seq_lens)
    kept = num_held(seq_lens, table.block_size)
    table = clear_entries(table, kept, num_held(table.seq_lens, table.block_size) - kept)
    return dataclasses.replace(table, seq_lens=seq_lens)
