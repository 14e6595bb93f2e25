"""The TPU kernel for rows of few queries: one item is one row, its queries packed with the heads of each group.

T query tokens, S rows, P blocks a table line, Hq query heads, H KV heads, G = Hq / H, R = max_query_len * G lines,
D head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import KVPages
from pallas_kernels._tpu.decode_kernel import kernel
from pallas_kernels._tpu.decode_rows import Static, scratch_shapes
from pallas_kernels._tpu.stream import LOG2_E
from pallas_kernels._tpu.tile import TileShape, flatten_table
from pallas_kernels._tpu.work import list_work

# Long enough to hide the loop's own cost (a v5e takes a quarter of the copies' time), short enough for short rows.
KEYS_PER_TILE = 256
STREAM_VMEM = 16 * 2**20  # above it, tiles are shorter
OTHER_VMEM = 12 * 2**20  # queries, results and what the compiler spills


def tile_shape(kv_pages: KVPages) -> TileShape:
    """Tiles of KEYS_PER_TILE keys, or of fewer where the heads are too many or too wide for VMEM."""
    keys = KEYS_PER_TILE
    while keys > kv_pages.block_size and TileShape.of(kv_pages, keys).vmem_bytes > STREAM_VMEM:
        keys //= 2
    return TileShape.of(kv_pages, keys)


def attend(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,
    scale: jax.Array,
    sliding_window: jax.Array | None,
    sinks: jax.Array | None,  # f32[Hq]
    out: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, 1, Hq]
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,
    num_cores: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Fills the lines of the rows with at most max_query_len queries in out and lse."""
    tile = tile_shape(kv_pages)
    compute_dtype = jnp.float32 if jnp.float32 in (q.dtype, kv_pages.dtype) else jnp.bfloat16
    static = Static(
        tile=tile,
        num_q_heads=q.shape[1],
        max_queries=max_query_len,
        num_cores=num_cores,
        soft_cap=soft_cap,
        causal=causal,
        windowed=sliding_window is not None,
        compute_dtype=compute_dtype,
    )
    work = list_work(
        query_start_loc,
        seq_lens,
        sliding_window,
        causal=causal,
        block_size=tile.block_size,
        keys_per_tile=tile.keys,
        table_width=block_tables.shape[1],
        num_tokens=q.shape[0],
        queries_per_item=max_query_len,
        max_query_len=max_query_len,
    )
    window = jnp.zeros(1, jnp.int32) if sliding_window is None else sliding_window.reshape(1)
    scale = scale.astype(jnp.float32) * (LOG2_E if soft_cap is None else 1 / soft_cap)
    prefetch = (*work, layer.reshape(1), window, scale.reshape(1))
    inputs = [flatten_table(block_tables, tile), q, kv_pages.pool]
    in_specs = [pl.BlockSpec(memory_space=pl.ANY)] * 3
    if kv_pages.scales is not None:
        inputs.append(kv_pages.scales)
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
    if sinks is not None:
        per_line = jnp.tile(sinks.astype(jnp.float32).reshape(-1, 1, static.group), (1, max_query_len, 1)) * LOG2_E
        inputs.append(per_line.reshape(-1, static.lines, 1))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    first_aliased = len(prefetch) + len(inputs)
    call = pl.pallas_call(
        functools.partial(kernel, static, sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(num_cores,),
            in_specs=[*in_specs, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[*tile.scratch_shapes(), *scratch_shapes(static, q.dtype)],
        ),
        out_shape=[jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, lse.dtype)],
        input_output_aliases={first_aliased: 0, first_aliased + 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if num_cores > 1 else "arbitrary",),
            # They cost a third of the inner loop; the interpreter, which the tests use, has its own.
            disable_bounds_checks=True,
            vmem_limit_bytes=tile.vmem_bytes + OTHER_VMEM,
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="paged_decode",
    )
    out, lse = call(*prefetch, *inputs, out, lse)
    return out, lse
