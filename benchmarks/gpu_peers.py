"""Other implementations of attention on the same sizes: each returns a step function and its arguments, queries first.

S rows, H KV heads, Hq query heads, D head_dim, B block size, P blocks a row, C tokens of context.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, "bfloat16")


def triton_paged(case: Any) -> tuple[Callable[..., jax.Array], *tuple[jax.Array, ...]]:
    """jax's in-tree paged attention, on Triton; deprecated, and gone some day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    blocks = case.context // case.block_size
    pages = [_normal(i, case.num_kv_heads, case.rows * blocks, case.block_size, case.head_dim) for i in (1, 2)]
    order = jax.random.permutation(jax.random.key(3), jnp.arange(case.rows * blocks, dtype=jnp.int32))
    lengths = jnp.full(case.rows, case.context, jnp.int32)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return paged_attention(q * case.head_dim**-0.5, k, v, tables, lengths)

    q = _normal(0, case.rows, case.num_q_heads, case.head_dim)
    return step, q, *pages, order.reshape(case.rows, blocks), lengths


def cudnn_decode(case: Any) -> tuple[Callable[..., jax.Array], *tuple[jax.Array, ...]]:
    """cuDNN on a contiguous cache, one query a row."""
    return _cudnn(case, 1, causal=False)


def cudnn_prefill(case: Any) -> tuple[Callable[..., jax.Array], *tuple[jax.Array, ...]]:
    return _cudnn(case, case.context, causal=True)


def _cudnn(case: Any, query_len: int, causal: bool) -> tuple[Callable[..., jax.Array], *tuple[jax.Array, ...]]:
    q = _normal(0, case.rows, query_len, case.num_q_heads, case.head_dim)
    k, v = (_normal(i, case.rows, case.context, case.num_kv_heads, case.head_dim) for i in (1, 2))

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    return step, q, k, v
