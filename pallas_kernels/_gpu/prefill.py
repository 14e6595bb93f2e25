"""Prefill on Hopper: rows with two queries or more, cut into tiles of queries that never span rows.

A list of the tiles is made outside the kernel, its length bounded by the shapes; programs past its end have no keys and
exit. The kernel writes whole tiles to an array of tiles, and one gather puts the tokens in their places: a copy cannot
stop at a token that belongs to the next row, and the gather is also what lets the tokens that no tile covers through.

A tile that would reach past the last token of q begins earlier. It then computes tokens of its neighbours as well, at
the wrong positions; nobody reads them.

T query tokens, S rows, Hq query heads, D head_dim, P blocks a table line, Q queries of a tile, I tiles (items),
C programs an item, W x M rows of a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._gpu.prefill_kernel import launch
from pallas_kernels._gpu.prefill_plan import CONSUMERS, LOG2_E, ROWS, Plan
from pallas_kernels._kv_pages import KVPages

SUBLANES = 8  # rows of a swizzle tile: what a copy of queries is a multiple of
SHARED_MEMORY = 208 * 1024  # of the 227 KiB a program may use
MOST_STAGES = 4


class Tiles(NamedTuple):
    """The tiles of queries, i32[I] each; those past the last have no keys."""

    row: jax.Array
    first_token: jax.Array
    first_position: jax.Array
    first_key: jax.Array
    end_key: jax.Array


@functools.partial(jax.jit, static_argnames=("soft_cap", "causal", "max_query_len", "interpret"))
def attend_prefill(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,  # i32[]
    scale: jax.Array,  # f32[]
    sliding_window: jax.Array | None,  # i32[]
    sinks: jax.Array | None,  # [Hq]
    out: jax.Array,  # [T, Hq, D] in q's dtype: zeros, or what the decode kernel wrote
    lse: jax.Array,  # f32[T, Hq]: -inf, or what the decode kernel wrote
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,  # at least SUBLANES
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """out and lse with the tokens of the rows that have two queries or more filled in, the other tokens as given."""
    num_tokens, num_q_heads, head_dim = q.shape
    q = jnp.pad(q, ((0, max(0, SUBLANES - num_tokens)), (0, 0), (0, 0)))
    plan = _plan(q, kv_pages, block_tables, max_query_len, soft_cap, causal, sliding_window, sinks, interpret)
    tiles, tile_of_token = _tiles(plan, q.shape[0], seq_lens, query_start_loc, sliding_window)
    tile_out, tile_lse = launch(
        plan,
        q,
        kv_pages.pool,
        jnp.zeros((1, 1, 1, 1), jnp.float32) if kv_pages.scales is None else kv_pages.scales,
        block_tables,
        jnp.stack(tiles, axis=1),
        layer[None],
        scale[None],
        jnp.zeros(1, jnp.int32) if sliding_window is None else sliding_window[None],
        jnp.zeros((1, 1, 1), jnp.float32) if sinks is None else _sink_of_rows(plan, sinks),
    )

    tile_of_token = tile_of_token[:num_tokens]
    token, head = jnp.arange(num_tokens)[:, None], jnp.arange(num_q_heads)[None, :]
    has_tile = tile_of_token < plan.num_items
    tile = jnp.minimum(tile_of_token, plan.num_items - 1)
    covered = (has_tile & (tiles.end_key > tiles.first_key)[tile])[:, None]
    row = head % plan.heads * plan.queries + token - tiles.first_token[tile][:, None]  # [T, Hq]
    index = (tile[:, None] * plan.chunks + head // plan.heads) * (CONSUMERS * ROWS) + row
    gathered_out = tile_out.reshape(-1, head_dim).at[index].get(mode="clip")
    gathered_lse = tile_lse.reshape(-1).at[index].get(mode="clip")
    return jnp.where(covered[..., None], gathered_out.astype(out.dtype), out), jnp.where(covered, gathered_lse, lse)


def _plan(
    q: jax.Array,
    kv_pages: KVPages,
    block_tables: jax.Array,
    max_query_len: int,
    soft_cap: float | None,
    causal: bool,
    sliding_window: jax.Array | None,
    sinks: jax.Array | None,
    interpret: Any,
) -> Plan:
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // kv_pages.num_kv_heads
    most_heads = CONSUMERS * ROWS // SUBLANES
    heads = next(n for n in range(min(group, most_heads), 0, -1) if group % n == 0)
    queries = min(CONSUMERS * ROWS // heads, max_query_len + SUBLANES - 1, num_tokens) // SUBLANES * SUBLANES
    num_rows = min(block_tables.shape[0], num_tokens // 2)
    block_size = kv_pages.block_size
    # As many as the registers hold beside the value; converting a quantised tile takes registers as well.
    most_keys = 128 if head_dim <= 128 and not kv_pages.is_quantised else 64
    keys = min(most_keys, -(-block_tables.shape[1] * block_size // 64) * 64)
    itemsize = q.dtype.itemsize
    tile = 2 * keys * head_dim * itemsize  # bytes of K and V
    stage, fixed = tile, CONSUMERS * ROWS * head_dim * itemsize
    if kv_pages.is_quantised:
        stage, fixed = tile * kv_pages.dtype.itemsize // itemsize + 2 * 4 * keys, fixed + tile
    stages = (SHARED_MEMORY - fixed) // stage
    return Plan(
        num_items=max(1, (num_tokens + num_rows * (queries - 1)) // queries),
        head_dim=head_dim,
        block_size=block_size,
        kv_on_lanes=kv_pages.kv_on_lanes,
        dtype=q.dtype,
        stored_dtype=kv_pages.dtype,
        heads=heads,
        chunks=num_q_heads // heads,
        chunks_per_kv_head=group // heads,
        queries=queries,
        keys=keys,
        stages=max(2, min(stages, MOST_STAGES, -(-block_tables.shape[1] * block_size // keys))),
        soft_cap=soft_cap,
        causal=causal,
        windowed=sliding_window is not None,
        has_sinks=sinks is not None,
        interpret=interpret,
    )


def _tiles(
    plan: Plan, num_tokens: int, seq_lens: jax.Array, query_start_loc: jax.Array, window: jax.Array | None
) -> tuple[Tiles, jax.Array]:
    """The tiles, and which of them each token is in: i32[T], num_items where there is none."""
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    num_tiles = jnp.where((query_lens > 1) & (seq_lens > 0), -(-query_lens // plan.queries), 0)  # i32[S]
    tiles_end = jnp.cumsum(num_tiles)
    last_row = seq_lens.shape[0] - 1

    item = jnp.arange(plan.num_items)
    row = jnp.minimum(jnp.searchsorted(tiles_end, item, side="right", method="compare_all"), last_row)
    exists = item < tiles_end[-1]
    # The last tile of a row first: it has the most keys, and the short ones fill the gaps at the end.
    offset = (tiles_end[row] - 1 - item) * plan.queries
    start = query_start_loc[row] + offset
    own_position = seq_lens[row] - query_lens[row] + offset
    end_position = own_position + jnp.minimum(plan.queries, query_lens[row] - offset)
    end_key = jnp.clip(end_position, 0, seq_lens[row]) if plan.causal else seq_lens[row]
    first_key = jnp.zeros_like(end_key) if window is None else jnp.maximum(own_position - window + 1, 0)
    first_token = jnp.clip(start, 0, num_tokens - plan.queries)
    first_position = own_position - (start - first_token)
    tiles = Tiles(row, first_token, first_position, first_key, jnp.where(exists, end_key, 0))

    token = jnp.arange(num_tokens)
    row = jnp.searchsorted(query_start_loc[1:], token, side="right", method="compare_all")
    row_or_last = jnp.minimum(row, last_row)
    tile = tiles_end[row_or_last] - 1 - (token - query_start_loc[row_or_last]) // plan.queries
    in_tile = (row <= last_row) & (num_tiles[row_or_last] > 0)
    return Tiles(*(x.astype(jnp.int32) for x in tiles)), jnp.where(in_tile, tile, plan.num_items)


def _sink_of_rows(plan: Plan, sinks: jax.Array) -> jax.Array:
    """f32[C, W, M], in units of log2."""
    by_chunk = jnp.repeat(sinks.astype(jnp.float32).reshape(plan.chunks, plan.heads) * LOG2_E, plan.queries, axis=1)
    padding = CONSUMERS * ROWS - by_chunk.shape[1]
    return jnp.pad(by_chunk, ((0, 0), (0, padding))).reshape(plan.chunks, CONSUMERS, ROWS)
