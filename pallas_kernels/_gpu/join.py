"""The second pass of split KV on Hopper: the parts of a row's splits become one. Reads the splits there are, no more.

In plain XLA it would read the room for the most splits that a table line can have, in every step.

S rows, H KV heads, M most splits a row, N columns (query, head of the group), E head_dim rounded up to 64.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels._gpu.decode_plan import ELEMENT, PER_COLUMN, Plan
from pallas_kernels._gpu.split import LOWEST, Parts, Work

PROGRAMS = 1056  # eight a multiprocessor: each waits for memory most of the time
INTERPRETED_PROGRAMS = 2  # each takes the interpreter long


def join(work: Work, parts: Parts, plan: Plan) -> Parts:
    """The parts [M, S, ...] as one [S, ...]; a row without a split gets LOWEST and zeros."""
    num_rows, num_kv_heads, padded_dim, columns = parts.value.shape[1:]
    programs = min(INTERPRETED_PROGRAMS if plan.interpret else PROGRAMS, num_rows * num_kv_heads)
    kernel = plgpu.kernel(
        functools.partial(_body, plan, programs),
        out_type=tuple(
            jax.ShapeDtypeStruct((num_rows, num_kv_heads, *shape), jnp.float32)
            for shape in ((padded_dim, columns), (columns,), (columns,))
        ),
        grid=(programs,),
        grid_names=("program",),
        kernel_name="paged_decode_join",
        compiler_params=_compat.gpu_compiler_params(approx_math=True),
        interpret=plan.interpret,
    )
    return Parts(*kernel(work.first_split, work.end_split, *parts))


def _body(
    plan: Plan,
    programs: int,
    first_ref: Any,  # i32[S]
    end_ref: Any,  # i32[S]
    value_ref: Any,  # f32[M, S, H, E, N]
    maximum_ref: Any,  # f32[M, S, H, N]
    total_ref: Any,  # f32[M, S, H, N]
    *outputs: Any,
) -> None:
    num_rows, num_kv_heads, padded_dim, columns = value_ref.shape[1:]
    program = lax.axis_index("program")
    count = lax.div(num_rows * num_kv_heads - program + (programs - 1), jnp.int32(programs))

    def load(ref: Any, layout: Any) -> jax.Array:
        return ref[...] if plan.interpret else _compat.gpu_load(ref, layout, optimized=False)

    def one_head(i: jax.Array, _: None) -> None:
        number = program + i * programs
        row = lax.div(number, jnp.int32(num_kv_heads))
        head = lax.rem(number, jnp.int32(num_kv_heads))

        def one_split(split: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            value, maximum, total = state
            part = load(value_ref.at[split, row, head], ELEMENT)
            part_maximum = load(maximum_ref.at[split, row, head], PER_COLUMN)
            part_total = load(total_ref.at[split, row, head], PER_COLUMN)
            new_maximum = jnp.maximum(maximum, part_maximum)
            shrink, weight = jnp.exp2(maximum - new_maximum), jnp.exp2(part_maximum - new_maximum)
            kept, added = (x * lax.broadcast_in_dim(y, x.shape, (1,)) for x, y in ((value, shrink), (part, weight)))
            return kept + added, new_maximum, total * shrink + part_total * weight

        start = (
            plan.full(0, (padded_dim, columns), ELEMENT),
            plan.full(LOWEST, (columns,), PER_COLUMN),
            plan.full(0, (columns,), PER_COLUMN),
        )
        joined = lax.fori_loop(first_ref[row], end_ref[row], one_split, start)
        for ref, x in zip(outputs, joined, strict=True):
            _compat.gpu_store(ref.at[row, head], x)

    lax.fori_loop(0, count, one_head, None)
