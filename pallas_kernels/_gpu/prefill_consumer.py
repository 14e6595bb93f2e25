"""The consumers of the Hopper prefill kernel: scores, online softmax in units of log2, weights from registers times V.

M rows of a consumer, K keys of a tile, D head_dim.
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
from pallas_kernels._gpu.prefill_plan import CONSUMERS, LOG2_E, PER_COLUMN, PER_ROW, ROWS, WGMMA, Program

NOTHING_SEEN = -1e30  # where a maximum starts: finite, so that -inf minus it is not NaN


def consume(program: Program, consumer: jax.Array) -> None:
    """Attends the rows of one consumer to all keys, and writes its part of the tile."""
    plan, s = program.plan, program.scratch

    @pl.loop(0, plan.stages)
    def _(slot: jax.Array) -> None:  # a slot starts out free
        plgpu.barrier_arrive(s["k_free"].at[slot])
        plgpu.barrier_arrive(s["v_free"].at[slot])

    # Row g * Q + i holds query i; past the last head the rows repeat, unread.
    row = plan.iota((ROWS,), 0, PER_ROW) + consumer * ROWS
    position = program.first_position + lax.rem(row, jnp.full_like(row, plan.queries))
    plgpu.barrier_wait(s["q_ready"])

    def attend_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, largest, total = state
        slot = program.slot(tile)
        scores = _scores(program, consumer, tile, slot)
        scores = _mask(program, tile, position, _log2_units(scores, program.scale, plan.soft_cap))

        new_largest = jnp.maximum(largest, scores.max(axis=1))
        decay = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - _along_rows(new_largest, scores.shape))
        total = total * decay + weights.sum(axis=1)
        value = value * _along_rows(decay, value.shape)

        value = _add_weighted_v(program, consumer, tile, slot, value, weights)
        return value, new_largest, total

    state = (
        plan.full((ROWS, plan.head_dim), 0, WGMMA),
        plan.full((ROWS,), NOTHING_SEEN, PER_ROW),
        plan.full((ROWS,), 0, PER_ROW),
    )
    _write(program, consumer, *lax.fori_loop(program.first_tile, program.end_tile, attend_tile, state))


def _scores(program: Program, consumer: jax.Array, tile: jax.Array, slot: jax.Array) -> jax.Array:
    """q k^T, [M, K]."""
    plan, s = program.plan, program.scratch
    plgpu.barrier_wait(s["k_ready"].at[slot])
    if plan.quantised:
        _convert(program, "k", consumer, tile, slot)
    operands = s["q_s"].at[consumer], s["k_s"].at[0 if plan.quantised else slot]
    scores = _compat.gpu_matmul(*operands, (False, True), (ROWS, plan.keys), plan.interpret)
    if plan.quantised:
        scores = scores * _along_columns(plan.load(s["k_scale_s"].at[slot], PER_COLUMN), scores.shape)
    plgpu.barrier_arrive(s["k_free"].at[slot])
    return scores


def _log2_units(scores: jax.Array, scale: jax.Array, soft_cap: float | None) -> jax.Array:
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    # cap * tanh(x / cap), by way of exp2: the approximate tanh is no better than bfloat16.
    power = jnp.exp2(scores * (scale * (2 * LOG2_E / soft_cap)))
    return (soft_cap * LOG2_E) * (1 - 2 / (power + 1))


def _mask(program: Program, tile: jax.Array, position: jax.Array, scores: jax.Array) -> jax.Array:
    """-inf where a query does not see a key. Only the tiles at an edge have any."""
    plan = program.plan
    first_position, last_position = program.first_position, program.first_position + plan.queries - 1
    all_see = jnp.minimum(first_position + 1, program.end_key) if plan.causal else program.end_key
    at_edge = (tile + 1) * plan.keys > all_see
    if program.window is not None:
        at_edge |= tile * plan.keys <= last_position - program.window

    def masked(scores: jax.Array) -> jax.Array:
        key = plan.iota(scores.shape, 1, WGMMA) + tile * plan.keys
        query = _along_rows(position, scores.shape)
        visible = key < program.end_key
        if plan.causal:
            visible &= key <= query
        if program.window is not None:
            visible &= key > query - program.window
        return jnp.where(visible, scores, -math.inf)

    return lax.cond(at_edge, masked, lambda scores: scores, scores)


def _add_weighted_v(
    program: Program, consumer: jax.Array, tile: jax.Array, slot: jax.Array, value: jax.Array, weights: jax.Array
) -> jax.Array:
    """value + weights v, [M, D]."""
    plan, s = program.plan, program.scratch
    if plan.quantised:
        plgpu.barrier_wait(s["v_ready"].at[slot])
        weights = (weights * _along_columns(_v_scale(program, tile, slot), weights.shape)).astype(plan.dtype)
        _convert(program, "v", consumer, tile, slot)
    else:
        weights = weights.astype(plan.dtype)  # now: half the registers while V is prepared
        plgpu.barrier_wait(s["v_ready"].at[slot])
        _zero_unseen_v(program, consumer, tile, slot)
    value = _add_product(program, consumer, value, weights, s["v_s"].at[0 if plan.quantised else slot])
    plgpu.barrier_arrive(s["v_free"].at[slot])
    return value


def _v_scale(program: Program, tile: jax.Array, slot: jax.Array) -> jax.Array:
    """f32[K], zero where no query of the tile sees the key: 0 * NaN is NaN."""
    scale = program.plan.load(program.scratch["v_scale_s"].at[slot], PER_COLUMN)
    key = program.plan.iota(scale.shape, 0, PER_COLUMN) + tile * program.plan.keys
    return jnp.where(program.in_reach(key), scale, 0)


def _zero_unseen_v(program: Program, consumer: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
    """Zeroes what no query of the tile sees, for 0 * NaN is NaN."""
    plan, v_s = program.plan, program.scratch["v_s"].at[slot]
    at_edge = (tile + 1) * plan.keys > program.end_key
    if program.window is not None:
        at_edge |= tile * plan.keys < program.first_key

    @pl.when(at_edge)
    def _() -> None:
        def zero(corner: tuple[Any, Any], key: jax.Array) -> None:
            v = plan.load(v_s.at[corner], WGMMA)
            v_s.at[corner][...] = jnp.where(program.in_reach(key), v, jnp.zeros_like(v))

        _share_corners(program, consumer, tile, zero)


def _convert(program: Program, name: str, consumer: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
    """Makes a tile's stored values operands, without their scales."""
    plan, s = program.plan, program.scratch
    stored, operand = s[f"stored_{name}_s"].at[slot], s[f"{name}_s"].at[0]

    def convert(corner: tuple[Any, Any], key: jax.Array) -> None:
        x = plan.load(stored.at[corner], WGMMA, optimized=False)
        if plan.stored_dtype == jnp.float8_e4m3fn:
            x = x.astype(jnp.float16).astype(jnp.float32)  # the conversions there are; all exact
        x = x.astype(plan.dtype)
        if name == "v":
            x = jnp.where(program.in_reach(key), x, jnp.zeros_like(x))  # a float8 may be NaN
        operand.at[corner][...] = x

    _share_corners(program, consumer, tile, convert)


