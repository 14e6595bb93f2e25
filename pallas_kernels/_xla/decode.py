"""The decode pass: rows with exactly one query, in groups of similar length that walk their keys together.

T query tokens, R rows of a group, H KV heads, G query heads a KV head, D head_dim, K keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._xla import online_softmax
from pallas_kernels._xla.problem import Problem

ROWS_PER_GROUP = 8


class Work(NamedTuple):
    """What there is to do for some rows, i32 each."""

    row: jax.Array
    token: jax.Array  # the row's query; T where there is none
    seq_len: jax.Array
    first_key: jax.Array
    first_tile: jax.Array
    num_tiles: jax.Array


def attend(problem: Problem, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fills the decode rows' lines of out [T, H, G, D] and lse [T, H, G]."""
    work, group_size = sorted_work(problem)
    num_groups = -(-jnp.sum(work.num_tiles > 0) // group_size)

    def attend_group(group: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        mine = Work(*(jax.lax.dynamic_slice_in_dim(x, group * group_size, group_size) for x in work))
        group_out, group_lse = _attend_rows(problem, mine)
        out = out.at[mine.token].set(group_out.astype(out.dtype), mode="drop", unique_indices=True)
        lse = lse.at[mine.token].set(group_lse, mode="drop", unique_indices=True)
        return out, lse

    return jax.lax.fori_loop(0, num_groups, attend_group, (out, lse))


def sorted_work(problem: Problem) -> tuple[Work, int]:
    """The longest rows first, so that the rows of a group are about as long; those without work last.

    Returns:
        The work, in whole groups, and how many rows a group has: no more than there are tokens.
    """
    num_tokens, num_rows = problem.q.shape[0], problem.seq_lens.shape[0]
    group_size = min(ROWS_PER_GROUP, num_rows, num_tokens)
    first_key = problem.first_visible(problem.seq_lens - 1)
    first_tile = first_key // problem.keys_per_tile
    last_tile = -(-problem.seq_lens // problem.keys_per_tile)
    num_tiles = jnp.where(problem.query_lens == 1, last_tile - first_tile, 0)
    token = jnp.where(num_tiles > 0, problem.query_start_loc[:-1], num_tokens)
    work = Work(jnp.arange(num_rows), token, problem.seq_lens, first_key, first_tile, num_tiles)
    _, *columns = jax.lax.sort((-num_tiles, *work), num_keys=1)
    # Filler rows have no tiles, and a token that is dropped.
    work = Work(*(jnp.pad(x, (0, -num_rows % group_size)) for x in columns))
    return work._replace(token=jnp.where(work.num_tiles > 0, work.token, num_tokens)), group_size


def _attend_rows(problem: Problem, work: Work) -> tuple[jax.Array, jax.Array]:
    """out [R, H, G, D] and lse [R, H, G] of the rows of a group."""
    q = problem.q[work.token].astype(problem.dtype) * problem.scale  # [R, H, G, D]

    def attend_tile(i: jax.Array, state: online_softmax.SoftmaxState) -> online_softmax.SoftmaxState:
        position, k, v = problem.read_tile(work.row, work.first_tile + i)  # [R, K], [R, H, K, D]
        visible = (position >= work.first_key[:, None]) & (position < work.seq_len[:, None])
        v = jnp.where(visible[:, None, :, None], v, 0)  # 0 * NaN is NaN
        scores = jnp.einsum("rhgd,rhkd->rhgk", q, k, precision=online_softmax.HIGHEST)
        scores = online_softmax.cap(scores, problem.soft_cap)
        return online_softmax.update(state, scores, visible[:, None, None, :], v, "rhgk,rhkd->rhgd")

    state = online_softmax.start(q.shape[:-1], q.shape[-1], problem.dtype)
    state = jax.lax.fori_loop(0, work.num_tiles[0], attend_tile, state)  # the first row is the longest
    return online_softmax.finish(state, problem.sinks)
