"""The work list of a TPU kernel: which queries there are, and which blocks of the pool they see.

Made by XLA before the kernel, read by it from SMEM. An item is some neighbouring queries of one row; the real items
come first and their number is a traced value, so an empty row costs nothing.

I items, S rows, B tokens a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Work(NamedTuple):
    """Up to I items, the real ones first: some neighbouring queries of one row and the blocks that they see.

    All i32[I] but `count`; the entries past `count` are 0, and there is at least one of them.
    """

    count: jax.Array  # type: ignore[assignment]  # i32[1]
    table_start: jax.Array  # where in the flat table the item's first block is
    num_blocks: jax.Array  # at least 1
    first_key: jax.Array  # the position of the first key of that block, and of tile 0
    token: jax.Array  # the first query in q
    num_queries: jax.Array
    position: jax.Array  # of the first query
    seq_len: jax.Array
    first_full: jax.Array  # tiles first_full .. end_full - 1 need no mask: every query sees every key
    end_full: jax.Array


def list_work(
    query_start_loc: jax.Array,  # i32[S + 1]
    seq_lens: jax.Array,  # i32[S]
    sliding_window: jax.Array | None,  # i32[]
    *,
    causal: bool,
    block_size: int,
    keys_per_tile: int,
    table_width: int,
    num_tokens: int,
    queries_per_item: int,
    min_query_len: int = 1,
    max_query_len: int | None = None,
) -> Work:
    """The work of the rows with min_query_len to max_query_len (None: any number of) queries, up to queries_per_item
    of them an item, in the order of the tokens. Queries that see no key are in no item where the whole item sees none.
    """
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    chosen = query_lens >= min_query_len
    if max_query_len is not None:
        chosen &= query_lens <= max_query_len
    if max_query_len is not None and max_query_len <= queries_per_item:
        row, offset = jnp.arange(seq_lens.shape[0]), jnp.zeros_like(seq_lens)
    else:
        end = jnp.cumsum(jnp.where(chosen, -(-query_lens // queries_per_item), 0))  # i32[S]
        item = jnp.arange(num_tokens // queries_per_item + seq_lens.shape[0])
        row = jnp.sum(end[None, :] <= item[:, None], axis=1)
        in_row = item - jnp.where(row > 0, end[jnp.maximum(row - 1, 0)], 0)
        chosen = jnp.append(chosen, False)[row]
        row = jnp.minimum(row, seq_lens.shape[0] - 1)
        offset = in_row * queries_per_item

    seq_len, query_len = seq_lens[row], query_lens[row]
    num_queries = jnp.minimum(query_len - offset, queries_per_item)
    position = seq_len - query_len + offset
    end_key = jnp.minimum(position + num_queries, seq_len) if causal else seq_len  # of the keys that any query sees
    end_common = jnp.minimum(position + 1, seq_len) if causal else seq_len  # of those that every query sees
    first_block = jnp.zeros_like(seq_len)
    first_common = jnp.zeros_like(seq_len)
    if sliding_window is not None:
        first_block = jnp.maximum(position - sliding_window + 1, 0) // block_size
        first_common = jnp.maximum(position + num_queries - sliding_window, 0)
    num_blocks = -(-end_key // block_size) - first_block
    first_key = first_block * block_size
    first_full = -(-(first_common - first_key) // keys_per_tile)
    end_full = (end_common - first_key) // keys_per_tile
    num_tiles = -(-num_blocks * block_size // keys_per_tile)
    first_full = jnp.clip(first_full, 0, num_tiles)
    end_full = jnp.clip(end_full, first_full, num_tiles)

    table_start = row * table_width + first_block
    fields = (table_start, num_blocks, first_key, offset + query_start_loc[row], num_queries, position, seq_len)
    return _compact(chosen & (num_blocks > 0), jnp.stack([*fields, first_full, end_full]))


def _compact(keep: jax.Array, fields: jax.Array) -> Work:
    """Moves the items to keep to the front."""
    kept = jnp.cumsum(keep)  # [I]
    item = jnp.arange(keep.shape[0] + 1)  # one more: there is always an end
    source = jnp.sum(kept[None, :] <= item[:, None], axis=1)
    source = jnp.minimum(source, keep.shape[0] - 1)
    compact = jnp.where(item < kept[-1], fields[:, source], 0).astype(jnp.int32)
    return Work(kept[-1:].astype(jnp.int32), *compact)


class WorkRefs(NamedTuple):
    """A `Work` in SMEM, as a kernel sees it."""

    count: Any
    table_start: Any
    num_blocks: Any
    first_key: Any
    token: Any
    num_queries: Any
    position: Any
    seq_len: Any
    first_full: Any
    end_full: Any
