"""Paged attention on NVIDIA Hopper: a decode kernel for rows with few queries and a prefill kernel for the others.

T query tokens, S rows, Hq query heads, H KV heads, D head_dim, P blocks a table line.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels._gpu import decode, join, prefill, split
from pallas_kernels._gpu.decode_consumer import scale_of_scores
from pallas_kernels._gpu.decode_plan import Plan
from pallas_kernels._kv_pages import KVPages

# Up to this many queries a row's whole group goes through the decode kernel: a speculative step, say.
LONGEST_DECODE = 8
SIXTEEN_BITS = ("bfloat16", "float16")
QUANTISED = ("int8", "float8_e4m3fn")
# The matrix unit's N goes to 256; more columns than this leave no registers for a tile.
MOST_COLUMNS = 64
# K and V side by side fill the 64 rows of the matrix unit; the output of a wider head has no room in registers.
LEAST_HEAD_DIM, MOST_HEAD_DIM = 32, 256


def why_not(q: jax.Array, kv_pages: KVPages) -> str | None:
    """What this implementation can't do of what is asked, or None."""
    pool, queries = kv_pages.dtype.name, q.dtype.name
    if pool not in SIXTEEN_BITS + QUANTISED:
        return f"a {pool} pool is not supported, as the matrix unit rounds float32 to 11 bits; use a 16 bit pool"
    if pool in SIXTEEN_BITS and queries != pool:
        return f"{queries} queries on a {pool} pool are not supported, they would be rounded; give them in {pool}"
    if pool in QUANTISED and queries != "bfloat16":
        return f"{queries} queries on a {pool} pool are not supported, they would be rounded; give them in bfloat16"
    if kv_pages.block_size % 8 or (64 % kv_pages.block_size and kv_pages.block_size % 64):
        return f"block_size {kv_pages.block_size} is not supported; use 8, 16, 32 or a multiple of 64"
    if kv_pages.head_dim % 16 or not LEAST_HEAD_DIM <= kv_pages.head_dim <= MOST_HEAD_DIM:
        return (
            f"head_dim {kv_pages.head_dim} is not supported; it must be a multiple of 16 from {LEAST_HEAD_DIM} to "
            f"{MOST_HEAD_DIM}"
        )
    if kv_pages.is_padded:
        return "a pool padded for a TPU is not supported; make it with KVPages.zeros on the GPU"
    group = q.shape[1] // kv_pages.num_kv_heads
    if group > MOST_COLUMNS:
        return f"a group of {group} query heads is not supported; a KV head can have {MOST_COLUMNS} at most"
    return None


@functools.partial(jax.jit, static_argnames=("soft_cap", "causal", "max_query_len", "interpret"))
def attend(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,  # i32[]
    scale: jax.Array,  # f32[]
    sliding_window: jax.Array | None,  # i32[]
    sinks: jax.Array | None,  # [Hq]
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """out [T, Hq, D] in q's dtype and lse f32[T, Hq]; `paged_attention` documents the meaning."""
    interpret = _compat.gpu_interpret_params() if interpret is True else interpret
    group = q.shape[1] // kv_pages.num_kv_heads
    all_decode = max_query_len <= LONGEST_DECODE and group * max_query_len <= MOST_COLUMNS
    options = {"soft_cap": soft_cap, "causal": causal, "interpret": interpret}
    arguments = (q, kv_pages, block_tables, seq_lens, query_start_loc, layer, scale, sliding_window, sinks)
    out, lse = _decode(*arguments, **options, max_query_len=max_query_len if all_decode else 1)
    if not all_decode:
        out, lse = prefill.attend_prefill(*arguments, out, lse, **options, max_query_len=max_query_len)
    return out, lse


def _decode(
    q: jax.Array,
    kv_pages: KVPages,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    layer: jax.Array,
    scale: jax.Array,
    sliding_window: jax.Array | None,
    sinks: jax.Array | None,
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """The rows of 1 to max_query_len queries; tokens of other rows get 0 and -inf."""
    num_tokens, num_q_heads, head_dim = q.shape
    plan = Plan(
        num_kv_heads=kv_pages.num_kv_heads,
        group=num_q_heads // kv_pages.num_kv_heads,
        max_query_len=max_query_len,
        head_dim=head_dim,
        block_size=kv_pages.block_size,
        kv_on_lanes=kv_pages.kv_on_lanes,
        dtype=q.dtype,
        stored_dtype=kv_pages.dtype,
        soft_cap=soft_cap,
        causal=causal,
        has_window=sliding_window is not None,
        interpret=interpret,
    )
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    done = (query_lens > 0) & (query_lens <= max_query_len) & (seq_lens > 0)
    most_splits = split.most_splits(plan.num_kv_heads, block_tables.shape[1] * plan.block_size)
    work = split.list_work(seq_lens, jnp.where(done, query_lens, 0), sliding_window, most_splits)
    packed = split.pack_queries(
        q, query_start_loc, plan.num_kv_heads, max_query_len, plan.padded_columns, plan.key_columns
    )
    scale = scale_of_scores(scale, soft_cap)
    parts = decode.attend(packed, kv_pages, block_tables, work, layer, scale, sliding_window, plan, most_splits)
    whole = join.join(work, parts, plan)
    out, lse = split.finish(whole, sinks, head_dim, max_query_len, plan.group)
    out = split.scatter_to_tokens(out.astype(q.dtype), query_start_loc, done, num_tokens, 0)
    return out, split.scatter_to_tokens(lse, query_start_loc, done, num_tokens, -math.inf)
