"""The body of the TPU's prefill kernel: one item is a tile of neighbouring queries of one row.

The tile of queries stays in VMEM while the tiles of keys that its queries see stream past it. Tiles that every query
sees whole need no mask and make the inner loop; the edge tiles (the window's start, the diagonal, the sequence's end)
go through a masked copy of the same code before and after it.

Hq query heads, H KV heads, G = Hq / H, Q queries of a tile, K keys of a tile, D head_dim, E the last axis of a tile of
keys (D, or at least 2 * D with K and V on lanes). The query lines of a KV head are its G heads' Q queries, head after
head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import K_PART, LANES, V_PART
from pallas_kernels._tpu.query_tile import QueryTile, QueryTileRefs, QueryTileShape
from pallas_kernels._tpu.stream import LOG2_E, KVStream, StreamRefs, StreamState
from pallas_kernels._tpu.tile import TileShape
from pallas_kernels._tpu.work import WorkRefs

# Query lines of one product: with fewer the matrix unit waits for its results, with more they spill more.
LINES_PER_STEP = 512
# Query lines of the KV heads that one turn of the loop over heads takes: their steps overlap, its first and last don't.
LINES_TOGETHER = 1024

# Below every score, and finite: a difference of two of them is 0 and not NaN.
LOWEST = -1e30
# Below LOWEST by so much that exp2 of the difference is 0: a line without a visible key sums to 0.
MASKED = -2e30


class Static(NamedTuple):
    """What a compiled kernel is made for."""

    keys: TileShape
    queries: QueryTileShape
    soft_cap: float | None
    causal: bool
    windowed: bool
    has_sinks: bool
    num_cores: int

    @property
    def group(self) -> int:
        return self.queries.num_q_heads // self.keys.num_kv_heads

    @property
    def heads_together(self) -> int:
        """A divisor of H: so many KV heads have up to LINES_TOGETHER lines."""
        num_heads, lines = self.keys.num_kv_heads, self.group * self.queries.queries
        return max(x for x in range(1, num_heads + 1) if num_heads % x == 0 and (x == 1 or x * lines <= LINES_TOGETHER))

    def scratch_shapes(self) -> list[Any]:
        """In the order in which `kernel` takes them."""
        shapes = [*self.keys.scratch_shapes(), *self.queries.scratch_shapes()]
        if self.keys.quantised:
            shapes.append(pltpu.VMEM((2, self.keys.num_kv_heads, 1, self.keys.keys), jnp.float32))
        return shapes


class Edges(NamedTuple):
    """Where an item's queries and keys lie, counted from the first key of a tile; i32 scalars."""

    position: jax.Array  # of the first query
    end: jax.Array  # the key after the last that any of them sees


def kernel(static: Static, *all_refs: Any) -> None:
    """The refs are the scalars, the inputs, the outputs and the scratch, as `prefill.attend` lists them."""
    quantised = static.keys.quantised
    refs_left = list(all_refs)

    def take(count: int) -> list[Any]:
        taken, refs_left[:count] = refs_left[:count], []
        return taken

    work = WorkRefs(*take(len(WorkRefs._fields)))
    layer, window, scale = take(3)
    sinks = take(1)[0] if static.has_sinks else None
    table, q, pool = take(3)
    scales = take(1)[0] if quantised else None
    _, _, out, lse = take(4)  # the first two are the same memory
    ids, id_semaphores, kv, kv_semaphores = take(4)
    kv_scales = take(1)[0] if quantised else None
    query_refs = QueryTileRefs(q, out, lse, *take(len(QueryTileRefs._fields) - 3))
    scale_rows = take(1)[0] if quantised else None

    stream_refs = StreamRefs(table, pool, scales, ids, id_semaphores, kv, kv_semaphores, kv_scales)
    mine: dict[str, Any] = {"first_item": pl.program_id(0), "item_step": static.num_cores}
    stream = KVStream(static.keys, work, layer[0], stream_refs, **mine)
    queries = QueryTile(static.queries, work, query_refs, **mine)
    _Kernel(static, work, window, scale, sinks, stream, queries, scale_rows).run()


