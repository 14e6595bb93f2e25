"""Attention on a TPU: the decode kernel for rows of few queries, the prefill kernel for the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _platform
from pallas_kernels._kv_pages import KVPages
from pallas_kernels._tpu import decode, prefill

# Up to so many queries go through the decode kernel: a step that verifies proposed tokens stays one pass.
MAX_DECODE_QUERIES = 8

QUERY_DTYPES = ("bfloat16", "float32")
POOL_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
MAX_STREAM_VMEM = 32 * 2**20
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def why_not(q: jax.Array, kv_pages: KVPages) -> str | None:
    """What this implementation can't do of what is asked, or None."""
    if q.dtype.name not in QUERY_DTYPES:
        return f"queries of dtype {q.dtype.name} have no TPU kernel; use one of {QUERY_DTYPES}"
    if kv_pages.dtype.name not in POOL_DTYPES:
        return f"a KV pool of dtype {kv_pages.dtype.name} has no TPU kernel; use one of {POOL_DTYPES}"
    if kv_pages.block_size not in BLOCK_SIZES:
        return f"block_size {kv_pages.block_size} has no TPU kernel; use one of {BLOCK_SIZES}"
    tile = decode.tile_shape(kv_pages)
    if tile.vmem_bytes > MAX_STREAM_VMEM:
        return (
            f"a block of {kv_pages.block_size} tokens of {kv_pages.num_kv_heads} heads of {kv_pages.head_dim} is too "
            f"large for a TPU's VMEM; use a smaller block_size"
        )
    return None


def attend(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,  # i32[]
    scale: jax.Array,  # f32[]
    sliding_window: jax.Array | None,  # i32[]
    sinks: jax.Array | None,  # f32[Hq]
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """out [T, Hq, D] in q's dtype and lse f32 [T, Hq]; `paged_attention` documents the meaning."""
    num_tokens, num_q_heads, _ = q.shape
    out = jnp.zeros(q.shape, q.dtype)
    lse = jnp.full((num_tokens, 1, num_q_heads), -jnp.inf, jnp.float32)  # a token's line can be copied on its own
    arguments = (q, kv_pages, block_tables, seq_lens, query_start_loc, layer, scale, sliding_window, sinks)
    with_prefill = max_query_len > MAX_DECODE_QUERIES
    out, lse = decode.attend(
        *arguments,
        out,
        lse,
        soft_cap=soft_cap,
        causal=causal,
        max_query_len=1 if with_prefill else max_query_len,
        num_cores=_num_cores(interpret),
        interpret=interpret,
    )
    if with_prefill:
        out, lse = prefill.attend(
            *arguments,
            out,
            lse,
            soft_cap=soft_cap,
            causal=causal,
            max_query_len=max_query_len,
            num_cores=_num_cores(interpret),
            interpret=interpret,
        )
    return out, lse.reshape(num_tokens, num_q_heads)


def _num_cores(interpret: Any) -> int:
    """The cores that share a kernel's grid: two on v4 and v5p, elsewhere one."""
    if interpret:
        return getattr(interpret, "num_cores_or_threads", 1)
    return getattr(_platform.device_of_this_trace(), "num_cores", None) or 1
