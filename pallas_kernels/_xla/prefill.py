"""The prefill pass: rows with two queries or more, one tile of one row's queries at a time.

Q queries of a tile, T query tokens, S rows, H KV heads, G query heads a KV head, D head_dim, K keys of a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._xla import online_softmax
from pallas_kernels._xla.problem import Problem

QUERIES_PER_TILE = 64


def attend(problem: Problem, out: jax.Array, lse: jax.Array, max_query_len: int) -> tuple[jax.Array, jax.Array]:
    """Fills the lines of the rows with two queries or more in out [T, H, G, D] and lse [T, H, G]."""
    tile_size = min(QUERIES_PER_TILE, 1 << (max_query_len - 1).bit_length())
    query_lens = problem.query_lens
    tiles_end = jnp.cumsum(jnp.where(query_lens > 1, -(-query_lens // tile_size), 0), dtype=jnp.int32)  # i32[S]

    # A tile at the end of a row reaches into the next row's tokens, at the end of the last one past the array.
    num_tokens = out.shape[0]
    out, lse, q = (pad_tokens(x, tile_size) for x in (out, lse, problem.q))
    problem = problem._replace(q=q)

    def attend_tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        row = jnp.searchsorted(tiles_end, i, side="right")
        tile_in_row = i - jnp.where(row > 0, tiles_end[row - 1], 0)
        offset = tile_in_row * tile_size
        tile_out, tile_lse = _attend_queries(problem, row, offset, tile_size)
        start = problem.query_start_loc[row] + offset
        own = jnp.arange(tile_size) < query_lens[row] - offset
        return _write_own(out, tile_out, start, own), _write_own(lse, tile_lse, start, own)

    out, lse = jax.lax.fori_loop(0, tiles_end[-1], attend_tile, (out, lse))
    return out[:num_tokens], lse[:num_tokens]


def _attend_queries(problem: Problem, row: jax.Array, offset: jax.Array, tile_size: int) -> tuple[jax.Array, jax.Array]:
    """Queries offset .. offset + Q - 1 of a row: out [Q, H, G, D] and lse [Q, H, G]; junk past the row's end."""
    seq_len, query_len = problem.seq_lens[row], problem.query_lens[row]
    q = jax.lax.dynamic_slice_in_dim(problem.q, problem.query_start_loc[row] + offset, tile_size)
    q = q.transpose(1, 2, 0, 3).astype(problem.dtype) * problem.scale  # [H, G, Q, D]
    query_position = seq_len - query_len + offset + jnp.arange(tile_size, dtype=jnp.int32)
    first_key = problem.first_visible(query_position)  # non-decreasing over the queries
    last_key = jnp.minimum(seq_len, query_position[0] + tile_size) if problem.causal else seq_len

    def attend_tile(tile: jax.Array, state: online_softmax.SoftmaxState) -> online_softmax.SoftmaxState:
        position, k, v = problem.read_tile(row, tile)  # [K], [H, K, D]
        in_row = (position >= first_key[0]) & (position < seq_len)
        v = jnp.where(in_row[:, None], v, 0)  # 0 * NaN is NaN
        visible = in_row & (position >= first_key[:, None])  # [Q, K]
        if problem.causal:
            visible &= position <= query_position[:, None]
        scores = jnp.einsum("hgqd,hkd->hgqk", q, k, precision=online_softmax.HIGHEST)
        scores = online_softmax.cap(scores, problem.soft_cap)
        return online_softmax.update(state, scores, visible, v, "hgqk,hkd->hgqd")

    state = online_softmax.start(q.shape[:-1], q.shape[-1], problem.dtype)
    first_tile = first_key[0] // problem.keys_per_tile
    state = jax.lax.fori_loop(first_tile, -(-last_key // problem.keys_per_tile), attend_tile, state)
    out, lse = online_softmax.finish(state, None if problem.sinks is None else problem.sinks[..., None])
    return out.transpose(2, 0, 1, 3), lse.transpose(2, 0, 1)


def pad_tokens(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, count), *((0, 0) for _ in x.shape[1:])))


def _write_own(target: jax.Array, tile: jax.Array, start: jax.Array, own: jax.Array) -> jax.Array:
    """Writes a tile's own tokens at `start`, leaving its neighbours' as they are."""
    present = jax.lax.dynamic_slice_in_dim(target, start, tile.shape[0])
    own = own.reshape(-1, *(1 for _ in tile.shape[1:]))
    return jax.lax.dynamic_update_slice_in_dim(target, jnp.where(own, tile.astype(target.dtype), present), start, 0)
