"""The decode pass: rows with exactly one query, in groups of similar length that walk their keys together.

R rows of a group, H KV heads, G query heads a KV head, D head_dim, K keys of a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _online_softmax
from pallas_kernels._xla_problem import Problem

ROWS_PER_GROUP = 8


def attend(problem: Problem, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fills the decode rows' lines of out [T, H, G, D] and lse [T, H, G]."""
    num_tokens, num_rows = out.shape[0], problem.seq_lens.shape[0]
    group_size = min(ROWS_PER_GROUP, num_rows)
    first_tile = problem.first_visible(problem.seq_lens - 1) // problem.keys_per_tile
    last_tile = -(-problem.seq_lens // problem.keys_per_tile)
    num_tiles = jnp.where(problem.query_lens == 1, last_tile - first_tile, 0)

    # The longest first: the rows of a group are about as long as each other, and rows without work come last.
    order = jnp.argsort(num_tiles, descending=True)
    order = jnp.pad(order, (0, -num_rows % group_size), mode="edge")
    is_filler = jnp.arange(order.shape[0]) >= num_rows
    num_groups = -(-jnp.sum(num_tiles > 0) // group_size)

    def attend_group(group: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        rows = jax.lax.dynamic_slice_in_dim(order, group * group_size, group_size)
        filler = jax.lax.dynamic_slice_in_dim(is_filler, group * group_size, group_size)
        active = (num_tiles[rows] > 0) & ~filler
        group_out, group_lse = _attend_rows(problem, rows, first_tile[rows], num_tiles[rows])
        token = jnp.where(active, problem.query_start_loc[rows], num_tokens)  # past the end: dropped
        out = out.at[token].set(group_out.astype(out.dtype), mode="drop", unique_indices=True)
        lse = lse.at[token].set(group_lse, mode="drop", unique_indices=True)
        return out, lse

    return jax.lax.fori_loop(0, num_groups, attend_group, (out, lse))


def _attend_rows(
    problem: Problem, rows: jax.Array, first_tile: jax.Array, num_tiles: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """rows, first_tile, num_tiles: i32[R]; returns out [R, H, G, D] and lse [R, H, G]."""
    seq_lens = problem.seq_lens[rows][:, None]
    first_key = problem.first_visible(seq_lens - 1)
    q = problem.q[problem.query_start_loc[rows]].astype(problem.dtype) * problem.scale  # [R, H, G, D]

    def attend_tile(i: jax.Array, state: _online_softmax.SoftmaxState) -> _online_softmax.SoftmaxState:
        position, k, v = problem.read_tile(rows, first_tile + i)  # [R, K], [R, H, K, D]
        visible = (position >= first_key) & (position < seq_lens)
        v = jnp.where(visible[:, None, :, None], v, 0)  # 0 * NaN is NaN
        scores = jnp.einsum("rhgd,rhkd->rhgk", q, k, precision=_online_softmax.HIGHEST)
        scores = _online_softmax.cap(scores, problem.soft_cap)
        return _online_softmax.update(state, scores, visible[:, None, None, :], v, "rhgk,rhkd->rhgd")

    state = _online_softmax.start(q.shape[:-1], q.shape[-1], problem.dtype)
    state = jax.lax.fori_loop(0, num_tiles.max(), attend_tile, state)
    return _online_softmax.finish(state, problem.sinks)
