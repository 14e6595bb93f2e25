"""The Hopper prefill kernel: one tile of queries of one row against the row's keys, for the query heads of one KV head.

A program has three warpgroups. The last is the producer: it reads block ids and issues one TMA copy per block for K and
one for V, a ring of key tiles ahead. The other two, the consumers, own 64 rows of the matrix unit each and walk the
same key tiles.

The rows are GQA packed: row g * Q + i of a program is query i of its tile for its g-th head. A short row then fills the
matrix unit with heads, little is wasted at the causal edge, and heads that share a KV head read it once.

T tokens, S rows, P blocks a table line, C programs an item, W consumer warpgroups, M rows of one, D head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels._gpu.prefill_consumer import consume
from pallas_kernels._gpu.prefill_plan import CONSUMERS, PER_COLUMN, PRODUCER, ROWS, Plan, Program
from pallas_kernels._kv_pages import K_PART, V_PART

PARTS = {"k": K_PART, "v": V_PART}
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


def launch(
    plan: Plan,
    q: jax.Array,  # [T, Hq, D]
    pool: jax.Array,
    scales: jax.Array,  # f32[L, N, 2, H * B], read where plan.quantised
    block_tables: jax.Array,  # i32[S, P]
    work: jax.Array,  # i32[num_items, 5]
    layer: jax.Array,  # i32[1]
    scale: jax.Array,  # f32[1]
    window: jax.Array,  # i32[1], read where plan.windowed
    sinks: jax.Array,  # f32[C, W, M], row by row, in units of log2, read where plan.has_sinks
) -> tuple[jax.Array, jax.Array]:
    """out [num_items, C, W, M, D] and lse f32[num_items, C, W, M]; unwritten for items without keys."""
    shape = (plan.num_items, plan.chunks, CONSUMERS, ROWS)
    kernel = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=(jax.ShapeDtypeStruct((*shape, plan.head_dim), plan.dtype), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=(plan.num_items * plan.chunks,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plan),
        kernel_name="paged_prefill",
        compiler_params=_compat.gpu_compiler_params(approx_math=True),
        interpret=plan.interpret,
    )
    return kernel(q, pool, scales, block_tables, work, layer, scale, window, sinks)


def _scratch(plan: Plan) -> dict[str, Any]:
    ring = (plan.stages, plan.keys, plan.head_dim)
    operand = (1, *ring[1:]) if plan.quantised else ring
    arrivals = plan.pieces + (1 if plan.quantised else 0)
    scratch: dict[str, Any] = {
        "q_s": plgpu.SMEM((CONSUMERS, ROWS, plan.head_dim), plan.dtype, transforms=plan.tiling(plan.dtype)),
        "lse_s": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=len(plan.query_boxes)),
        "both": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    for name in PARTS:
        scratch[f"{name}_s"] = plgpu.SMEM(operand, plan.dtype, transforms=plan.tiling(plan.dtype))
        scratch[f"{name}_ready"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.stages)
        scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages)
        if plan.quantised:  # the ring holds what is stored; {name}_s holds the tile at hand
            scratch[f"stored_{name}_s"] = plgpu.SMEM(ring, plan.stored_dtype, transforms=plan.tiling(plan.stored_dtype))
            scratch[f"{name}_scale_s"] = plgpu.SMEM(ring[:2], jnp.float32)
    if plan.interpret:
        scratch["p_s"] = plgpu.SMEM((CONSUMERS, ROWS, plan.keys), plan.dtype)
    return scratch


def _body(plan: Plan, *refs: Any, **scratch: Any) -> None:
    program = Program(plan, refs[:-2], refs[-2:], scratch)
    warpgroup = lax.axis_index("warpgroup")
    has_keys = program.end_key > program.first_key

    @pl.when(jnp.logical_and(has_keys, warpgroup == PRODUCER))
    def _() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(program)

    @pl.when(jnp.logical_and(has_keys, warpgroup < CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(program, warpgroup)


def _produce(program: Program) -> None:
    """Copies the queries, then the tiles of keys in order, each as soon as its slot is free."""
    plan, s = program.plan, program.scratch
    for head, query, consumer, row, size in plan.query_boxes:
        tokens = pl.ds(program.first_token + query, size)
        source = program.q.at[tokens, program.chunk * plan.heads + head]
        plgpu.copy_gmem_to_smem(source, s["q_s"].at[consumer, pl.ds(row, size)], s["q_ready"])

    first_piece = lax.div(program.first_key, jnp.int32(plan.piece))
    last_piece = lax.div(program.end_key - 1, jnp.int32(plan.piece))

    def load_tile(tile: jax.Array, _: None) -> None:
        # A piece outside is not the row's, or was freed before the window: one of the row's stands in, unseen.
        pieces = [jnp.clip(tile * plan.pieces + j, first_piece, last_piece) for j in range(plan.pieces)]
        places = [_place(program, piece) for piece in pieces]
        slot = program.slot(tile)
        for name, part in PARTS.items():
            ready = s[f"{name}_ready"].at[slot]
            ring = s[f"stored_{name}_s" if plan.quantised else f"{name}_s"].at[slot]
            plgpu.barrier_wait(s[f"{name}_free"].at[slot])
            for j, place in enumerate(places):
                source = _values(program, part, *place)
                plgpu.copy_gmem_to_smem(source, ring.at[pl.ds(j * plan.piece, plan.piece)], ready)
            if plan.quantised:
                _copy_scales(program, part, places, s[f"{name}_scale_s"].at[slot])
                plgpu.barrier_arrive(ready)

    lax.fori_loop(program.first_tile, program.end_tile, load_tile, None)

    @pl.loop(0, plan.stages)
    def _(slot: jax.Array) -> None:  # every completion of a barrier is waited for
        plgpu.barrier_wait(s["k_free"].at[slot])
        plgpu.barrier_wait(s["v_free"].at[slot])


def _place(program: Program, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The block that a piece of the row is in, and the piece's first token in the block."""
    token, block_size = piece * program.plan.piece, jnp.int32(program.plan.block_size)
    return program.block_tables[program.row, lax.div(token, block_size)], lax.rem(token, block_size)


def _values(program: Program, part: int, block: jax.Array, token: jax.Array) -> Any:
    """The ref of a piece's K or V of one head."""
    plan = program.plan
    tokens = slice(None) if plan.piece == plan.block_size else pl.ds(token, plan.piece)
    if plan.kv_on_lanes:
        lanes = pl.ds(part * plan.head_dim, plan.head_dim)
        return program.pool.at[program.layer, block, program.kv_head, tokens, lanes]
    return program.pool.at[program.layer, block, part, program.kv_head, tokens]


def _copy_scales(program: Program, part: int, places: list[tuple[jax.Array, jax.Array]], target: Any) -> None:
    """Through registers: a block's scales are too short for the alignment of an asynchronous copy."""
    plan = program.plan
    scales = []
    for block, token in places:  # all loads are under way before the first store
        tokens = pl.ds(program.kv_head * plan.block_size + token, plan.piece)
        source = program.scales.at[program.layer, block, part, tokens]
        scales.append(plan.load(source, PER_COLUMN, optimized=False))  # a few bytes
    for j, scale in enumerate(scales):
        target.at[pl.ds(j * plan.piece, plan.piece)][...] = scale
