"""What the parts of the Hopper prefill kernel share: what is static, the refs, and the interpreter's differences.

W consumer warpgroups, M rows of one, C programs an item, Q queries of a tile, K keys of a tile, S stages.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat

CONSUMERS = 2  # W
PRODUCER = CONSUMERS  # the warpgroup after them
ROWS = 64  # M, of one instruction of the matrix unit

LOG2_E = math.log2(math.e)

NARROWEST_SWIZZLE = 32  # bytes

# The columns of the work list.
ROW, FIRST_TOKEN, FIRST_POSITION, FIRST_KEY, END_KEY = range(5)

WGMMA = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a launch."""

    num_items: int
    head_dim: int
    block_size: int
    kv_on_lanes: bool
    dtype: Any  # of q and of the products' operands
    stored_dtype: Any  # of the pool: the same, or a quantised one
    heads: int  # query heads a program, all of one KV head
    chunks: int  # C
    chunks_per_kv_head: int
    queries: int  # Q
    keys: int  # K
    stages: int  # S
    soft_cap: float | None
    causal: bool
    windowed: bool
    has_sinks: bool
    interpret: Any

    @property
    def quantised(self) -> bool:
        return bool(self.stored_dtype != self.dtype)

    @property
    def piece(self) -> int:
        """Tokens of one copy of keys: a block, or as much of it as divides a tile."""
        return math.gcd(self.block_size, self.keys)

    @property
    def pieces(self) -> int:
        """Copies of a tile of keys."""
        return self.keys // self.piece

    def tiling(self, dtype: Any) -> tuple[Any, ...]:
        """How a tile of a dtype lies in shared memory: `columns` are swizzled as a whole."""
        width = self.columns * jnp.dtype(dtype).itemsize
        if self.interpret or width < NARROWEST_SWIZZLE:
            return ()
        return plgpu.TilingTransform((8, self.columns)), plgpu.SwizzleTransform(width)

    @property
    def columns(self) -> int:
        """Columns of a swizzle tile, as wide as divides a head; also what goes through registers at a time."""
        return next(n for n in (64, 32, 16) if self.head_dim % n == 0)

    @property
    def query_boxes(self) -> list[tuple[int, int, int, int, int]]:
        """(head, first query, consumer, first row, size) of each copy of q; a head may span the consumers."""
        boxes = []
        for head in range(self.heads):
            query = 0
            while query < self.queries:
                consumer, row = divmod(head * self.queries + query, ROWS)
                size = min(self.queries - query, ROWS - row)
                boxes.append((head, query, consumer, row, size))
                query += size
        return boxes

    @property
    def corners(self) -> list[tuple[int, int]]:
        """(first key, first column) of the parts of a tile of keys that go through registers one at a time."""
        return [(k, d) for k in range(0, self.keys, ROWS) for d in range(0, self.head_dim, self.columns)]

    def full(self, shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        """float32, in registers."""
        x = jnp.full(shape, value, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """int32, in registers."""
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=None if self.interpret else layout)

    def load(self, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
        return ref[...] if self.interpret else _compat.gpu_load(ref, layout, optimized=optimized)


class Program:
    """The refs of a launch, and what this program is to do."""

    def __init__(self, plan: Plan, inputs: tuple[Any, ...], outputs: tuple[Any, ...], scratch: dict[str, Any]):
        self.plan = plan
        self.q, self.pool, self.scales, self.block_tables, work, layer, scale, window, self.sinks = inputs
        self.out, self.lse = outputs
        self.scratch = scratch
        index = lax.axis_index("program")
        self.item = lax.div(index, jnp.int32(plan.chunks))
        self.chunk = lax.rem(index, jnp.int32(plan.chunks))
        self.kv_head = lax.div(self.chunk, jnp.int32(plan.chunks_per_kv_head))
        self.row = work[self.item, ROW]
        self.first_token = work[self.item, FIRST_TOKEN]
        self.first_position = work[self.item, FIRST_POSITION]  # of the first token
        self.first_key = work[self.item, FIRST_KEY]  # no query of the tile sees a key before
        self.end_key = work[self.item, END_KEY]  # nor from here on
        self.first_tile = lax.div(self.first_key, jnp.int32(plan.keys))
        self.end_tile = lax.div(self.end_key + (plan.keys - 1), jnp.int32(plan.keys))
        self.layer = layer[0]
        self.scale = scale[0]
        self.window = window[0] if plan.windowed else None

    def slot(self, tile: jax.Array) -> jax.Array:
        return lax.rem(tile - self.first_tile, jnp.int32(self.plan.stages))

    def in_reach(self, key: jax.Array) -> jax.Array:
        """Which keys some query of the tile may see; what is read in place of others may be anything."""
        return (key >= self.first_key) & (key < self.end_key)
