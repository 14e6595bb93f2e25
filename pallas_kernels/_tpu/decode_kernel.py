"""The decode kernel's body: a row's queries against its tiles of keys, the softmax state in registers.

The R = Q * G query lines of a KV head share one product with a tile of K and one with a tile of V. Tiles that every
query sees whole need no mask and make the inner loop; the edge tiles (the window's start, the sequence's end) go
through a masked copy of the same code before and after it.

T query tokens, I items, Hq query heads, H KV heads, G = Hq / H, Q queries an item at most, R = Q * G lines,
D head_dim, E the last axis of a tile (D, or at least 2 * D with K and V on lanes), C blocks a tile, K keys a tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._kv_pages import K_PART, V_PART
from pallas_kernels._tpu.decode_rows import RowRefs, Rows, Static
from pallas_kernels._tpu.stream import LOG2_E, KVStream, Refill, StreamRefs, StreamState
from pallas_kernels._tpu.work import WorkRefs

# Below every score, and finite: the difference of two of them is 0 and not NaN.
LOWEST = -1e30


class Softmax(NamedTuple):
    """The running softmax of one KV head, in base 2."""

    largest: jax.Array  # f32[R, 1]
    total: jax.Array  # f32[R, 1]
    value: jax.Array  # f32[R, E]


class Refs(NamedTuple):
    window: Any  # i32[1] SMEM
    scale: Any  # f32[1] SMEM, what makes q k^T a score in base 2, or the argument of tanh
    sinks: Any  # f32[H, R, 1] VMEM, in base 2; or None


def kernel(static: Static, has_sinks: bool, *all_refs: Any) -> None:
    """The refs are the scalars, the inputs, the outputs and the scratch, as `decode.attend` lists them."""
    tile = static.tile
    left = list(all_refs)

    def take(count: int) -> list[Any]:
        taken, left[:count] = left[:count], []
        return taken

    work = WorkRefs(*take(len(WorkRefs._fields)))
    layer, window, scale, table, q, pool = take(6)
    scales = take(1)[0] if tile.quantised else None
    sinks = take(1)[0] if has_sinks else None
    _, _, out, lse = take(4)  # the first two are the same memory
    ids, id_semaphores, kv, kv_semaphores = take(4)
    kv_scales = take(1)[0] if tile.quantised else None
    core = pl.program_id(0)
    stream_refs = StreamRefs(table, pool, scales, ids, id_semaphores, kv, kv_semaphores, kv_scales)
    stream = KVStream(tile, work, layer[0], stream_refs, first_item=core, item_step=static.num_cores)
    rows = Rows(static, work, RowRefs(q, out, lse, *left), core)
    _Kernel(static, work, Refs(window, scale, sinks), rows, stream).run()


class _Kernel:
    """The body, with what all of its parts see."""

    def __init__(self, static: Static, work: WorkRefs, refs: Refs, rows: Rows, stream: KVStream) -> None:
        self.static, self.work, self.refs, self.rows, self.stream = static, work, refs, rows, stream

    def run(self) -> None:
        state = self.stream.start()
        self.rows.start()
        jax.lax.fori_loop(0, self.rows.count(), self._attend_item, state)
        self.rows.finish()

    def _attend_item(self, number: jax.Array, state: StreamState) -> StreamState:
        item = self.rows.item(number)
        self.rows.read(number)
        edges = self._edges(item)
        num_blocks, per_tile = self.work.num_blocks[item], self.static.tile.blocks_per_tile
        first_full, end_full = self.work.first_full[item], self.work.end_full[item]
        masked = functools.partial(self._attend_tile, edges, num_blocks)
        full = functools.partial(self._attend_tile, None, None)
        carry = (state, self._start_softmax())
        if self.static.windowed:
            carry = jax.lax.fori_loop(0, first_full, masked, carry)
        carry = jax.lax.fori_loop(first_full, end_full, full, carry)
        carry = jax.lax.fori_loop(end_full, (num_blocks + per_tile - 1) // per_tile, masked, carry)
        state, softmax = carry
        self._finish(number, softmax)
        return state

    def _start_softmax(self) -> tuple[Softmax, ...]:
        lines, lanes = self.static.lines, self.static.tile.lanes
        start = Softmax(
            jnp.full((lines, 1), LOWEST, jnp.float32),
            jnp.zeros((lines, 1), jnp.float32),
            jnp.zeros((lines, lanes), jnp.float32),
        )
        return (start,) * self.static.tile.num_kv_heads

    def _edges(self, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """i32[R, 1] each: the first key that a line sees and the one after its last, counted from tile 0."""
        position, seq_len = self.work.position[item], self.work.seq_len[item]
        first_key = self.work.first_key[item]
        line = jax.lax.broadcasted_iota(jnp.int32, (self.static.lines, 1), 0)
        own = position + line // self.static.group
        end = jnp.minimum(own + 1, seq_len) if self.static.causal else jnp.full_like(own, seq_len)
        # A line past the row's queries sees what its last one sees: it is not written.
        start = own - self.refs.window[0] + 1 if self.static.windowed else jnp.zeros_like(own)
        return start - first_key, end - first_key

    def _attend_tile(
        self,
        edges: tuple[jax.Array, jax.Array] | None,
        num_blocks: jax.Array | None,
        index: jax.Array,
        carry: tuple[StreamState, tuple[Softmax, ...]],
    ) -> tuple[StreamState, tuple[Softmax, ...]]:
        state, softmax = carry
        tile = self.static.tile
        refill = self.stream.begin(state)
        if edges is None or num_blocks is None:
            slot = self.stream.wait(state)
            visible = known = None
        else:
            left = num_blocks - index * tile.blocks_per_tile
            slot = self.stream.wait(state, jnp.minimum(left, tile.blocks_per_tile))
            visible, known = self._masks(edges, index)
        heads = range(tile.num_kv_heads)
        k_scales: list[Any] = [None] * tile.num_kv_heads
        v_scales = k_scales
        if tile.quantised:
            k_scales, v_scales = self.stream.scales(slot, K_PART), self.stream.scales(slot, V_PART)
        scores = [self._scores(head, slot, k_scales[head], visible) for head in heads]
        new = []
        for head in heads:
            new.append(self._update(softmax[head], scores[head], slot, head, v_scales[head], visible, known))
            self._refill_share(refill, head)
        return self.stream.advance(state, refill), tuple(new)

    def _refill_share(self, refill: Refill, head: int) -> None:
        """Starts the copies that fall to one head: between the heads' arithmetic they cost least."""
        blocks, heads = self.static.tile.blocks_per_tile, self.static.tile.num_kv_heads
        for j in range(head * blocks // heads, (head + 1) * blocks // heads):
            self.stream.copy_block(refill, j)

    def _masks(self, edges: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which keys each line sees, bool [R, K]; and which any line may see, bool [K, 1]."""
        start, end = edges
        keys = self.static.tile.keys
        key = index * keys + jax.lax.broadcasted_iota(jnp.int32, (self.static.lines, keys), 1)
        key_of_v = index * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        known = key_of_v < jnp.max(end)
        visible = key < end
        if self.static.windowed:
            visible &= key >= start
            known &= key_of_v >= jnp.min(start)
        return visible, known

    def _scores(self, head: int, slot: jax.Array, k_scale: jax.Array | None, visible: jax.Array | None) -> jax.Array:
        """f32[R, K] of one head, in base 2, LOWEST where a key is not visible."""
        dtype, cap = self.static.compute_dtype, self.static.soft_cap
        q = self.rows.refs.q_packed[head].astype(dtype)
        k = self.stream.k(slot, head).astype(dtype)
        scores = _dot(q, k, 1) * self.refs.scale[0]
        if k_scale is not None:
            scores *= k_scale
        if cap is not None:
            scores = jnp.tanh(scores) * (cap * LOG2_E)
        return scores if visible is None else jnp.where(visible, scores, LOWEST)

    def _update(
        self,
        softmax: Softmax,
        scores: jax.Array,
        slot: jax.Array,
        head: int,
        v_scale: jax.Array | None,
        visible: jax.Array | None,
        known: jax.Array | None,
    ) -> Softmax:
        largest = jnp.maximum(softmax.largest, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - largest)
        v = self.stream.v(slot, head).astype(self.static.compute_dtype)
        if visible is not None and known is not None:
            weights = jnp.where(visible, weights, 0)
            v = jnp.where(known, v, 0)  # 0 * NaN is NaN
        decay = jnp.exp2(softmax.largest - largest)
        total = softmax.total * decay + jnp.sum(weights, axis=1, keepdims=True)
        if v_scale is not None:
            weights *= v_scale
            if visible is not None:
                weights = jnp.where(visible, weights, 0)  # so is 0 times the scale of a slot without a token
        value = softmax.value * decay + _dot(weights.astype(self.static.compute_dtype), v, 0)
        return Softmax(largest, total, value)

    def _finish(self, number: jax.Array, softmax: tuple[Softmax, ...]) -> None:
        """Takes the sinks in, divides, and sends the results off."""
        tile = self.static.tile
        for head in range(tile.num_kv_heads):
            largest, total, value = softmax[head]
            unseen = total == 0  # of a NaN `!=` is false too on a TPU, and a NaN has to show
            if self.refs.sinks is not None:
                # A sink far above the scores would overflow: measure from whichever is larger.
                sink = self.refs.sinks[head]
                offset = jnp.maximum(largest, sink)
                decay = jnp.exp2(largest - offset)
                total, value, largest = total * decay + jnp.exp2(sink - offset), value * decay, offset
            out = jnp.where(unseen, 0, value[:, tile.v_start : tile.v_start + tile.head_dim] / total)
            lse = jnp.where(unseen, -jnp.inf, (largest + jnp.log2(total)) / LOG2_E)
            self.rows.write_head(head, out, lse)
        self.rows.write(number)


def _dot(a: jax.Array, b: jax.Array, axis_of_b: int) -> jax.Array:
    """a's axis 1 with an axis of b, in float32; float32 operands at full precision (a TPU would round them)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (axis_of_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
