"""What the two backward passes share: what is kept of each query, the gradients as they grow, and one tile's scores.

T query tokens, Q queries and K keys of a tile, H KV heads, G query heads a KV head, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._xla import online_softmax


class Saved(NamedTuple):
    """A query's cotangents and what normalised its softmax."""

    d_out: jax.Array  # [T, H, G, D], 0 where the query saw no key
    lse: jax.Array  # [T, H, G]
    shift: jax.Array  # [T, H, G], d_lse - d_out out^T


class Gradients(NamedTuple):
    """The sums so far."""

    q: jax.Array  # [T, H, G, D], of scale * q
    kv: jax.Array | None  # of one layer, see `pool_gradient`; None where the pool is a constant


def through_softmax(
    scores: jax.Array, d_weights: jax.Array, lse: jax.Array, shift: jax.Array, visible: jax.Array, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """The softmax weights of a tile, and the cotangent of its scores.

    Args:
        scores: [..., Q, K], before the cap; finite.
        d_weights: [..., Q, K], d_out v^T; finite.
        lse: [..., Q], of all keys and the sink.
        shift: [..., Q].
        visible: bool, broadcastable to scores.
        cap: the soft cap.

    Returns:
        weights and d_scores [..., Q, K], 0 where a key is not visible.
    """
    capped = online_softmax.cap(scores, cap)
    # Masked before exp: a query that sees no key has LSE -inf, and exp(score + inf) is not to be had.
    weights = jnp.exp(jnp.where(visible, capped - lse[..., None], -jnp.inf))
    d_scores = weights * (d_weights + shift[..., None])
    if cap is not None:
        d_scores *= 1 - (capped / cap) ** 2
    return weights, d_scores
