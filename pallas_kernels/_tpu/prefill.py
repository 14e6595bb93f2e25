"""Rows of many queries on a TPU: how large the tiles of queries and keys are, and the call of the kernel.

T query tokens, S rows, P blocks a table line, Hq query heads, D head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import LANES, KVPages
from pallas_kernels._tpu.prefill_kernel import Static, kernel
from pallas_kernels._tpu.query_tile import QueryTileShape
from pallas_kernels._tpu.stream import LOG2_E
from pallas_kernels._tpu.tile import TileShape, flatten_table
from pallas_kernels._tpu.work import list_work

MAX_KEYS_PER_TILE = 512
MIN_KEYS_PER_TILE = LANES
MAX_QUERIES_PER_TILE = 256
MIN_QUERIES_PER_TILE = 16  # what a register of bfloat16 holds
# Query lines (queries times G) that share a tile of keys: from here on, more of them gain little.
LINES_PER_HEAD = 512

MIB = 2**20
KEYS_VMEM = 16 * MIB
QUERIES_VMEM = 20 * MIB
SPILL_VMEM = 8 * MIB


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
    """Fills the lines of the rows with two queries or more in out and lse."""
    keys, queries = key_tile(kv_pages), query_tile(q, kv_pages, max_query_len)
    static = Static(keys, queries, soft_cap, causal, sliding_window is not None, sinks is not None, num_cores)
    work = list_work(
        query_start_loc,
        seq_lens,
        sliding_window,
        causal=causal,
        block_size=keys.block_size,
        keys_per_tile=keys.keys,
        table_width=block_tables.shape[1],
        num_tokens=q.shape[0],
        queries_per_item=queries.queries,
        min_query_len=2,
    )
    window = jnp.zeros(1, jnp.int32) if sliding_window is None else sliding_window.reshape(1)
    scalars = [*work, layer.reshape(1), window, scale.astype(jnp.float32).reshape(1)]
    if sinks is not None:
        scalars.append(sinks.astype(jnp.float32) * LOG2_E)
    inputs = [flatten_table(block_tables, keys), q, kv_pages.pool]
    if kv_pages.scales is not None:
        inputs.append(kv_pages.scales)
    inputs += [out, lse]
    num_inputs = len(scalars) + len(inputs)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, lse = pl.pallas_call(
        functools.partial(kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores,),
            in_specs=[in_hbm] * len(inputs),
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=static.scratch_shapes(),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        input_output_aliases={num_inputs - 2: 0, num_inputs - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if num_cores > 1 else "arbitrary",),
            vmem_limit_bytes=keys.vmem_bytes + queries.vmem_bytes + SPILL_VMEM,
            # They cost a third of the inner loop; the interpreter, which the tests use, has its own.
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="paged_prefill",
    )(*scalars, *inputs)
    return out, lse


def key_tile(kv_pages: KVPages) -> TileShape:
    """The largest tile of keys that is of use and fits."""
    keys = MAX_KEYS_PER_TILE
    while keys > MIN_KEYS_PER_TILE and TileShape.of(kv_pages, keys).vmem_bytes > KEYS_VMEM:
        keys //= 2
    return TileShape.of(kv_pages, keys)


def query_tile(q: jax.Array, kv_pages: KVPages, max_query_len: int) -> QueryTileShape:
    """The largest tile of queries that is of use and fits."""
    _, num_q_heads, head_dim = q.shape
    keys = key_tile(kv_pages)
    group = num_q_heads // kv_pages.num_kv_heads
    compute_dtype = jnp.dtype(jnp.float32 if jnp.float32 in (q.dtype, kv_pages.dtype) else jnp.bfloat16)

    def shape(queries: int) -> QueryTileShape:
        return QueryTileShape(queries, num_q_heads, head_dim, keys.lanes, keys.v_start, q.dtype, compute_dtype)

    queries = MAX_QUERIES_PER_TILE
    while queries > MIN_QUERIES_PER_TILE and (
        queries >= 2 * max_query_len
        or queries * group >= 2 * LINES_PER_HEAD
        or shape(queries).vmem_bytes > QUERIES_VMEM
    ):
        queries //= 2
    return shape(queries)
