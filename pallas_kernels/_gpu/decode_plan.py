"""What the parts of the Hopper decode kernel share: what is static about a launch, and the refs.

S rows, H KV heads, G query heads a KV head, Q queries a row at most, C = Q * G columns in use, N those computed,
D head_dim, E = D rounded up to 64, B tokens a block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels._gpu import split
from pallas_kernels._gpu.split import TILE

STAGES = 3
QUERY_SLOTS = 2
COLUMNS_AT_A_TIME = 64  # of a tile that goes through registers
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor
SMALL_BUFFERS = 12 * 1024  # queries, weights, scales, barriers: what they take in the usual shapes
LEAST_SCALES = 32  # a copy brings 128 bytes or more

ELEMENT = plgpu.Layout.WGMMA  # [TILE or E, N]
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # [N]
PER_KEY = plgpu.Layout.WGMMA.reduce(1)  # [TILE]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a launch."""

    num_kv_heads: int  # H
    group: int  # G
    max_query_len: int  # Q
    head_dim: int  # D
    block_size: int  # B
    kv_on_lanes: bool
    dtype: Any  # of q and of the products' operands
    stored_dtype: Any  # of the pool: the same, or a quantised one
    soft_cap: float | None
    causal: bool
    has_window: bool
    interpret: Any

    @property
    def is_quantised(self) -> bool:
        return bool(self.stored_dtype != self.dtype)

    @property
    def columns(self) -> int:
        """C."""
        return self.group * self.max_query_len

    @property
    def padded_columns(self) -> int:
        """N: the matrix unit takes multiples of 8."""
        return -(-self.columns // 8) * 8

    @property
    def copies(self) -> int:
        """Copies a block takes: K and V, or both in one where they lie side by side."""
        return 1 if self.kv_on_lanes else 2

    @property
    def line(self) -> int:
        """Elements that one copy brings of a token."""
        return self.head_dim * 2 // self.copies

    @property
    def tile_columns(self) -> int:
        """Elements of the tiles that lines are cut into in shared memory, each swizzled as a whole."""
        return next(n for n in (64, 32, 16) if self.line % n == 0)

    @property
    def key_columns(self) -> int:
        """How much of a line is multiplied with q: whole tiles, so V's beginning may be among it; there q is zero."""
        return -(-self.head_dim // self.tile_columns) * self.tile_columns

    @property
    def padded_dim(self) -> int:
        """E: the rows of V^T are the last E of a line, a multiple of 64. The first E - D are K's, and unused."""
        return -(-self.head_dim // 64) * 64

    @property
    def blocks_per_tile(self) -> int:
        return max(1, TILE // self.block_size)

    @property
    def rows_per_copy(self) -> int:
        return min(TILE, self.block_size)

    @property
    def scales_per_copy(self) -> int:
        return self.rows_per_copy if self.interpret else max(self.rows_per_copy, LEAST_SCALES)

    @property
    def scale_buffers(self) -> int:
        """Copies of scales that are longer than a block overlap: neighbouring blocks' go to buffers of their own."""
        return max(1, LEAST_SCALES // self.block_size)

    def scale_buffer(self, j: int) -> tuple[int, int]:
        """The buffer for the scales of block j of a tile, and how many scales its copy has before them."""
        buffer = j % self.scale_buffers
        return buffer, 0 if self.interpret else buffer * self.block_size

    @property
    def arrivals(self) -> int:
        """Copies that fill one part of a stage."""
        return self.blocks_per_tile * (1 + (2 // self.copies if self.is_quantised else 0))

    @property
    def programs_per_multiprocessor(self) -> int:
        """As many as have a place at once, two at most: the registers of three don't fit."""
        ring = STAGES * TILE * 2 * self.head_dim * jnp.dtype(self.stored_dtype).itemsize
        wide = TILE * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize if self.is_quantised else 0
        return 2 if 2 * (ring + wide + SMALL_BUFFERS) <= SHARED_MEMORY else 1

    def scratch(self) -> dict[str, Any]:
        columns = self.padded_columns
        kv_shape = (self.copies, TILE, self.line)
        refs = {
            "q_s": self._operand((QUERY_SLOTS, columns, self.key_columns), self.dtype),
            "kv_s": self._operand((STAGES, *kv_shape), self.stored_dtype),
            "p_s": self._operand((columns, TILE), self.dtype),
            "q_full": plgpu.Barrier(num_barriers=QUERY_SLOTS),
            "q_empty": plgpu.Barrier(num_barriers=QUERY_SLOTS),
            "kv_full": plgpu.Barrier(num_arrivals=self.arrivals, num_barriers=STAGES * self.copies),
            "kv_empty": plgpu.Barrier(num_barriers=STAGES),
        }
        if self.is_quantised:
            refs["wide_s"] = self._operand(kv_shape, self.dtype)
            refs["scales_s"] = plgpu.SMEM((STAGES, 2, self.scale_buffers, TILE), jnp.float32)
        return refs

    def _operand(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Shared memory as the matrix unit wants it; the interpreter keeps it plain."""
        tiling = plgpu.TilingTransform((8, self.tile_columns))
        swizzle = plgpu.SwizzleTransform(self.tile_columns * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=() if self.interpret else (tiling, swizzle))

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        """Says how registers hold x; the interpreter has none."""
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        return self.cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout)

    def load(self, ref: Any, layout: Any) -> jax.Array:
        return ref[...] if self.interpret else _compat.gpu_load(ref, layout)

    def pieces(self, columns: int) -> list[Any]:
        """Cuts the columns of a tile into slices that go through registers one at a time."""
        width = columns if self.interpret else math.gcd(columns, COLUMNS_AT_A_TIME)
        return [pl.ds(start, width) for start in range(0, columns, width)]


class Program:
    """The refs of a launch, and which items this program has: every `programs`-th."""

    def __init__(self, plan: Plan, programs: int, refs: tuple[Any, ...], scratch: dict[str, Any]):
        self.plan = plan
        self.q, self.pool, self.block_table, self.items, integers, scale, *scales = refs[:-3]
        self.scales = scales[0] if scales else None
        self.outputs = refs[-3:]
        self.scratch = scratch
        self.programs = programs
        self.index = lax.axis_index("program")
        count, self.layer, self.window = integers[0], integers[1], integers[2]
        self.count = jnp.maximum(lax.div(count - self.index + (programs - 1), jnp.int32(programs)), 0)
        self.scale = scale[0]
        self.table_width = self.block_table.shape[0] // self.q.shape[0]

    def head_and_item(self, i: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The KV head and the columns of the program's i-th item. Neighbours have the heads of one part of a row: their
        blocks lie side by side."""
        number = self.index + i * self.programs
        item = lax.div(number, jnp.int32(self.plan.num_kv_heads)) * split.ITEM_SIZE
        head = lax.rem(number, jnp.int32(self.plan.num_kv_heads))
        return head, [self.items[item + column] for column in range(split.ITEM_SIZE - 1)]
