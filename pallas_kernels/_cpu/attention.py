"""Paged attention as loops over blocks: each is read where it lies, once, and no tile of keys is gathered.

The unit of work is a tile of queries of one row, all heads; units are divided over the threads by the keys they see. A
unit walks its keys in tiles of KEYS with an online softmax (`pallas_kernels._xla.online_softmax` has the references).
Few lines of queries (decode) meet each key where it lies; many (prefill) a transposed copy of the tile, in the cache.
What a query gets depends on its row alone: neither on the rows beside it, nor on how they are divided.

T query tokens, S rows, H KV heads, G query heads a KV head, D head_dim, M lines of a unit: its queries times G.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from pallas_kernels._attention import LARGEST_WINDOW
from pallas_kernels._cpu import call_frame, vectors
from pallas_kernels._kv_pages import KVPages

KEYS = 64
LINES = 48  # of a unit, unless one query has more
FEW_LINES = 8  # up to which a key is read where it lies
ITEMS_PER_THREAD = 4
LEAST_WORK = 4096  # keys times queries, of all heads, below which threads cost more than they bring

_ZERO, _ONE, _NOTHING = np.float32(0), np.float32(1), np.float32(-np.inf)


def why_not(q: jax.Array, kv_pages: KVPages) -> str | None:
    """What this can't do, or None."""
    if reason := vectors.why_not():
        return reason
    if any(a.dtype.name not in vectors.BITS for a in (q, kv_pages)):
        return f"it takes float32 and bfloat16, not q in {q.dtype.name} over a pool in {kv_pages.dtype.name}"
    if q.shape[2] % vectors.LANES:
        return f"head_dim {q.shape[2]} is not a multiple of this machine's {vectors.LANES} lanes"
    return None


def attend(
    q: jax.Array,  # [T, H * G, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,
    scale: jax.Array,
    sliding_window: jax.Array | None,
    sinks: jax.Array | None,  # [H * G]
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """out [T, H * G, D] in q's dtype and lse [T, H * G]; `paged_attention` documents the meaning."""
    num_tokens, num_heads, head_dim = q.shape
    window = jnp.int32(LARGEST_WINDOW) if sliding_window is None else sliding_window
    integers = jnp.stack([layer, window, jnp.int32(causal), jnp.int32(sinks is not None)])
    numbers = jnp.stack([scale.astype(jnp.float32), jnp.float32(0 if soft_cap is None else soft_cap)])
    sinks = jnp.zeros(num_heads, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, (num_tokens, num_heads))]
    call = jax.ffi.ffi_call(_target(head_dim, vectors.BITS[kv_pages.dtype.name]), shapes, vmap_method="sequential")
    out, lse = call(
        q.astype(jnp.float32), kv_pages.pool, block_tables, seq_lens, query_start_loc, integers, numbers, sinks
    )
    return out.astype(q.dtype), lse


@functools.cache
def _target(head_dim: int, bits: int) -> str:
    name = f"pagedjax_attention_{head_dim}_{bits}"
    call_frame.register(name, _kernel(head_dim, bits), _num_items)
    return name


