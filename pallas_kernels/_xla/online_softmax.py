"""Softmax over keys that arrive tile by tile: a running maximum, sum and weighted value, float32 or wider.

The update of Milakov and Gimelshein (arXiv 1805.02867), applied to attention as in FlashAttention (arXiv 2205.14135).
A tile whose keys are all masked leaves the state bitwise as it was, so rows of different lengths can share a loop.

Q queries, K keys of a tile, D head_dim; "..." are batch axes (rows, heads).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


class SoftmaxState(NamedTuple):
    largest: jax.Array  # [..., Q] the largest score so far, -inf before the first visible key
    total: jax.Array  # [..., Q] sum of exp(score - largest)
    value: jax.Array  # [..., Q, D] sum of exp(score - largest) * v


def start(shape: tuple[int, ...], head_dim: int, dtype: jnp.dtype) -> SoftmaxState:
    """The state before any key, for queries of `shape` [..., Q]."""
    return SoftmaxState(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, head_dim), dtype))


def cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def update(state: SoftmaxState, scores: jax.Array, visible: jax.Array, v: jax.Array, sum_v: str) -> SoftmaxState:
    """Takes one tile of keys in.

    Args:
        state: the state so far.
        scores: [..., Q, K], capped.
        visible: bool, broadcastable to scores.
        v: [..., K, D], zero where no query sees the key.
        sum_v: the einsum of weights and v, giving [..., Q, D].
    """
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.maximum(state.largest, scores.max(-1))
    offset = jnp.where(largest > -jnp.inf, largest, 0)  # -inf - -inf would be NaN
    weights = jnp.exp(scores - offset[..., None])
    decay = jnp.exp(state.largest - offset)
    total = state.total * decay + weights.sum(-1)
    value = state.value * decay[..., None] + jnp.einsum(sum_v, weights, v, precision=HIGHEST)
    return SoftmaxState(largest, total, value)


def finish(state: SoftmaxState, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """out [..., Q, D] and lse [..., Q]; sinks are broadcastable to [..., Q]. No visible key gives 0 and -inf."""
    seen = state.total != 0  # a NaN has been seen, and shows
    largest = jnp.where(seen, state.largest, 0)
    total = jnp.where(seen, state.total, 1)
    if sinks is not None:
        # A sink far above the scores would overflow exp(sink - largest): measure from whichever is larger.
        offset = jnp.maximum(largest, sinks)
        total, rescale = total * jnp.exp(largest - offset) + jnp.exp(sinks - offset), jnp.exp(largest - offset)
        largest = offset
    else:
        rescale = jnp.ones_like(total)
    out = jnp.where(seen[..., None], state.value * (rescale / total)[..., None], 0)
    return out, jnp.where(seen, largest + jnp.log(total), -jnp.inf)
