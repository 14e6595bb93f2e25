"""Whole blocks of a KV pool as bytes on the host: each KV head once, and nothing that pads.

So what is read from the pool of a mesh can be written to that of one device, and the other way round. On a mesh each
device reads and writes its own heads; the host has all of them, in every process.

Letters: U blocks in all, C blocks a call, L layers, H KV heads, B tokens a block; E is head_dim, or twice that where K
and V lie side by side.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pagedjax.block_table import NULL_BLOCK
from pagedjax.head_sharding import WHOLE, HeadSharding
from pallas_kernels import KVPages

CHUNK = 64  # C


def layout(kv_pages: KVPages, heads: HeadSharding | None = None) -> dict[str, Any]:
    """What two pools must have in common for the one to take the other's blocks, as JSON."""
    return {
        "num_layers": kv_pages.num_layers,
        "block_size": kv_pages.block_size,
        "num_kv_heads": kv_pages.num_kv_heads if heads is None else heads.num_kv_heads,
        "head_dim": kv_pages.head_dim,
        "dtype": kv_pages.dtype.name,
    }


def read_blocks(kv_pages: KVPages, block_ids: list[int], heads: HeadSharding | None = None) -> list[np.ndarray]:
    """The bytes of blocks, in the order of `block_ids`.

    Args:
        kv_pages: the pool; nothing changes in it.
        block_ids: U ids.
        heads: how the pool is divided over a mesh; None: it is on one device.

    Returns:
        For each array of the pool u8[U, L, ...]: the values [U, L, (2,) H, B, E], and the scales [U, L, 2, H, B] of a
        quantised pool. An empty list if U is 0.
    """
    chunks: list[list[np.ndarray]] = []
    for first in range(0, len(block_ids), CHUNK):
        ids = block_ids[first : first + CHUNK]
        padded = np.array(ids + [NULL_BLOCK] * (CHUNK - len(ids)), np.int32)
        with on_mesh(heads):
            values = jax.device_get(_gather(heads, kv_pages, padded))
        chunks.append([_bytes(value[: len(ids)]) for value in values])
    return [np.concatenate(parts) for parts in zip(*chunks, strict=True)]


def write_blocks(kv_pages: KVPages, blocks: list[np.ndarray], heads: HeadSharding | None = None) -> KVPages:
    """Puts blocks that `read_blocks` has read into a pool of the same layout, as its blocks 1, 2 .. U.

    Args:
        kv_pages: the pool; it is donated.
        blocks: the bytes.
        heads: how this pool is divided over a mesh.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, kv_pages)
    dtypes, num_blocks = [leaf.dtype for leaf in jax.tree.leaves(kv_pages)], len(blocks[0]) if blocks else 0
    for first in range(0, num_blocks, CHUNK):
        count = min(CHUNK, num_blocks - first)
        chunk = [np.zeros((CHUNK, *part.shape[1:]), np.uint8) for part in blocks]
        for padded, part in zip(chunk, blocks, strict=True):
            padded[:count] = part[first : first + count]
        values = [padded.view(dtype) for padded, dtype in zip(chunk, dtypes, strict=True)]
        with on_mesh(heads):
            kv_pages = _scatter(heads, kv_pages, values, np.int32(first + 1), np.int32(count))
    return jax.tree.map(jax.device_put, kv_pages, places)


def _bytes(values: np.ndarray) -> np.ndarray:
    """The same memory as u8: Orbax need not know the dtype."""
    return values.view(np.uint8)


def on_mesh(heads: HeadSharding | None) -> contextlib.AbstractContextManager:
    """Where programs over a pool that is so divided are called."""
    return contextlib.nullcontext() if heads is None else jax.set_mesh(heads.mesh)


@functools.partial(jax.jit, static_argnums=0)
def _gather(heads: HeadSharding | None, kv_pages: KVPages, block_ids: jax.Array) -> list[jax.Array]:
    """[C, L, ...] of each array."""
    if heads is None:
        return _gather_part(kv_pages, block_ids)
    pages, specs = _specs(heads, kv_pages)
    parts = heads.map(_gather_part, (pages, WHOLE), specs)(kv_pages, block_ids)
    once = [
        lax.slice_in_dim(part, 0, part.shape[_head_axis(spec)], heads.kv_copies, axis=_head_axis(spec))
        for part, spec in zip(parts, specs, strict=True)
    ]
    return lax.with_sharding_constraint(once, NamedSharding(heads.mesh, WHOLE))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _scatter(
    heads: HeadSharding | None, kv_pages: KVPages, values: list[jax.Array], first: jax.Array, count: jax.Array
) -> KVPages:
    """Puts the first `count` of [C, L, ...] at the blocks from `first` on."""
    if heads is None:
        return _scatter_part(kv_pages, values, first, count)
    pages, specs = _specs(heads, kv_pages)
    values = [
        jnp.repeat(value, heads.kv_copies, axis=_head_axis(spec)) for value, spec in zip(values, specs, strict=True)
    ]
    return heads.map(_scatter_part, (pages, specs, WHOLE, WHOLE), pages)(kv_pages, values, first, count)


def _specs(heads: HeadSharding, kv_pages: KVPages) -> tuple[KVPages, list[PartitionSpec]]:
    """How the pool is divided, and its blocks: an array of the pool has the layers first and then the blocks, blocks on
    the host the other way round; the heads, or the scales of heads, are on the same axis of both, the last one named.
    """
    pages = kv_pages.partition_specs(heads.axis)
    return pages, jax.tree.leaves(pages)


def _head_axis(spec: PartitionSpec) -> int:
    return len(spec) - 1


# One device's part of the pool


def _gather_part(kv_pages: KVPages, block_ids: jax.Array) -> list[jax.Array]:
    """Slice by slice: a gather might have the pool in another order, as a copy."""
    shapes = _block_shapes(kv_pages)

    def block(block_id: jax.Array) -> list[jax.Array]:
        leaves = jax.tree.leaves(kv_pages)
        padded = [lax.dynamic_index_in_dim(leaf, block_id, axis=1, keepdims=False) for leaf in leaves]
        return [
            values[..., : math.prod(shape[values.ndim - 1 :])].reshape(shape)
            for values, shape in zip(padded, shapes, strict=True)
        ]

    return lax.map(block, block_ids)


def _scatter_part(kv_pages: KVPages, values: list[jax.Array], first: jax.Array, count: jax.Array) -> KVPages:
    def put(index: jax.Array, kv_pages: KVPages) -> KVPages:
        leaves, structure = jax.tree.flatten(kv_pages)
        leaves = [
            # Narrower than the pool where that is padded.
            lax.dynamic_update_slice_in_dim(
                leaf, value[index].reshape(leaf.shape[0], 1, *leaf.shape[2:-1], -1), first + index, axis=1
            )
            for leaf, value in zip(leaves, values, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    return lax.fori_loop(0, count, put, kv_pages)


def _block_shapes(kv_pages: KVPages) -> list[tuple[int, ...]]:
    """Of a block in all layers, for each array of the pool: [L, (2,) H, B, E], and [L, 2, H, B] of the scales."""
    pool = kv_pages.pool
    line = kv_pages.head_dim * (2 if kv_pages.kv_on_lanes else 1)
    shapes = [(pool.shape[0], *pool.shape[2:-1], line)]
    if kv_pages.is_quantised:
        shapes.append((pool.shape[0], 2, kv_pages.num_kv_heads, kv_pages.block_size))
    return shapes
