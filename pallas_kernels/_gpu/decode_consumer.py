"""The computing half of the Hopper decode kernel: attention of an item over its tiles, with an online softmax.

Scores and their maxima are in units of log2(e), so that the exponentials are powers of two.

N columns (query, head of the group), D head_dim, E = D rounded up to 64.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels._gpu.decode_plan import ELEMENT, PER_COLUMN, PER_KEY, QUERY_SLOTS, STAGES, Plan, Program
from pallas_kernels._gpu.split import LOWEST, TILE
from pallas_kernels._kv_pages import K_PART, V_PART


def scale_of_scores(scale: jax.Array, soft_cap: float | None) -> jax.Array:
    """What the kernel multiplies q . k with."""
    return scale * math.log2(math.e) * (1 if soft_cap is None else 2 / soft_cap)


def consume(program: Program) -> None:
    """Works off the program's items."""
    plan, scratch = program.plan, program.scratch
    columns, padded_dim = plan.padded_columns, plan.padded_dim
    key_of = plan.iota((TILE, columns), 0, ELEMENT)
    query_of = _query_of_column(plan)

    def one_item(i: jax.Array, step: jax.Array) -> jax.Array:
        head, (row, split, first_tile, end_tile, seq_len, position, first_key) = program.head_and_item(i)
        slot = lax.rem(i, jnp.int32(QUERY_SLOTS))
        plgpu.barrier_wait(scratch["q_full"].at[slot])

        def one_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            *softmax, step = state
            key = key_of + tile * TILE
            visible = key < seq_len
            if plan.causal:
                visible &= key <= query_of + position
            if plan.has_window:
                visible &= key > query_of + (position - program.window)
            first, end = first_key - tile * TILE, seq_len - tile * TILE
            return *_attend_tile(program, slot, step, visible, first, end, *softmax), step + 1

        start = (
            plan.full(LOWEST, (columns,), PER_COLUMN),
            plan.full(0, (TILE, columns), ELEMENT),
            plan.full(0, (padded_dim, columns), ELEMENT),
            step,
        )
        maximum, total, value, step = lax.fori_loop(first_tile, end_tile, one_tile, start)
        plgpu.barrier_arrive(scratch["q_empty"].at[slot])
        for ref, x in zip(program.outputs, (value, maximum, total.sum(0)), strict=True):
            _compat.gpu_store(ref.at[split, row, head], x)
        return step

    lax.fori_loop(0, program.count, one_item, jnp.int32(0))


def _query_of_column(plan: Plan) -> jax.Array | int:
    """i32[TILE, N]: which query a column is of; columns past those in use count as the last one's."""
    query: jax.Array | int = 0
    if plan.max_query_len > 1:
        column = plan.iota((TILE, plan.padded_columns), 1, ELEMENT)
        for i in range(1, plan.max_query_len):
            query = query + jnp.where(column >= i * plan.group, 1, 0)
    return query


