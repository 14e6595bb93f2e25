"""What the two passes of the XLA implementation share: the arguments, and how a tile of keys is read.

T query tokens, S rows, H KV heads, G query heads a KV head, D head_dim, P blocks a table line, K keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._kv_pages import KVPages, read_blocks

KEYS_PER_TILE = 128  # rounded to whole blocks


class Problem(NamedTuple):
    q: jax.Array  # [T, H, G, D]
    kv_pages: KVPages
    block_tables: jax.Array  # i32[S, P]
    seq_lens: jax.Array  # i32[S]
    query_start_loc: jax.Array  # i32[S + 1]
    layer: jax.Array  # i32[]
    scale: jax.Array  # []
    sliding_window: jax.Array | None  # i32[]
    sinks: jax.Array | None  # [H, G]
    soft_cap: float | None
    causal: bool

    @property
    def query_lens(self) -> jax.Array:
        """i32[S]."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def dtype(self) -> jnp.dtype:
        """What is computed in."""
        return self.scale.dtype

    @property
    def blocks_per_tile(self) -> int:
        return max(1, min(KEYS_PER_TILE // self.kv_pages.block_size, self.block_tables.shape[1]))

    @property
    def keys_per_tile(self) -> int:
        return self.blocks_per_tile * self.kv_pages.block_size

    def first_visible(self, position: jax.Array) -> jax.Array:
        """The first key that a query at `position` may see, at least 0."""
        if self.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - self.sliding_window + 1, 0)

    def read_tile(self, rows: jax.Array, tiles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Reads one tile of keys for each of some rows (rows and tiles: i32[...], both of one shape).

        Returns:
            position i32[..., K], and k, v [..., H, K, D] in the dtype of the computation. What lies past a row's
            length, or was freed before its window, may be anything: mask k's scores, zero v.
        """
        column = tiles[..., None] * self.blocks_per_tile + jnp.arange(self.blocks_per_tile)
        block_ids = self.block_tables[rows[..., None], jnp.minimum(column, self.block_tables.shape[1] - 1)]
        k, v = read_blocks(self.kv_pages, self.layer, block_ids)
        position = tiles[..., None] * self.keys_per_tile + jnp.arange(self.keys_per_tile)
        return position, k.astype(self.dtype), v.astype(self.dtype)
