"""The shape of a tile of keys, and the memory that a stream of them takes.

S rows, P blocks a table line, H KV heads, B tokens a block, D head_dim, E and F the last axes of the pool and of its
scales, C blocks a tile, K = C * B keys a tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import KVPages, round_up_to_lanes

# Powers of two: a tile's slot is its number modulo these.
KV_SLOTS = 4
ID_SLOTS = 8

# Copies from HBM into SMEM start at multiples of this many words.
ID_ALIGNMENT = 128


@dataclasses.dataclass(frozen=True)
class TileShape:
    """What is static about a stream: the pool it reads and how many blocks make a tile."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    lanes: int  # E: D, or K and V side by side and what padding they have
    scale_lanes: int  # F, 0 without scales
    dtype: Any
    kv_on_lanes: bool
    blocks_per_tile: int

    @staticmethod
    def of(kv_pages: KVPages, keys_per_tile: int) -> TileShape:
        """Tiles of keys_per_tile keys, or of one block where that is larger."""
        return TileShape(
            num_kv_heads=kv_pages.num_kv_heads,
            block_size=kv_pages.block_size,
            head_dim=kv_pages.head_dim,
            lanes=kv_pages.pool.shape[-1],
            scale_lanes=0 if kv_pages.scales is None else kv_pages.scales.shape[-1],
            dtype=kv_pages.dtype,
            kv_on_lanes=kv_pages.kv_on_lanes,
            blocks_per_tile=max(1, keys_per_tile // kv_pages.block_size),
        )

    @property
    def quantised(self) -> bool:
        return self.scale_lanes > 0

    @property
    def v_start(self) -> int:
        """The first lane of V on a line of `KVStream.v`."""
        return self.head_dim if self.kv_on_lanes else 0

    @property
    def keys(self) -> int:
        return self.blocks_per_tile * self.block_size

    @property
    def ids_per_slot(self) -> int:
        """A slot of block ids holds a tile's ids wherever they start in their first aligned chunk."""
        return ID_ALIGNMENT + -(-self.blocks_per_tile // ID_ALIGNMENT) * ID_ALIGNMENT

    @property
    def vmem_bytes(self) -> int:
        """What `scratch_shapes` takes of VMEM, padding to whole registers included."""
        parts = 1 if self.kv_on_lanes else 2
        tile = parts * self.num_kv_heads * self.keys * round_up_to_lanes(self.lanes) * jnp.dtype(self.dtype).itemsize
        tile += self.blocks_per_tile * 2 * round_up_to_lanes(self.scale_lanes) * 4
        return KV_SLOTS * tile

    def scratch_shapes(self) -> list[Any]:
        """Scratch for a `KVStream`, in the order of `StreamRefs`' last fields."""
        heads = (self.num_kv_heads,) if self.kv_on_lanes else (2, self.num_kv_heads)
        shapes = [
            pltpu.SMEM((ID_SLOTS * self.ids_per_slot,), jnp.int32),
            pltpu.SemaphoreType.DMA((ID_SLOTS,)),
            pltpu.VMEM((KV_SLOTS, *heads, self.keys, self.lanes), self.dtype),
            pltpu.SemaphoreType.DMA((KV_SLOTS,)),
        ]
        if self.quantised:
            shapes.append(pltpu.VMEM((KV_SLOTS, self.blocks_per_tile, 2, self.scale_lanes), jnp.float32))
        return shapes


def flatten_table(block_tables: jax.Array, tile: TileShape) -> jax.Array:
    """The table as a stream reads it: i32[...], S * P entries and room to read a whole slot at the last one."""
    flat = block_tables.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % ID_ALIGNMENT + tile.ids_per_slot))
