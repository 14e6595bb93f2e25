"""Paged attention as it is defined, one query at a time: what every other implementation is compared with.

T query tokens, S rows, Hq query heads, H KV heads, G = Hq / H, D head_dim, C tokens a table line can hold.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._kv_pages import KVPages, gather_kv


@functools.partial(jax.jit, static_argnames=("soft_cap", "causal"))
def attend_reference(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, C / B]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    layer: jax.Array,
    scale: jax.Array,
    sliding_window: jax.Array | None,
    sinks: jax.Array | None,  # [Hq]
    *,
    soft_cap: float | None,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """out [T, Hq, D] in q's dtype and lse [T, Hq]; `paged_attention` documents the meaning."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    num_tokens, num_q_heads, _ = q.shape
    num_rows = seq_lens.shape[0]
    group = num_q_heads // kv_pages.num_kv_heads

    def one_query(token: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = jnp.searchsorted(query_start_loc[1:], token, side="right")
        has_row = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        seq_len = jnp.where(has_row, seq_lens[row], 0)
        # The last query of a row is its last token.
        position = seq_len - query_start_loc[row + 1] + token

        k, v = gather_kv(kv_pages, layer, block_tables[row], seq_len)  # [C, H, D]
        key = jnp.arange(k.shape[0])
        visible = key < seq_len
        if causal:
            visible &= key <= position
        if sliding_window is not None:
            visible &= key > position - sliding_window
        any_visible = visible.any()

        k, v = (jnp.where(visible[:, None, None], x, 0) for x in (k, v))  # 0 * NaN is NaN, here or in the gradient
        k, v = (jnp.repeat(x.astype(dtype), group, axis=1) for x in (k, v))  # [C, Hq, D]
        query = jnp.where(any_visible, q[token].astype(dtype), 0)
        scores = jnp.einsum("hd,chd->hc", query, k, precision=jax.lax.Precision.HIGHEST) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        # With no visible key all of them count, and the result is replaced: the gradient of log(0) is not finite.
        scores = jnp.where(visible | ~any_visible, scores, -jnp.inf)

        logits = scores if sinks is None else jnp.concatenate([scores, sinks.astype(dtype)[:, None]], axis=1)
        lse = jax.nn.logsumexp(logits, axis=1)  # [Hq]
        weights = jnp.where(visible, jnp.exp(scores - lse[:, None]), 0)
        out = jnp.einsum("hc,chd->hd", weights, v, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(any_visible, out, 0).astype(q.dtype), jnp.where(any_visible, lse, -jnp.inf)

    return jax.lax.map(one_query, jnp.arange(num_tokens))
