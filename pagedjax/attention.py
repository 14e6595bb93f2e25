"""The two ways a layer attends: over the tokens at hand (dense), or over the KV pool through block tables (paged).

Both are functions `attend(q, k, v, cache) -> (out, cache)`; the decoder's layers know no third argument, so the
training forward and the generating forward cannot drift apart.

Dimensions: B batch, T tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pagedjax.batch import Batch
from pallas_kernels import KVPages

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# A window no sequence reaches: what a full-attention layer has where other layers of the model have a window.
FULL_ATTENTION = 2**30


def dense(positions: jax.Array, window: jax.Array | None) -> Attend:
    """Causal attention among the tokens of each sequence.

    Args:
        positions: i32[B, T], increasing along T.
        window: i32[] or None: query i sees keys i - window + 1 .. i.

    Returns:
        `attend(q [B, T, Hq, D], k [B, T, Hkv, D], v [B, T, Hkv, D], None) -> (out [B, T, Hq, D], None)`, computed in
        float32.
    """
    distance = positions[:, :, None] - positions[:, None, :]  # [B, T, T]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: None) -> tuple[jax.Array, None]:
        batch, length, _, head_dim = q.shape
        grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
        scores = jnp.einsum(
            "bthgd,bshd->bhgts",
            grouped.astype(jnp.float32),
            k.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhgts,bshd->bthgd", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return out.reshape(q.shape).astype(q.dtype), cache

    return attend


def paged(batch: Batch, layer: jax.Array, window: jax.Array | None, implementation: str | None) -> Attend:
    """Writes K and V of the step's tokens into the pool, then attends over every block of their rows; on a mesh each
    device for its own heads.

    Args:
        batch: where each token goes.
        layer: i32[], which layer of the pool.
        window: i32[] or None, as in `dense`.
        implementation: passed to `pallas_kernels.paged_attention`.

    Returns:
        `attend(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], kv_pages) -> (out [T, Hq, D], kv_pages)`, where `kv_pages`
        is what the engine has given the model.
    """

    function = functools.partial(_write_and_attend, implementation=implementation)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: Any) -> tuple[jax.Array, Any]:
        arguments = (q, k, v, kv_pages, batch, layer, window)
        return function(*arguments) if batch.heads is None else batch.heads.attend(function, *arguments)

    return attend


def _write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: KVPages,
    batch: Batch,
    layer: jax.Array,
    window: jax.Array | None,
    *,
    implementation: str | None,
) -> tuple[jax.Array, KVPages]:
    kv_pages = pallas_kernels.write_kv(kv_pages, layer, k, v, batch.slot_mapping)
    out = pallas_kernels.paged_attention(
        q,
        kv_pages,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        layer=layer,
        sliding_window=window,
        max_query_len=batch.max_query_len,
        implementation=implementation,  # type: ignore[arg-type]  # EngineConfig has checked it
    )
    assert isinstance(out, jax.Array)  # without an LSE
    return out, kv_pages
