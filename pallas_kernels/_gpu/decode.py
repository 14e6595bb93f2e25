"""The decode kernel for NVIDIA Hopper: rows with few queries, whose cost is reading their keys and values.

The operands are swapped. The scores are S[keys of a tile, N] = K . Q^T and the output is O^T[E, N] += V^T . P, so keys
and head dimension fill the 64 rows of the matrix unit, and a group of query heads is padded to 8 columns rather than
to 64 rows. One warpgroup copies (a TMA box for each block and head), one computes; a ring of stages is between them.
The programs are persistent and share out the items of a work list (`split.py`): the ring runs on from item to item.

S rows, H KV heads, N columns (query, head of the group), D head_dim, E = D rounded up to 64, B tokens a block,
P blocks a table line, M most splits a row.
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
from pallas_kernels._gpu import split
from pallas_kernels._gpu.decode_consumer import consume
from pallas_kernels._gpu.decode_plan import QUERY_SLOTS, STAGES, Plan, Program
from pallas_kernels._gpu.split import TILE
from pallas_kernels._kv_pages import K_PART, V_PART, KVPages

MULTIPROCESSORS = 132  # of an H100 or H200
INTERPRETED_PROGRAMS = 2  # each takes the interpreter long
PRODUCER, CONSUMER, NUM_WARPGROUPS = range(3)


def attend(
    q: jax.Array,  # [S, H, N, key_columns]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    work: split.Work,
    layer: jax.Array,
    scale: jax.Array,
    sliding_window: jax.Array | None,
    plan: Plan,
    most_splits: int,  # M
) -> split.Parts:
    """The parts of every split [M, S, ...]; where the work list has no item there is garbage."""
    num_rows, num_kv_heads, columns, _ = q.shape
    window = jnp.int32(0) if sliding_window is None else sliding_window
    integers = jnp.stack([work.num_items * num_kv_heads, layer, window])
    programs = INTERPRETED_PROGRAMS if plan.interpret else MULTIPROCESSORS * plan.programs_per_multiprocessor
    programs = min(programs, num_rows * most_splits * num_kv_heads)
    parts = (most_splits, num_rows, num_kv_heads)
    kernel = plgpu.kernel(
        functools.partial(_body, plan, programs),
        out_type=tuple(
            jax.ShapeDtypeStruct((*parts, *shape), jnp.float32)
            for shape in ((plan.padded_dim, columns), (columns,), (columns,))
        ),
        scratch_types=plan.scratch(),
        grid=(programs,),
        grid_names=("program",),
        num_threads=NUM_WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=_compat.gpu_compiler_params(approx_math=True),
        interpret=plan.interpret,
    )
    outputs = kernel(
        q,
        kv_pages.pool,
        block_tables.reshape(-1),
        work.items.reshape(-1),
        integers.astype(jnp.int32),
        scale.astype(jnp.float32).reshape(1),
        *(() if kv_pages.scales is None else (kv_pages.scales,)),
    )
    return split.Parts(*outputs)


def _body(plan: Plan, programs: int, *refs: Any, **scratch: Any) -> None:
    program = Program(plan, programs, refs, scratch)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == PRODUCER)(lambda: _produce(program))
    pl.when(warpgroup == CONSUMER)(lambda: consume(program))


def _produce(program: Program) -> None:
    """Keeps the ring of K and V tiles, and the two query slots, filled."""
    scratch = program.scratch
    block_size = jnp.int32(program.plan.block_size)

    def one_item(i: jax.Array, step: jax.Array) -> jax.Array:
        head, (row, _, first_tile, end_tile, seq_len, _, first_key) = program.head_and_item(i)
        slot = lax.rem(i, jnp.int32(QUERY_SLOTS))
        pl.when(i >= QUERY_SLOTS)(lambda: plgpu.barrier_wait(scratch["q_empty"].at[slot]))
        plgpu.copy_gmem_to_smem(program.q.at[row, head], scratch["q_s"].at[slot], scratch["q_full"].at[slot])
        # An entry past the length or before the window may hold anything: the nearest one that counts is read again.
        nearest = functools.partial(jnp.clip, min=lax.div(first_key, block_size), max=lax.div(seq_len - 1, block_size))

        def one_tile(tile: jax.Array, step: jax.Array) -> jax.Array:
            block = lax.div(tile * TILE, block_size)
            entries = [row * program.table_width + nearest(block + j) for j in range(program.plan.blocks_per_tile)]
            ids = [program.block_table[entry] for entry in entries]  # all asked for before the first is needed
            _fill(program, ids, head, lax.rem(tile * TILE, block_size), step)
            return step + 1

        return lax.fori_loop(first_tile, end_tile, one_tile, step)

    steps = lax.fori_loop(0, program.count, one_item, jnp.int32(0))
    # What the consumer hands back last is nobody's to fill, but a barrier has to be left as it was found.
    _drain(scratch["kv_empty"], STAGES, steps)
    _drain(scratch["q_empty"], QUERY_SLOTS, program.count)


def _drain(barrier: Any, slots: int, count: jax.Array) -> None:
    def wait(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(slots))])

    lax.fori_loop(jnp.maximum(count - slots, 0), count, wait, None)


def _fill(program: Program, ids: list[jax.Array], head: jax.Array, offset: jax.Array, step: jax.Array) -> None:
    """Fills the stage of a step with a tile: of each block the tokens from `offset` on."""
    plan, scratch = program.plan, program.scratch
    stage = lax.rem(step, jnp.int32(STAGES))
    pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(scratch["kv_empty"].at[stage]))
    for copy in range(plan.copies):
        full = scratch["kv_full"].at[stage * plan.copies + copy]
        for j, block_id in enumerate(ids):
            of_block = (head,) if plan.kv_on_lanes else ((K_PART, V_PART)[copy], head)
            source = program.pool.at[(program.layer, block_id, *of_block, pl.ds(offset, plan.rows_per_copy))]
            rows = pl.ds(j * plan.rows_per_copy, plan.rows_per_copy)
            plgpu.copy_gmem_to_smem(source, scratch["kv_s"].at[stage, copy, rows], full)
            if plan.is_quantised:
                for part in (K_PART, V_PART) if plan.kv_on_lanes else (copy,):
                    _fill_scales(program, j, block_id, head, offset, stage, part, full)


def _fill_scales(
    program: Program,
    j: int,  # which block of the tile
    block_id: jax.Array,
    head: jax.Array,
    offset: jax.Array,
    stage: jax.Array,
    part: int,
    full: Any,
) -> None:
    """Copies the K or V scales of a block to their place, with neighbours where the block has less than a copy's
    least: those of the heads before, as many as blocks of the tile stand before in 128 bytes, and those after. What
    would lie outside the line of scales is filled with zeros by the copy; nobody uses it."""
    plan = program.plan
    buffer, before = plan.scale_buffer(j)
    assert program.scales is not None
    source = program.scales.at[program.layer, block_id, part]
    target = program.scratch["scales_s"].at[stage, part, buffer]
    plgpu.copy_gmem_to_smem(
        source.at[pl.ds(head * plan.block_size + offset - before, plan.scales_per_copy)],
        target.at[pl.ds(j * plan.rows_per_copy - before, plan.scales_per_copy)],
        full,
    )