def _attend_tile(
    program: Program,
    query_slot: jax.Array,
    step: jax.Array,
    visible: jax.Array,  # bool[TILE, N]
    first: jax.Array,  # the keys of the tile that any query sees are [first, end)
    end: jax.Array,
    maximum: jax.Array,  # f32[N]
    total: jax.Array,  # f32[TILE, N]: what each line of keys has given; their sum is taken once, at the end
    value: jax.Array,  # f32[E, N]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state of the softmax after one more tile."""
    plan, scratch = program.plan, program.scratch
    stage = lax.rem(step, jnp.int32(STAGES))
    kv = scratch["wide_s"] if plan.is_quantised else scratch["kv_s"].at[stage]
    k = kv.at[0, :, pl.ds(0, plan.key_columns)]
    v = kv.at[plan.copies - 1, :, pl.ds(plan.line - plan.padded_dim, plan.padded_dim)]

    _receive(program, stage, 0)
    scores = _compat.gpu_matmul(k, scratch["q_s"].at[query_slot], (False, True), visible.shape, plan.interpret)
    if plan.is_quantised:
        scores *= _scales(program, stage, K_PART)
    scores = jnp.where(visible, _scaled(scores, program.scale, plan.soft_cap), -jnp.inf)
    new_maximum = jnp.maximum(maximum, scores.max(0))
    shrink = jnp.exp2(maximum - new_maximum)
    p = jnp.exp2(scores - _along_columns(new_maximum, scores))
    total = total * _along_columns(shrink, total) + p

    if plan.copies > 1:
        _receive(program, stage, 1)
    if plan.is_quantised:
        p = jnp.where(visible, p * _scales(program, stage, V_PART), 0)  # a stale scale may be NaN
    _store_transposed(plan, scratch["p_s"], p)
    pl.when((first > 0) | (end < TILE))(lambda: _zero_unseen(plan, v, first, end))
    plgpu.commit_smem()
    if plan.is_quantised:  # all that is in the stage has been read
        plgpu.barrier_arrive(scratch["kv_empty"].at[stage])
    added = _compat.gpu_matmul(v, scratch["p_s"], (True, True), value.shape, plan.interpret)
    if not plan.is_quantised:
        plgpu.barrier_arrive(scratch["kv_empty"].at[stage])
    return new_maximum, total, value * _along_columns(shrink, value) + added


def _along_columns(x: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, like.shape, (1,))


def _scaled(scores: jax.Array, scale: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scaled and capped, times log2(e)."""
    if soft_cap is None:
        return scores * scale
    # tanh(x) = 1 - 2 / (1 + e^2x); the instruction for tanh is right to 11 bits only.
    return (1 - 2 / (1 + jnp.exp2(scores * scale))) * (soft_cap * math.log2(math.e))


def _receive(program: Program, stage: jax.Array, copy: int) -> None:
    """Waits for K or V (or both), and widens it where it is quantised."""
    plan, scratch = program.plan, program.scratch
    plgpu.barrier_wait(scratch["kv_full"].at[stage * plan.copies + copy])
    if not plan.is_quantised:
        return
    source, target = scratch["kv_s"].at[stage, copy], scratch["wide_s"].at[copy]
    for piece in plan.pieces(plan.line):
        x = plan.load(source.at[:, piece], ELEMENT)
        if plan.stored_dtype == jnp.float8_e4m3fn:
            x = x.astype(jnp.float16).astype(jnp.float32)
        target.at[:, piece][...] = x.astype(plan.dtype)
    if copy == 0:
        plgpu.commit_smem()  # V is committed together with P


def _scales(program: Program, stage: jax.Array, part: int) -> jax.Array:
    """f32[TILE, N]: the scale of each key's K or V; neighbouring blocks' are in different buffers."""
    plan = program.plan
    buffers = program.scratch["scales_s"].at[stage, part]
    scales = plan.load(buffers.at[0], PER_KEY)
    key = plan.iota((TILE,), 0, PER_KEY)
    for i in range(1, plan.scale_buffers):
        buffer = lax.rem(lax.div(key, jnp.int32(plan.block_size)), jnp.int32(plan.scale_buffers))
        scales = jnp.where(buffer == i, plan.load(buffers.at[i], PER_KEY), scales)
    return lax.broadcast_in_dim(scales, (TILE, plan.padded_columns), (0,))


def _store_transposed(plan: Plan, ref: Any, x: jax.Array) -> None:
    """Stores x [a, b] in a ref [b, a] of 16 bits; not every interpreter knows transposed stores."""
    x = x.astype(plan.dtype)
    if plan.interpret:
        ref[...] = x.T
    else:
        _compat.gpu_transpose_ref(ref)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _zero_unseen(plan: Plan, v_ref: Any, first: jax.Array, end: jax.Array) -> None:
    """Zeroes V of keys that no query sees: what is there may be NaN, and a weight of 0 would not keep it out."""
    for piece in plan.pieces(plan.padded_dim):
        part = v_ref.at[:, piece]
        key = plan.iota((TILE, piece.size), 0, ELEMENT)
        x = plan.load(part, ELEMENT)
        part[...] = jnp.where((key >= first) & (key < end), x, jnp.zeros_like(x))
