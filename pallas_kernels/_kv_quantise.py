"""Quantised K and V: a vector of one token and one head is stored as int8 or float8 with one float32 scale.

value = stored * scale, with scale = max|x| / (the largest stored value), so the largest element is kept to half a step.
A scale of its own for every token and head lets tokens be written one at a time, and an outlier spoils only its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest stored value of each quantised dtype; int8 leaves -128 out, so that it is symmetric.
LARGEST_STORED = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantised(dtype: jnp.dtype) -> bool:
    return dtype.name in LARGEST_STORED


def quantise(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Quantises vectors, each with a scale of its own.

    Args:
        x: [..., D], any floating-point dtype; computed in float32.
        dtype: int8 or float8_e4m3fn.

    Returns:
        stored [..., D] in `dtype`, rounded to nearest, ties to even, and scale f32[...]. A vector of zeros has scale 0
        (as has one below the smallest normal float32). One with a NaN or an infinity has scale NaN: it reads back as
        NaN throughout, never as a finite value.
    """
    largest_stored = LARGEST_STORED[dtype.name]
    x = jax.lax.stop_gradient(x).astype(jnp.float32)  # rounding has no gradient worth the name
    largest = jnp.max(jnp.abs(x), axis=-1)  # a NaN anywhere makes it NaN
    scale = jnp.where(jnp.isfinite(largest), largest * (1 / largest_stored), jnp.nan)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)  # a subnormal divisor may count as 0
    steps = x / jnp.where(scale > 0, scale, 1)[..., None]
    steps = jnp.where((scale > 0)[..., None], jnp.clip(steps, -largest_stored, largest_stored), 0)
    if jnp.issubdtype(dtype, jnp.integer):
        steps = jnp.round(steps)
    return steps.astype(dtype), scale


def dequantise(stored: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 [..., D] of stored [..., D] and scale f32[...]."""
    return stored.astype(jnp.float32) * scale[..., None]
