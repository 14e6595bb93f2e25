"""Two attention results over disjoint keys become the result over their union: cascades, shared prefixes, split KV."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over two disjoint sets of keys into attention over both.

    With w_x = exp(lse_x - lse): out = w_a out_a + w_b out_b and lse = log(exp(lse_a) + exp(lse_b)) (the combination
    step of FlashAttention, Dao et al. 2022, section 3.1). A part that saw no key (LSE -inf) contributes nothing; where
    neither did, the result is 0 and -inf. Give the sinks to exactly one part.

    Args:
        out_a: [..., num_q_heads, head_dim].
        lse_a: [..., num_q_heads], natural log, as `paged_attention(..., return_lse=True)` returns it.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        out in out_a's dtype, lse in float32 (float64 where an LSE is).

    Raises:
        ValueError: shapes that don't belong together.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            f"out_a {out_a.shape}, lse_a {lse_a.shape}, out_b {out_b.shape}, lse_b {lse_b.shape}: both outs must have "
            "one shape, and both LSEs that shape without its last axis"
        )
    dtype = jnp.promote_types(jnp.promote_types(lse_a.dtype, lse_b.dtype), jnp.float32)
    lse_a, lse_b = lse_a.astype(dtype), lse_b.astype(dtype)
    largest = jnp.maximum(lse_a, lse_b)
    seen = largest != -jnp.inf  # NaN, of a key that is NaN, has to show
    offset = jnp.where(seen, largest, 0)  # -inf - -inf would be NaN
    weight_a, weight_b = jnp.exp(lse_a - offset), jnp.exp(lse_b - offset)
    total = jnp.where(seen, weight_a + weight_b, 1)
    out = _weighted(weight_a / total, out_a, dtype) + _weighted(weight_b / total, out_b, dtype)
    lse = jnp.where(seen, offset + jnp.log(total), -jnp.inf)
    return out.astype(out_a.dtype), lse


def _weighted(weight: jax.Array, out: jax.Array, dtype: jnp.dtype) -> jax.Array:
    weight = weight[..., None]
    return jnp.where(weight != 0, weight * out.astype(dtype), 0)  # a part without weight may hold anything