def _share_corners(program: Program, consumer: jax.Array, tile: jax.Array, do: Any) -> None:
    """Calls do(corner, its keys i32[M, columns]) for the corners of a tile, dealt out to the consumers; awaits all."""
    plan = program.plan
    for index, (first_key, first_column) in enumerate(plan.corners):

        @pl.when(consumer == index % CONSUMERS)
        def _(first_key: int = first_key, first_column: int = first_column) -> None:
            key = plan.iota((ROWS,), 0, PER_ROW) + (tile * plan.keys + first_key)
            key = _along_rows(key, (ROWS, plan.columns))
            do((pl.ds(first_key, ROWS), pl.ds(first_column, plan.columns)), key)

    plgpu.commit_smem()
    plgpu.barrier_arrive(program.scratch["both"])
    plgpu.barrier_wait(program.scratch["both"])


def _add_product(program: Program, consumer: jax.Array, value: jax.Array, weights: jax.Array, v: Any) -> jax.Array:
    """value + weights @ v."""
    plan = program.plan
    if plan.interpret:  # it knows neither operands in registers nor an accumulator with a value
        p_s = program.scratch["p_s"].at[consumer]
        p_s[...] = weights
        plgpu.commit_smem()
        return value + _compat.gpu_matmul(p_s, v, (False, False), value.shape, plan.interpret)

    def accumulate(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, v)

    return pl.run_state(accumulate)(plgpu.ACC.init(value))


def _write(program: Program, consumer: jax.Array, value: jax.Array, largest: jax.Array, total: jax.Array) -> None:
    """Divides by the sum of the weights, the sink's among them, and copies the consumer's rows out."""
    plan, s = program.plan, program.scratch
    out_s, lse_s = s["q_s"].at[consumer], s["lse_s"].at[consumer]  # q was read for the last time
    seen = total != 0  # a NaN has been seen, and shows
    rescale = plan.full((ROWS,), 1, PER_ROW)
    if plan.has_sinks:
        sink = plan.load(program.sinks.at[program.chunk, consumer], PER_ROW, optimized=False)
        offset = jnp.maximum(largest, sink)  # a sink far above the scores would overflow exp2(sink - largest)
        rescale = jnp.exp2(largest - offset)
        total = total * rescale + jnp.exp2(sink - offset)
        largest = offset
    total = jnp.where(seen, total, 1)
    out_s[...] = (value * _along_rows(jnp.where(seen, rescale / total, 0), value.shape)).astype(plan.dtype)
    lse_s[...] = jnp.where(seen, largest * (1 / LOG2_E) + jnp.log(total), -math.inf)
    plgpu.commit_smem()
    place = (program.item, program.chunk, consumer)
    plgpu.copy_smem_to_gmem(out_s, program.out.at[place])
    plgpu.copy_smem_to_gmem(lse_s, program.lse.at[place])
    plgpu.wait_smem_to_gmem(0)


def _along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def _along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (1,))