class _Kernel:
    """The body, with what all of its parts see."""

    def __init__(
        self,
        static: Static,
        work: WorkRefs,
        window: Any,  # i32[1] SMEM
        scale: Any,  # f32[1] SMEM
        sinks: Any,  # f32[Hq] SMEM, in base 2; or None
        stream: KVStream,
        queries: QueryTile,
        scale_rows: Any,  # f32[2, H, 1, K] VMEM: of a tile's tokens, the K scales times the scores' scale; or None
    ) -> None:
        self.static, self.work, self.window, self.scale, self.sinks = static, work, window, scale, sinks
        self.stream, self.queries, self.lines, self.scale_rows = stream, queries, queries.refs, scale_rows

    def run(self) -> None:
        first, step = self.queries.first_item, self.queries.item_step
        count = jnp.maximum(self.work.count[0] - first + step - 1, 0) // step
        self.queries.start()
        jax.lax.fori_loop(0, count, self._attend_item, self.stream.start())
        self.queries.finish(first + count * step)

    def _attend_item(self, number: jax.Array, state: StreamState) -> StreamState:
        work, lines = self.work, self.lines
        item = self.queries.first_item + number * self.queries.item_step
        self.queries.load(item)
        lines.largest[...] = jnp.full(lines.largest.shape, LOWEST, jnp.float32)
        lines.total[...] = jnp.zeros(lines.total.shape, jnp.float32)
        lines.value[...] = jnp.zeros(lines.value.shape, jnp.float32)

        masked = functools.partial(self._attend_tile, item)
        full = functools.partial(self._attend_tile, None)
        if self.static.windowed:
            state = jax.lax.fori_loop(0, work.first_full[item], masked, state)
        state = jax.lax.fori_loop(work.first_full[item], work.end_full[item], full, state)
        num_tiles = pl.cdiv(work.num_blocks[item], self.static.keys.blocks_per_tile)
        state = jax.lax.fori_loop(work.end_full[item], num_tiles, masked, state)

        jax.lax.fori_loop(0, self.static.queries.num_q_heads, self._divide, None)
        self.queries.store(item)
        return state

    def _attend_tile(self, item: jax.Array | None, index: jax.Array, state: StreamState) -> StreamState:
        """Takes in tile `index`; item is None where no mask is needed."""
        keys = self.static.keys
        refill = self.stream.begin(state)
        self.stream.copy_blocks(refill)
        if item is None:
            edges = None
            slot = self.stream.wait(state)
        else:
            edges = self._edges(item, index)
            left = self.work.num_blocks[item] - index * keys.blocks_per_tile
            slot = self.stream.wait(state, jnp.minimum(left, keys.blocks_per_tile))
        if keys.quantised:
            self._read_scales(slot, edges)
        attend_heads = functools.partial(self._attend_heads, slot, edges)
        jax.lax.fori_loop(0, keys.num_kv_heads // self.static.heads_together, attend_heads, None)
        return self.stream.advance(state, refill)

    def _edges(self, item: jax.Array, index: jax.Array) -> Edges:
        work = self.work
        first_key = work.first_key[item] + index * self.static.keys.keys
        end = work.seq_len[item]
        if self.static.causal:
            end = jnp.minimum(end, work.position[item] + work.num_queries[item])
        return Edges(work.position[item] - first_key, end - first_key)

    def _read_scales(self, slot: jax.Array, edges: Edges | None) -> None:
        for part, factor in ((K_PART, self._factor()), (V_PART, 1)):
            for head, scales in enumerate(self.stream.scales(slot, part)):
                if edges is not None:
                    key = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 1)
                    scales = jnp.where(key < edges.end, scales, 0)  # 0 * NaN is NaN
                self.scale_rows[part, head] = scales * factor

    def _factor(self) -> jax.Array:
        """What q k^T is multiplied with: it gives scores in base 2, or tanh's argument."""
        cap = self.static.soft_cap
        return self.scale[0] * (LOG2_E if cap is None else 1 / cap)

    def _attend_heads(self, slot: jax.Array, edges: Edges | None, index: jax.Array, _: None) -> None:
        """Some KV heads: the scores of some lines are under way while those before them are summed."""
        together = self.static.heads_together
        heads = [index * together + i for i in range(together)]
        values = [self._values(slot, head, edges) for head in heads]
        parts = [(part, head, v) for head, v in zip(heads, values, strict=True) for part in self._parts(head)]
        part, head, v = parts[0]
        scores = self._scores(part, slot, head, edges)
        for coming in parts[1:]:
            coming_scores = self._scores(coming[0], slot, coming[1], edges)
            self._update(part, head, scores, v)
            scores, (part, head, v) = coming_scores, coming
        self._update(part, head, scores, v)

    def _values(self, slot: jax.Array, head: jax.Array, edges: Edges | None) -> jax.Array:
        """V of a head [K, E], 0 from the last visible key on."""
        v = self.stream.v(slot, head).astype(self.static.queries.compute_dtype)
        if edges is None:
            return v
        key = jax.lax.broadcasted_iota(jnp.int32, (v.shape[0], 1), 0)
        return jnp.where(key < edges.end, v, 0)  # 0 * NaN is NaN

    def _parts(self, head: jax.Array) -> list[Any]:
        """The query heads of a KV head in parts of about LINES_PER_STEP lines."""
        group = self.static.group
        size = max(1, LINES_PER_STEP // self.static.queries.queries)
        return [pl.ds(head * group + start, min(size, group - start)) for start in range(0, group, size)]

    def _scores(self, heads: Any, slot: jax.Array, head: jax.Array, edges: Edges | None) -> jax.Array:
        """f32[lines, K] in base 2, MASKED where a key is not visible."""
        static = self.static
        q = _flat(self.lines.q[heads])
        k = self.stream.k(slot, head).astype(q.dtype)
        scores = _dot(q, k, 1) * (self.scale_rows[K_PART, head] if static.keys.quantised else self._factor())
        if static.soft_cap is not None:
            scores = jnp.tanh(scores) * (static.soft_cap * LOG2_E)
        return scores if edges is None else jnp.where(self._visible(edges, *scores.shape), scores, MASKED)

    def _visible(self, edges: Edges, lines: int, keys: int) -> jax.Array:
        """bool [lines, K]."""
        key = jax.lax.broadcasted_iota(jnp.int32, (lines, keys), 1)
        query = jax.lax.broadcasted_iota(jnp.int32, (lines, 1), 0) & (self.static.queries.queries - 1)
        own = edges.position + query
        visible = key < (jnp.minimum(own + 1, edges.end) if self.static.causal else edges.end)
        if self.static.windowed:
            visible &= key > own - self.window[0]
        return visible

    def _update(self, heads: Any, head: jax.Array, scores: jax.Array, v: jax.Array) -> None:
        """Takes some lines' scores into their softmax."""
        lines = self.lines
        before = _flat(lines.largest[heads])  # [lines, LANES]
        largest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        decay = jnp.exp2(before - largest)
        weights = jnp.exp2(scores - _widen(largest, scores.shape[1]))
        by_lane = functools.reduce(jnp.add, jnp.split(weights, weights.shape[1] // LANES, axis=1))
        total = _flat(lines.total[heads]) * decay + by_lane
        if self.static.keys.quantised:
            weights *= self.scale_rows[V_PART, head]
        value = _flat(lines.value[heads]) * _widen(decay, v.shape[1]) + _dot(weights.astype(v.dtype), v, 0)
        for ref, x in ((lines.largest, largest), (lines.total, total), (lines.value, value)):
            ref[heads] = x.reshape(-1, *ref.shape[1:])

    def _divide(self, head: jax.Array, _: None) -> None:
        """One query head's out, in `value`, and LSE, in `largest`."""
        lines = self.lines
        largest, value = lines.largest[head], lines.value[head]
        total = jnp.broadcast_to(jnp.sum(lines.total[head], axis=1, keepdims=True), largest.shape)
        # Not `seen`: of a NaN `!=` is false too on a TPU, and a NaN has to show.
        unseen, rescale = total == 0, jnp.ones_like(total)
        if self.sinks is not None:
            # A sink far above the scores would overflow: measure from whichever is larger.
            sink = self.sinks[head]
            offset = jnp.maximum(largest, sink)
            rescale = jnp.exp2(largest - offset)
            total, largest = total * rescale + jnp.exp2(sink - offset), offset
        factor = jnp.where(unseen, 0, rescale / total)
        lines.value[head] = value * _widen(factor, value.shape[1])
        lines.largest[head] = jnp.where(unseen, -jnp.inf, (largest + jnp.log2(total)) / LOG2_E)


def _flat(x: jax.Array) -> jax.Array:
    """[heads, Q, n] as [heads * Q, n]."""
    return x.reshape(-1, x.shape[-1])


def _widen(x: jax.Array, lanes: int) -> jax.Array:
    """[lines, LANES], the same on all lanes, as [lines, lanes]: registers are reused, a broadcast would move them."""
    return jnp.concatenate([x] * -(-lanes // LANES), axis=1)[:, :lanes]


def _dot(a: jax.Array, b: jax.Array, axis_of_b: int) -> jax.Array:
    """a's axis 1 with an axis of b, in float32; float32 operands at full precision (a TPU would round them)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (axis_of_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
