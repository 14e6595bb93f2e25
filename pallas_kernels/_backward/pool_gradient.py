"""The gradient of the KV pool: one layer's sum while it grows, in the layout of the pool; then the cotangent of all.

N blocks, H KV heads, B tokens a block, D head_dim, E the last axis of a pool with K and V side by side, C blocks that
are added at once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels._kv_pages import KVPages, side_by_side
from pallas_kernels._xla.problem import Problem


def start(problem: Problem) -> jax.Array | None:
    """Zeros [N, 2, H, B, D] or [N, H, B, E] in the dtype of the computation; None for a pool that is a constant."""
    kv_pages = problem.kv_pages
    if kv_pages.scales is not None:
        return None
    return jnp.zeros(kv_pages.pool.shape[1:], problem.dtype)


def block_ids(problem: Problem, rows: jax.Array, tiles: jax.Array, visible: jax.Array) -> jax.Array:
    """i32[..., C]: the blocks of a tile of keys; past the pool, and so dropped, where no key of a block is visible.

    rows, tiles i32[...] as for `Problem.read_tile`, visible bool[..., K].
    """
    kv_pages = problem.kv_pages
    column = tiles[..., None] * problem.blocks_per_tile + jnp.arange(problem.blocks_per_tile)
    ids = problem.block_tables[rows[..., None], jnp.minimum(column, problem.block_tables.shape[1] - 1)]
    used = visible.reshape(*ids.shape, kv_pages.block_size).any(-1)
    return jnp.where(used, jnp.clip(ids, 0, kv_pages.num_blocks - 1), kv_pages.num_blocks)


def add(gradient: jax.Array, block_ids: jax.Array, d_k: jax.Array, d_v: jax.Array) -> jax.Array:
    """Adds the gradients of blocks i32[..., C], d_k and d_v [..., H, C * B, D]; an id past the pool is dropped."""
    block_size = gradient.shape[-2]

    def by_block(x: jax.Array) -> jax.Array:
        blocks = x.reshape(*x.shape[:-2], -1, block_size, x.shape[-1])  # [..., H, C, B, D]
        return jnp.moveaxis(blocks, -3, -4)  # [..., C, H, B, D]

    d_k, d_v = by_block(d_k), by_block(d_v)
    on_lanes = gradient.ndim == 4
    update = side_by_side(d_k, d_v, gradient.shape[-1]) if on_lanes else jnp.stack([d_k, d_v], -4)
    return gradient.at[block_ids].add(update, mode="drop")


def finish(gradient: jax.Array | None, problem: Problem, layer: jax.Array, num_layers: int) -> KVPages | None:
    """The cotangent of a pool of num_layers: the gradient in its layer's place, zeros elsewhere."""
    if gradient is None:
        return None
    dtype = problem.kv_pages.dtype
    zeros = jnp.zeros((num_layers, *gradient.shape), dtype)
    whole = jax.lax.dynamic_update_index_in_dim(zeros, gradient.astype(dtype), layer, 0)
    return dataclasses.replace(problem.kv_pages, pool=whole)