def _kernel(head_dim: int, bits: int) -> Any:
    product, values_product, width = vectors.product(32), vectors.product(bits), bits // 8
    dot, maximum, soften = vectors.dot(head_dim, bits), vectors.line_maximum(KEYS), vectors.line_exp(KEYS)
    fetch, floats = vectors.prefetch(width * head_dim), call_frame.floats
    named = call_frame.named(head_dim, bits)
    D, LINE, SCORES = head_dim, 4 * head_dim, 4 * KEYS

    if bits == 32:

        @njit
        @named
        def read(address, d):  # type: ignore[no-untyped-def]
            return floats(address, D)[d]
    else:

        @njit
        @named
        def read(address, d):  # type: ignore[no-untyped-def]
            half = call_frame.halves(address, D)[d]
            return vectors.float_of_bits(np.int32(np.uint32(half) << np.uint32(16)))

    @njit
    @named
    def block_of(pool, table, column, num_blocks, block_bytes):  # type: ignore[no-untyped-def]
        return pool + min(max(table[min(column, table.size - 1)], 0), num_blocks - 1) * block_bytes

    @njit
    @named
    def few_scores(scores, q, num_lines, address, stride, count, ahead):  # type: ignore[no-untyped-def]
        """A column of scores [M, KEYS] for each of `count` keys at `address`, a stride from one another."""
        for key in range(count):
            fetch(address + key * stride + ahead)
            for m in range(num_lines):
                floats(scores + SCORES * m, KEYS)[key] = dot(q + LINE * m, address + key * stride)

    @njit
    @named
    def transpose(keys, address, stride, count):  # type: ignore[no-untyped-def]
        """The same keys as columns of keys [D, KEYS]."""
        for key in range(count):
            for d in range(D):
                floats(keys + SCORES * d, KEYS)[key] = read(address + key * stride, d)

    @njit
    @named
    def fill(address, count, value):  # type: ignore[no-untyped-def]
        line = floats(address, count)
        for i in range(count):
            line[i] = value

    @njit
    @named
    def clear(out, lse, first, last):  # type: ignore[no-untyped-def]
        """Lines first .. last - 1 of out and lse, where no key is seen."""
        fill(out + LINE * first, (last - first) * D, 0)
        for place in range(first, last):
            lse[place] = _NOTHING

    @njit(error_model="numpy")
    @named
    def hide(scores, first, last, soft_cap):  # type: ignore[no-untyped-def]
        """Caps a line of scores, and hides the keys that are not among first .. last - 1."""
        line = floats(scores, KEYS)
        if soft_cap > 0:
            for key in range(first, last):
                line[key] = soft_cap * math.tanh(line[key] / soft_cap)
        for key in range(first):
            line[key] = _NOTHING
        for key in range(last, KEYS):
            line[key] = _NOTHING

    @njit(error_model="numpy")
    @named
    def attend_head(  # type: ignore[no-untyped-def]
        q, value, largest, total, scores, keys, num_lines, group,
        pool, line_bytes, values_at, block_bytes, table, num_blocks, block_size,
        position, seq_len, causal, window, soft_cap,
    ):  # fmt: skip
        """Lines q [M, D], token after token, the first at `position`: sets value [M, D], largest [M], total [M]."""
        end = min(seq_len, position + num_lines // group) if causal else seq_len
        start = max(0, position - window + 1)
        for m in range(num_lines):
            largest[m], total[m] = _NOTHING, 0
        fill(value, num_lines * D, 0)
        for tile in range(start // KEYS * KEYS, end, KEYS):
            first, last = max(tile, start), min(tile + KEYS, end)
            key = first
            while key < last:
                offset = key % block_size
                count = min(block_size - offset, last - key)
                address = block_of(pool, table, key // block_size, num_blocks, block_bytes) + offset * line_bytes
                if num_lines <= FEW_LINES:
                    ahead = block_of(pool, table, (key + KEYS) // block_size, num_blocks, block_bytes) - address
                    few_scores(scores + 4 * (key - tile), q, num_lines, address, line_bytes, count, ahead)
                else:
                    transpose(keys + 4 * (key - tile), address, line_bytes, count)
                key += count
            if num_lines > FEW_LINES:
                fill(scores, num_lines * KEYS, 0)
                product(num_lines, KEYS, scores, SCORES, q, LINE, keys, SCORES, D, 0, 0)
            for m in range(num_lines):
                at, line = position + m // group, scores + SCORES * m
                visible_from, visible_to = max(first, at - window + 1), min(last, at + 1) if causal else last
                hide(line, min(max(visible_from - tile, 0), KEYS), max(visible_to - tile, 0), soft_cap)
                new = max(largest[m], maximum(line))
                offset = new if new > _NOTHING else _ZERO
                decay = math.exp(largest[m] - offset)
                largest[m], total[m] = new, total[m] * decay + soften(line, offset)
                if decay != 1:
                    values = floats(value + LINE * m, D)
                    for d in range(D):
                        values[d] *= decay
            key = first
            while key < last:
                offset = key % block_size
                count = min(block_size - offset, last - key)
                here = block_of(pool, table, key // block_size, num_blocks, block_bytes)
                ahead = block_of(pool, table, (key + KEYS) // block_size, num_blocks, block_bytes) - here
                values_product(
                    num_lines, D, value, LINE, scores + 4 * (key - tile), SCORES,
                    here + values_at + offset * line_bytes, line_bytes, count, ahead, ahead,
                )  # fmt: skip
                key += count

    @njit(error_model="numpy")
    @named
    def finish(out, value, largest, total, sink, has_sink):  # type: ignore[no-untyped-def]
        """Writes a line of out; its log-sum-exp."""
        if total == 0:  # no key was visible
            fill(out, D, 0)
            return _NOTHING
        rescale: Any = _ONE
        if has_sink:  # far above the scores it would overflow: from whichever is larger
            offset = max(largest, sink)
            rescale = math.exp(largest - offset)
            total, largest = total * rescale + math.exp(sink - offset), offset
        rescale /= total
        line, values = floats(out, D), floats(value, D)
        for d in range(D):
            line[d] = values[d] * rescale
        return largest + math.log(total)

    @njit(error_model="numpy")
    @named
    def kernel(frame, item, num_items):  # type: ignore[no-untyped-def]
        q_at, q_shape = call_frame.argument(frame, 0)
        pool, pool_shape = call_frame.argument(frame, 1)
        tables_at, tables_shape = call_frame.argument(frame, 2)
        num_tokens, num_heads, num_rows, num_blocks = q_shape[0], q_shape[1], tables_shape[0], pool_shape[1]
        seq_lens = call_frame.integers(call_frame.argument(frame, 3)[0], num_rows)
        starts = call_frame.integers(call_frame.argument(frame, 4)[0], num_rows + 1)
        layer, window, causal, has_sinks = call_frame.integers(call_frame.argument(frame, 5)[0], 4)
        scale, soft_cap = floats(call_frame.argument(frame, 6)[0], 2)
        sinks = floats(call_frame.argument(frame, 7)[0], num_heads)
        out, lse = call_frame.result(frame, 0)[0], floats(call_frame.result(frame, 1)[0], num_tokens * num_heads)
        if call_frame.argument_rank(frame, 1) == 5:  # K and V of a token on one line
            num_kv_heads, block_size, line, parts = pool_shape[2], pool_shape[3], pool_shape[4], 1
            values_at = width * D
        else:
            num_kv_heads, block_size, line, parts = pool_shape[3], pool_shape[4], pool_shape[5], 2
            values_at = width * num_kv_heads * block_size * line
        line_bytes = width * line
        block_bytes = parts * num_kv_heads * block_size * line_bytes
        pool += min(max(layer, 0), pool_shape[0] - 1) * num_blocks * block_bytes
        group = num_heads // num_kv_heads
        queries_per_unit = max(1, LINES // group)
        most_lines = min(queries_per_unit, num_tokens) * group
        lines = call_frame.malloc((2 * LINE + SCORES + 8) * most_lines + SCORES * D)
        value = lines + LINE * most_lines
        scores = value + LINE * most_lines
        keys = scores + SCORES * most_lines
        largest, total = floats(keys + SCORES * D, most_lines), floats(keys + SCORES * D + 4 * most_lines, most_lines)
        fill(keys, D * KEYS, 0)

        all_work, work = _work(seq_lens, starts, num_tokens), 0
        for row in range(num_rows):
            end_token = min(starts[row + 1], num_tokens)
            for token in range(max(starts[row], 0), end_token, queries_per_unit):
                count = min(queries_per_unit, end_token - token)
                here = count * max(seq_lens[row], 1)
                mine = (2 * work + here) * num_items // (2 * all_work) == item
                work += here
                if not mine:
                    continue
                table = call_frame.integers(tables_at + 4 * row * tables_shape[1], tables_shape[1])
                for head in range(num_kv_heads):
                    for m in range(count * group):
                        place = ((token + m // group) * num_heads + head * group + m % group) * LINE
                        q, scaled = floats(q_at + place, D), floats(lines + LINE * m, D)
                        for d in range(D):
                            scaled[d] = q[d] * scale
                    attend_head(
                        lines, value, largest, total, scores, keys, count * group, group,
                        pool + head * block_size * line_bytes, line_bytes, values_at, block_bytes,
                        table, num_blocks, block_size,
                        seq_lens[row] - (starts[row + 1] - token), seq_lens[row], causal, window, soft_cap,
                    )  # fmt: skip
                    for m in range(count * group):
                        h = head * group + m % group
                        place = (token + m // group) * num_heads + h
                        lse[place] = finish(
                            out + LINE * place, value + LINE * m, largest[m], total[m], sinks[h], has_sinks
                        )
        call_frame.free(lines)
        if item == 0:  # what is no row's, before the first and after the last
            clear(out, lse, 0, min(max(starts[0], 0), num_tokens) * num_heads)
            clear(out, lse, min(max(starts[num_rows], 0), num_tokens) * num_heads, num_tokens * num_heads)

    return kernel


@njit
def _work(seq_lens, starts, num_tokens):  # type: ignore[no-untyped-def]
    """Keys times queries, at least 1."""
    work = 0
    for row in range(seq_lens.size):
        count = max(0, min(starts[row + 1], num_tokens) - max(starts[row], 0))
        work += count * max(seq_lens[row], 1)
    return max(work, 1)


@njit
def _num_items(frame, num_threads):  # type: ignore[no-untyped-def]
    _, q_shape = call_frame.argument(frame, 0)
    _, tables_shape = call_frame.argument(frame, 2)
    num_rows = tables_shape[0]
    seq_lens = call_frame.integers(call_frame.argument(frame, 3)[0], num_rows)
    starts = call_frame.integers(call_frame.argument(frame, 4)[0], num_rows + 1)
    work = _work(seq_lens, starts, q_shape[0])
    return 1 if num_threads == 1 or work * q_shape[1] < LEAST_WORK else ITEMS_PER_THREAD * num_threads
