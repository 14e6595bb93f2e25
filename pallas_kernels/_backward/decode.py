"""The backward pass over rows with exactly one query, in the groups of similar length of the forward pass.

R rows of a group, H KV heads, G query heads a KV head, D head_dim, K keys of a tile, C blocks of a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._backward import pool_gradient
from pallas_kernels._backward.tile import Gradients, Saved, through_softmax
from pallas_kernels._xla import decode
from pallas_kernels._xla.decode import Work
from pallas_kernels._xla.online_softmax import HIGHEST
from pallas_kernels._xla.problem import Problem


def differentiate(problem: Problem, saved: Saved, gradients: Gradients) -> Gradients:
    """Adds what the rows with one query contribute."""
    work, group_size = decode.sorted_work(problem)
    num_groups = -(-jnp.sum(work.num_tiles > 0) // group_size)

    def add_group(group: jax.Array, gradients: Gradients) -> Gradients:
        mine = Work(*(jax.lax.dynamic_slice_in_dim(x, group * group_size, group_size) for x in work))
        d_q, d_kv = _rows(problem, saved, mine, gradients.kv)
        # Each token is one row's: there is nothing there to add to.
        return Gradients(gradients.q.at[mine.token].set(d_q, mode="drop", unique_indices=True), d_kv)

    return jax.lax.fori_loop(0, num_groups, add_group, gradients)


def _rows(problem: Problem, saved: Saved, work: Work, d_kv: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """d_q [R, H, G, D] of the rows of a group, and the pool's gradient with theirs added."""
    # A row without work has keys all the same, and must add nothing to their gradients.
    seq_len = jnp.where(work.num_tiles > 0, work.seq_len, 0)
    token = jnp.minimum(work.token, problem.q.shape[0] - 1)
    q = problem.q[token].astype(problem.dtype) * problem.scale  # [R, H, G, D]
    d_out, lse, shift = (x[token] for x in saved)  # [R, H, G, D], [R, H, G] twice

    def add_tile(i: jax.Array, carry: tuple) -> tuple:
        d_q, d_kv = carry
        tile = work.first_tile + i
        position, k, v = problem.read_tile(work.row, tile)  # [R, K], [R, H, K, D]
        visible = (position >= work.first_key[:, None]) & (position < seq_len[:, None])
        k, v = (jnp.where(visible[:, None, :, None], x, 0) for x in (k, v))  # 0 * NaN is NaN
        scores = jnp.einsum("rhgd,rhkd->rhgk", q, k, precision=HIGHEST)
        d_weights = jnp.einsum("rhgd,rhkd->rhgk", d_out, v, precision=HIGHEST)
        weights, d_scores = through_softmax(scores, d_weights, lse, shift, visible[:, None, None, :], problem.soft_cap)
        d_q += jnp.einsum("rhgk,rhkd->rhgd", d_scores, k, precision=HIGHEST)
        if d_kv is not None:
            d_k = jnp.einsum("rhgk,rhgd->rhkd", d_scores, q, precision=HIGHEST)
            d_v = jnp.einsum("rhgk,rhgd->rhkd", weights, d_out, precision=HIGHEST)
            d_kv = pool_gradient.add(d_kv, pool_gradient.block_ids(problem, work.row, tile, visible), d_k, d_v)
        return d_q, d_kv

    return jax.lax.fori_loop(0, work.num_tiles[0], add_tile, (jnp.zeros_like(q), d_kv))  # the first row is the longest
