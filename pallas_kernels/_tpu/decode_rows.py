"""The queries of the decode kernel's items on their way into VMEM, and the results on their way out.

Tokens come and go one by one, since a row may start at any; the next item's queries arrive while one is computed, and
results leave while the next is. In between lie the lines of a KV head, query after query, each with its G heads.

T query tokens, I items, Hq query heads, H KV heads, G = Hq / H, Q queries an item at most, R = Q * G lines,
D head_dim, E the last axis of a tile (D, or at least 2 * D with K and V on lanes), C blocks a tile, K keys a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._tpu.tile import TileShape
from pallas_kernels._tpu.work import WorkRefs

QUERY_SLOTS = 2


class Static(NamedTuple):
    """What a compiled kernel is made for."""

    tile: TileShape
    num_q_heads: int
    max_queries: int  # Q
    num_cores: int
    soft_cap: float | None
    causal: bool
    windowed: bool
    compute_dtype: Any

    @property
    def group(self) -> int:
        return self.num_q_heads // self.tile.num_kv_heads

    @property
    def lines(self) -> int:
        return self.group * self.max_queries


class RowRefs(NamedTuple):
    q: Any  # [T, Hq, D] HBM
    out: Any  # [T, Hq, D] HBM
    lse: Any  # f32[T, 1, Hq] HBM
    q_in: Any  # [QUERY_SLOTS, Q, Hq, D] VMEM
    q_packed: Any  # f32[H, R, E] VMEM
    out_packed: Any  # f32[Q, Hq, D] VMEM
    lse_packed: Any  # f32[Q, Hq, 1] VMEM
    out_rows: Any  # [QUERY_SLOTS, Q, Hq, D] VMEM
    lse_rows: Any  # f32[QUERY_SLOTS, Q, 1, Hq] VMEM
    q_semaphores: Any  # [QUERY_SLOTS]
    out_semaphores: Any  # [QUERY_SLOTS]


def scratch_shapes(static: Static, q_dtype: Any) -> list[Any]:
    """In the order of the last fields of `RowRefs`."""
    num_queries, num_q_heads, tile = static.max_queries, static.num_q_heads, static.tile
    return [
        pltpu.VMEM((QUERY_SLOTS, num_queries, num_q_heads, tile.head_dim), q_dtype),
        pltpu.VMEM((tile.num_kv_heads, static.lines, tile.lanes), jnp.float32),
        pltpu.VMEM((num_queries, num_q_heads, tile.head_dim), jnp.float32),
        pltpu.VMEM((num_queries, num_q_heads, 1), jnp.float32),
        pltpu.VMEM((QUERY_SLOTS, num_queries, num_q_heads, tile.head_dim), q_dtype),
        pltpu.VMEM((QUERY_SLOTS, num_queries, 1, num_q_heads), jnp.float32),
        pltpu.SemaphoreType.DMA((QUERY_SLOTS,)),
        pltpu.SemaphoreType.DMA((QUERY_SLOTS,)),
    ]


class Rows:
    """The items of one core, by their number there: core + number * num_cores in the work list."""

    def __init__(self, static: Static, work: WorkRefs, refs: RowRefs, core: jax.Array) -> None:
        self.static, self.work, self.refs, self.core = static, work, refs, core

    def count(self) -> jax.Array:
        step = self.static.num_cores
        return (self.work.count[0] - self.core + step - 1) // step

    def item(self, number: jax.Array) -> jax.Array:
        return self.core + number * self.static.num_cores

    def start(self) -> None:
        """Starts the copy of the first item's queries."""
        if self.static.tile.kv_on_lanes:
            self.refs.q_packed[...] = jnp.zeros(self.refs.q_packed.shape, jnp.float32)  # the lanes past D stay 0
        self._copy_queries(0, start=True)

    def read(self, number: jax.Array) -> None:
        """Puts an item's queries into `q_packed`, and starts the copy of the next one's."""
        self._copy_queries(number, start=False)
        self._copy_queries(number + 1, start=True)
        group, tile = self.static.group, self.static.tile
        for query in range(self.static.max_queries):
            q = self.refs.q_in[number & (QUERY_SLOTS - 1), query].astype(jnp.float32)  # [Hq, D]
            for head in range(tile.num_kv_heads):
                lines = q[head * group : (head + 1) * group]
                self.refs.q_packed[head, query * group : (query + 1) * group, : tile.head_dim] = lines

    def write_head(self, head: int, out: jax.Array, lse: jax.Array) -> None:
        """Keeps the lines of one head, out f32[R, D] and lse f32[R, 1], for `write`."""
        group = self.static.group
        for query in range(self.static.max_queries):
            lines, heads = slice(query * group, (query + 1) * group), slice(head * group, (head + 1) * group)
            self.refs.out_packed[query, heads] = out[lines]
            self.refs.lse_packed[query, heads] = lse[lines]

    def write(self, number: jax.Array) -> None:
        """Starts the copy of an item's results, all heads written."""
        self._copy_results(number - QUERY_SLOTS, start=False)
        slot, num_q_heads = number & (QUERY_SLOTS - 1), self.static.num_q_heads
        row = jax.lax.broadcasted_iota(jnp.int32, (num_q_heads, num_q_heads), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (num_q_heads, num_q_heads), 1)
        for query in range(self.static.max_queries):
            self.refs.out_rows[slot, query] = self.refs.out_packed[query].astype(self.refs.out_rows.dtype)
            # A column to a row: only the diagonal is kept of its copies.
            diagonal = jnp.where(row == column, self.refs.lse_packed[query], 0)
            self.refs.lse_rows[slot, query] = jnp.sum(diagonal, axis=0, keepdims=True)
        self._copy_results(number, start=True)

    def finish(self) -> None:
        """Waits for the copies of the last results."""
        for back in range(QUERY_SLOTS, 0, -1):
            self._copy_results(self.count() - back, start=False)

    def _copy_queries(self, number: jax.typing.ArrayLike, *, start: bool) -> None:
        """Starts, or waits for, the copy of an item's queries into its slot, if there is such an item."""
        refs, slot = self.refs, jnp.asarray(number) & (QUERY_SLOTS - 1)

        def copies(token: jax.Array, query: int) -> list[Any]:
            return [pltpu.make_async_copy(refs.q.at[token], refs.q_in.at[slot, query], refs.q_semaphores.at[slot])]

        self._each_query(number, copies, start=start)

    def _copy_results(self, number: jax.Array, *, start: bool) -> None:
        """Starts, or waits for, the copy of an item's lines of out and lse from its slot, if there is such an item."""
        refs, slot = self.refs, number & (QUERY_SLOTS - 1)

        def copies(token: jax.Array, query: int) -> list[Any]:
            semaphore = refs.out_semaphores.at[slot]
            return [
                pltpu.make_async_copy(refs.out_rows.at[slot, query], refs.out.at[token], semaphore),
                pltpu.make_async_copy(refs.lse_rows.at[slot, query], refs.lse.at[token], semaphore),
            ]

        self._each_query(number, copies, start=start)

    def _each_query(self, number: jax.typing.ArrayLike, copies: Any, *, start: bool) -> None:
        item = self.item(jnp.asarray(number))
        exists = (item >= 0) & (item < self.work.count[0])
        item = jnp.clip(item, 0, self.work.token.shape[0] - 1)
        count = jnp.where(exists, self.work.num_queries[item], 0)
        first = self.work.token[item]
        for query in range(self.static.max_queries):

            @pl.when(query < count)
            def _(query: int = query) -> None:
                for copy in copies(first + query, query):
                    if start:
                        copy.start()
                    else:
                        copy.wait()
