"""Paged attention in plain XLA: the implementation for CPUs, and the fallback elsewhere.

Two passes over the rows. Decode takes the rows with one query, several rows at a time; prefill takes the others, one
tile of queries of one row at a time. Both walk the keys in tiles of whole blocks with an online softmax, so memory
is a few tiles and the work follows the real lengths. A tile of keys begins at a multiple of its size whatever the
chunk or the window, and a masked tile leaves the softmax bitwise alone: what a row gets does not depend on its batch.

T query tokens, S rows, Hq query heads, H KV heads, G = Hq / H, D head_dim, P blocks a table line.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._kv_pages import KVPages
from pallas_kernels._xla import decode, prefill
from pallas_kernels._xla.problem import Problem


@functools.partial(jax.jit, static_argnames=("soft_cap", "causal", "max_query_len"))
def attend_xla(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, P]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,
    scale: jax.Array,
    sliding_window: jax.Array | None,
    sinks: jax.Array | None,  # [Hq]
    *,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int,
) -> tuple[jax.Array, jax.Array]:
    """out [T, Hq, D] in q's dtype and lse [T, Hq]; `paged_attention` documents the meaning."""
    num_tokens, num_q_heads, head_dim = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    num_kv_heads = kv_pages.num_kv_heads
    grouped = (num_kv_heads, num_q_heads // num_kv_heads)
    problem = Problem(
        q=q.reshape(num_tokens, *grouped, head_dim),
        kv_pages=kv_pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        layer=layer,
        scale=scale,
        sliding_window=sliding_window,
        sinks=None if sinks is None else sinks.astype(dtype).reshape(grouped),
        soft_cap=soft_cap,
        causal=causal,
    )
    out = jnp.zeros((num_tokens, *grouped, head_dim), q.dtype)
    lse = jnp.full((num_tokens, *grouped), -jnp.inf, dtype)
    out, lse = decode.attend(problem, out, lse)
    if max_query_len > 1:
        out, lse = prefill.attend(problem, out, lse, max_query_len)
    return out.reshape(q.shape), lse.reshape(num_tokens, num_q_heads)
