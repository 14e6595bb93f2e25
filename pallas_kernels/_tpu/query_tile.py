"""A tile of queries in VMEM: it comes from HBM token by token, is computed with head by head, and goes back.

Only an item's own tokens are read and written, those of its neighbours never. The queries of the next item travel
while this one is computed, and so do the results of the one before.

T query tokens, Hq query heads, Q queries of a tile (a power of two), D head_dim, E the last axis of a tile of keys
(D, or at least 2 * D with K and V on lanes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import LANES
from pallas_kernels._tpu.work import WorkRefs

SUBLANES = 8
# Tokens of a slab, the lines of a bfloat16 register tile: so many are copied at once, and put from the order of tokens
# into that of heads.
SLAB = 16


class QueryTileShape(NamedTuple):
    """What is static about a tile of queries."""

    queries: int  # Q
    num_q_heads: int
    head_dim: int
    lanes: int  # E
    v_start: int  # the first lane of V in a tile of keys
    query_dtype: Any
    compute_dtype: Any

    @property
    def vmem_bytes(self) -> int:
        """What `scratch_shapes` takes of VMEM, padding to whole registers included."""
        heads, size = self.num_q_heads, self.query_dtype.itemsize
        a_token = 2 * _round_up(heads, SUBLANES * 4 // size) * _round_up(self.head_dim, LANES) * size
        by_head = heads * _round_up(self.lanes, LANES) * (self.compute_dtype.itemsize + 4)
        return self.queries * (a_token + by_head + 2 * heads * LANES * 4 + _round_up(heads, LANES) * 4)

    def scratch_shapes(self) -> list[Any]:
        """Scratch for a `QueryTile`, in the order of the last fields of `QueryTileRefs`."""
        by_token = (self.queries, self.num_q_heads, self.head_dim)
        by_head = (self.num_q_heads, self.queries)
        return [
            pltpu.VMEM(by_token, self.query_dtype),
            pltpu.VMEM((*by_head, self.lanes), self.compute_dtype),
            pltpu.VMEM((*by_head, LANES), jnp.float32),
            pltpu.VMEM((*by_head, LANES), jnp.float32),
            pltpu.VMEM((*by_head, self.lanes), jnp.float32),
            pltpu.VMEM(by_token, self.query_dtype),
            pltpu.VMEM((self.queries, 1, self.num_q_heads), jnp.float32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ]


class QueryTileRefs(NamedTuple):
    hbm_q: Any  # [T, Hq, D]
    hbm_out: Any  # [T, Hq, D]
    hbm_lse: Any  # f32[T, 1, Hq]
    token_q: Any  # [Q, Hq, D]
    q: Any  # [Hq, Q, E], in the dtype of the computation, the lanes past D 0
    largest: Any  # f32[Hq, Q, LANES]: the running softmax in base 2, the same on all lanes; at the end the LSE
    total: Any  # f32[Hq, Q, LANES]: its sum, lane by lane
    value: Any  # f32[Hq, Q, E]: its weighted value; at the end out, on the D lanes from v_start
    token_out: Any  # [Q, Hq, D]
    token_lse: Any  # f32[Q, 1, Hq]
    q_semaphore: Any
    out_semaphore: Any


class QueryTile:
    """The queries of items first_item, first_item + item_step, ... of a work list, inside a kernel."""

    def __init__(
        self, shape: QueryTileShape, work: WorkRefs, refs: QueryTileRefs, *, first_item: jax.Array, item_step: int
    ) -> None:
        self.shape, self.work, self.refs = shape, work, refs
        self.first_item, self.item_step = first_item, item_step

    def start(self) -> None:
        """Before the first item."""
        if self.shape.lanes > self.shape.head_dim:
            self.refs.q[...] = jnp.zeros(self.refs.q.shape, self.refs.q.dtype)  # the lanes past D stay 0
        self._copy_queries(self.first_item, start=True)

    def load(self, item: jax.Array) -> None:
        """Brings the item's queries into `q`, and starts the copy of the next item's."""
        self._copy_queries(item, start=False)
        self._each_slab(item, self._pack_slab)
        self._copy_queries(item + self.item_step, start=True)

    def store(self, item: jax.Array) -> None:
        """Starts the copy of what `value` and `largest` hold into out and LSE."""
        self.finish(item)
        self._each_slab(item, self._unpack_slab)
        self._copy_results(item, start=True)

    def finish(self, item: jax.Array) -> None:
        """Waits until the results of the items before this one have arrived."""
        self._copy_results(item - self.item_step, start=False)

    def _each_slab(self, item: jax.Array, do: Callable[[jax.Array], None]) -> None:
        def body(slab: jax.Array, _: None) -> None:
            do(pl.multiple_of(slab * SLAB, SLAB))

        jax.lax.fori_loop(0, pl.cdiv(self.work.num_queries[item], SLAB), body, None)

    def _pack_slab(self, token: jax.Array) -> None:
        """[Q, Hq, D] to [Hq, Q, D], some tokens of it."""
        tokens = pl.ds(token, SLAB)
        q = jnp.swapaxes(self.refs.token_q[tokens].astype(jnp.float32), 0, 1)
        self.refs.q[:, tokens, : self.shape.head_dim] = q.astype(self.refs.q.dtype)

    def _unpack_slab(self, token: jax.Array) -> None:
        """[Hq, Q, D] to [Q, Hq, D], and the LSE, some tokens of them."""
        refs, tokens = self.refs, pl.ds(token, SLAB)
        v_lanes = pl.ds(self.shape.v_start, self.shape.head_dim)
        out = jnp.swapaxes(refs.value[:, tokens, v_lanes], 0, 1)
        refs.token_out[tokens] = out.astype(refs.token_out.dtype)
        heads = jax.lax.broadcasted_iota(jnp.int32, (SLAB, self.shape.num_q_heads), 1)
        lse = jnp.zeros(heads.shape, jnp.float32)
        for head in range(self.shape.num_q_heads):
            lse = jnp.where(heads == head, refs.largest[head, tokens, :1], lse)
        refs.token_lse[tokens] = lse[:, None, :]

    def _copy_queries(self, item: jax.Array, *, start: bool) -> None:
        """Starts, or waits for, the copy of an item's queries, if there is such an item."""
        refs = self.refs

        def copies(token: jax.Array, offset: jax.Array, size: int) -> list[Any]:
            source, target = refs.hbm_q.at[pl.ds(token, size)], refs.token_q.at[pl.ds(offset, size)]
            return [pltpu.make_async_copy(source, target, refs.q_semaphore)]

        self._copy_tokens(item, copies, start=start)

    def _copy_results(self, item: jax.Array, *, start: bool) -> None:
        """Starts, or waits for, the copy of an item's lines of out and LSE, if there is such an item."""
        refs = self.refs

        def copies(token: jax.Array, offset: jax.Array, size: int) -> list[Any]:
            source, target = pl.ds(offset, size), pl.ds(token, size)
            return [
                pltpu.make_async_copy(refs.token_out.at[source], refs.hbm_out.at[target], refs.out_semaphore),
                pltpu.make_async_copy(refs.token_lse.at[source], refs.hbm_lse.at[target], refs.out_semaphore),
            ]

        self._copy_tokens(item, copies, start=start)

    def _copy_tokens(self, item: jax.Array, copies: Callable[..., list[Any]], *, start: bool) -> None:
        """Whole slabs, then the tokens that are left one by one."""
        exists = (item >= 0) & (item < self.work.count[0])
        item = jnp.where(exists, item, 0)
        count = jnp.where(exists, self.work.num_queries[item], 0)
        first, in_slabs = self.work.token[item], count & ~(SLAB - 1)

        def body(size: int, base: jax.typing.ArrayLike, i: jax.Array, _: None) -> None:
            offset = base + i * size
            for copy in copies(first + offset, offset, size):
                if start:
                    copy.start()
                else:
                    copy.wait()

        jax.lax.fori_loop(0, in_slabs // SLAB, functools.partial(body, SLAB, 0), None)
        jax.lax.fori_loop(0, count - in_slabs, functools.partial(body, 1, in_slabs), None)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
