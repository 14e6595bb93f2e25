"""The backward pass over rows with two queries or more: a tile of a row's keys at a time, over the queries that see it.

Keys outside and queries inside, so that each block's gradient is written once a row.

Q queries and K keys of a tile, T query tokens, S rows, H KV heads, G query heads a KV head, D head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._backward import pool_gradient
from pallas_kernels._backward.tile import Gradients, Saved, through_softmax
from pallas_kernels._xla import prefill
from pallas_kernels._xla.online_softmax import HIGHEST
from pallas_kernels._xla.problem import Problem


def differentiate(problem: Problem, saved: Saved, gradients: Gradients, max_query_len: int) -> Gradients:
    """Adds what the rows with two queries or more contribute."""
    tile_size = min(prefill.QUERIES_PER_TILE, 1 << (max_query_len - 1).bit_length())
    first_tile = problem.first_visible(problem.seq_lens - problem.query_lens) // problem.keys_per_tile  # i32[S]
    last_tile = -(-problem.seq_lens // problem.keys_per_tile)
    num_tiles = jnp.where(problem.query_lens > 1, jnp.maximum(last_tile - first_tile, 0), 0)
    tiles_end = jnp.cumsum(num_tiles, dtype=jnp.int32)

    # A tile at the end of a row reaches into the next row's tokens, at the end of the last one past the array.
    num_tokens = problem.q.shape[0]
    d_q, q, saved = jax.tree.map(lambda x: prefill.pad_tokens(x, tile_size), (gradients.q, problem.q, saved))
    problem = problem._replace(q=q)

    def add_tile(i: jax.Array, gradients: Gradients) -> Gradients:
        row = jnp.searchsorted(tiles_end, i, side="right")
        tile = first_tile[row] + i - (tiles_end[row] - num_tiles[row])
        return _keys(problem, saved, gradients, row, tile, tile_size)

    d_q, d_kv = jax.lax.fori_loop(0, tiles_end[-1], add_tile, Gradients(d_q, gradients.kv))
    return Gradients(d_q[:num_tokens], d_kv)


def _keys(
    problem: Problem, saved: Saved, gradients: Gradients, row: jax.Array, tile: jax.Array, tile_size: int
) -> Gradients:
    """Adds the gradients of one tile of a row's keys and of the queries that see it."""
    seq_len, query_len = problem.seq_lens[row], problem.query_lens[row]
    first_position = seq_len - query_len  # of the row's queries
    position, k, v = problem.read_tile(row, tile)  # [K], [H, K, D]
    in_row = (position >= problem.first_visible(first_position)) & (position < seq_len)
    k, v = (jnp.where(in_row[:, None], x, 0) for x in (k, v))  # 0 * NaN is NaN

    def add_queries(i: jax.Array, carry: tuple) -> tuple:
        all_d_q, d_k, d_v = carry
        start = problem.query_start_loc[row] + i * tile_size
        index = i * tile_size + jnp.arange(tile_size)  # of the queries in the row
        own = index < query_len
        visible = own[:, None] & in_row & (position >= problem.first_visible(first_position + index)[:, None])
        if problem.causal:
            visible &= position <= first_position + index[:, None]

        def take(x: jax.Array) -> jax.Array:
            """[Q, H, G, ...] of the tile, as [H, G, Q, ...], and 0 for tokens of other rows."""
            x = jax.lax.dynamic_slice_in_dim(x, start, tile_size)
            x = jnp.where(own.reshape(-1, *(1 for _ in x.shape[1:])), x, 0)
            return jnp.moveaxis(x, 0, 2)

        q = take(problem.q).astype(problem.dtype) * problem.scale
        d_out, lse, shift = (take(x) for x in saved)
        scores = jnp.einsum("hgqd,hkd->hgqk", q, k, precision=HIGHEST)
        d_weights = jnp.einsum("hgqd,hkd->hgqk", d_out, v, precision=HIGHEST)
        weights, d_scores = through_softmax(scores, d_weights, lse, shift, visible, problem.soft_cap)
        d_k += jnp.einsum("hgqk,hgqd->hkd", d_scores, q, precision=HIGHEST)
        d_v += jnp.einsum("hgqk,hgqd->hkd", weights, d_out, precision=HIGHEST)
        d_q = jnp.einsum("hgqk,hkd->qhgd", d_scores, k, precision=HIGHEST)
        d_q += jax.lax.dynamic_slice_in_dim(all_d_q, start, tile_size)
        return jax.lax.dynamic_update_slice_in_dim(all_d_q, d_q, start, 0), d_k, d_v

    first, end = _query_tiles(problem, tile, first_position, query_len, tile_size)
    start = (gradients.q, jnp.zeros_like(k), jnp.zeros_like(v))
    d_q, d_k, d_v = jax.lax.fori_loop(first, end, add_queries, start)
    if gradients.kv is None:
        return Gradients(d_q, None)
    block_ids = pool_gradient.block_ids(problem, row, tile, in_row)
    return Gradients(d_q, pool_gradient.add(gradients.kv, block_ids, d_k, d_v))


def _query_tiles(
    problem: Problem, tile: jax.Array, first_position: jax.Array, query_len: jax.Array, tile_size: int
) -> tuple[jax.Array, jax.Array]:
    """The first and past the last of a row's query tiles that see some of a tile's keys."""
    first_key = tile * problem.keys_per_tile
    first, end = jnp.zeros_like(query_len), query_len
    if problem.causal:
        first = jnp.maximum(first_key - first_position, 0)
    if problem.sliding_window is not None:
        last_key = first_key + problem.keys_per_tile - 1
        end = jnp.minimum(end, last_key + problem.sliding_window - first_position)
    return first // tile_size, -(-end // tile_size)
