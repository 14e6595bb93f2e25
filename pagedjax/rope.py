"""Rotary position embedding: each pair of a head's dimensions turns by the token's position times the pair's frequency.

A paged cache holds keys already rotated, and shares them between sequences of any length. So a position must have
one rotation for as long as the engine lives: the frequencies are a constant of the model, computed once.

Dimension letters: T tokens (or B, T: a batch of them), H heads, D head_dim, P = D / 2 pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.config import RopeConfig


def frequencies(config: RopeConfig, head_dim: int, max_len: int | None = None) -> tuple[np.ndarray, float]:
    """The rotation speed of every pair, and the factor on its cosine and sine.

    Sources, by `config.kind`:

    - default: Su et al., RoFormer (arXiv:2104.09864), section 3.2.2: pair i turns by theta ** (-2 i / D).
    - linear: Chen et al., Position Interpolation (arXiv:2306.15595), equation 4: every frequency over `factor`.
    - dynamic: "Dynamic NTK" of bloc97 and emozilla, as in transformers (`rope_type: dynamic`): a larger base,
      theta * (factor * S / S0 - (factor - 1)) ** (D / (D - 2)), with S0 = `original_max_position` and S the longest
      sequence, at least S0. transformers takes the running length for S, so the same key would be rotated
      differently in a longer sequence, which a shared cache can't hold. Here S is `max_len`, fixed: up to S0 this is
      the default kind, as in transformers; above it, it is what transformers computes for a sequence of `max_len`.
    - yarn: Peng et al., YaRN (arXiv:2309.00071), section 3.2 (frequencies) and equation 22 (the factor on cosine and
      sine, 0.1 ln(factor) + 1). `mscale` and `mscale_all_dim` are DeepSeek's form of the factor, as in transformers.
    - llama3: Meta's Llama 3.1 reference code (llama-models, `apply_scaling`): wavelengths up to
      S0 / `high_freq_factor` stay, those from S0 / `low_freq_factor` on are stretched by `factor`, blended between.

    Args:
        config: the base frequency and how it is stretched.
        head_dim: D, the width of a head; even.
        max_len: the longest sequence, in tokens, that will be run with these frequencies; read by the dynamic kind
            only. None: `config.original_max_position`.

    Returns:
        Radians per position, float32 [P] (computed in float64), and the factor on cosine and sine.

    Raises:
        ValueError: `head_dim` is odd, or too small for the dynamic kind.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim ({head_dim}) is not a positive even number; the rotation turns pairs of dimensions")
    scaling = 1.0
    theta = _dynamic_theta(config, head_dim, max_len) if config.kind == "dynamic" else float(config.theta)
    inv_freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)  # [P]
    match config.kind:
        case "default" | "dynamic":
            pass
        case "linear":
            inv_freq = inv_freq / config.factor
        case "yarn":
            inv_freq = _yarn(inv_freq, config, head_dim)
            scaling = _yarn_scaling(config)
        case "llama3":
            inv_freq = _llama3(inv_freq, config)
        case _:
            raise ValueError(f"unknown rope kind {config.kind!r}; see pagedjax.config.RopeKind for the known ones")
    return inv_freq.astype(np.float32), scaling


def rotate(x: jax.Array, positions: jax.Array, inv_freq: jax.typing.ArrayLike, scaling: float = 1.0) -> jax.Array:
    """Rotate the heads of each token to its position.

    Pair i is dimensions (i, i + P), the half-split order of transformers' `rotate_half` and of its checkpoints, not
    the interleaved (2 i, 2 i + 1) of the paper. Phases, cosines and the products are float32 whatever x is: in
    bfloat16 a phase of 1000 radians would be off by several.

    Args:
        x: queries or keys, [T, H, D] or [B, T, H, D].
        positions: i32 [T] or [B, T].
        inv_freq: f32 [P], from `frequencies`.
        scaling: the factor on cosine and sine, from `frequencies`.

    Returns:
        x's shape and dtype.
    """
    phases = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(inv_freq, jnp.float32)  # [T, 1, P]
    cos, sin = jnp.cos(phases) * scaling, jnp.sin(phases) * scaling
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [T, H, P] each
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


def _original_max_position(config: RopeConfig) -> int:
    if config.original_max_position is None:
        raise ValueError(f"rope kind {config.kind!r} needs original_max_position, the context length of pre-training")
    return config.original_max_position


def _dynamic_theta(config: RopeConfig, head_dim: int, max_len: int | None) -> float:
    original = _original_max_position(config)
    if head_dim <= 2:
        raise ValueError(f"head_dim ({head_dim}) must be over 2 for rope kind 'dynamic': its exponent is D / (D - 2)")
    longest = max(original, original if max_len is None else max_len)
    stretch = config.factor * longest / original - (config.factor - 1.0)
    return float(config.theta) * stretch ** (head_dim / (head_dim - 2))


def _yarn(inv_freq: np.ndarray, config: RopeConfig, head_dim: int) -> np.ndarray:
    """Pairs that turn over `beta_fast` times in the original context stay; under `beta_slow` times they are slowed."""
    original = _original_max_position(config)

    def pair_turning(times: float) -> float:  # the (fractional) pair that turns so often in the original context
        return head_dim * math.log(original / (2 * math.pi * times)) / (2 * math.log(config.theta))

    first, last = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bounds of transformers and of the paper's code: the upper one is in dimensions, not pairs.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 1e-3
    slowed = np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)  # [P], 0: as it was, 1: over factor
    return inv_freq * (1.0 - slowed) + inv_freq / config.factor * slowed


def _yarn_scaling(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return float(config.attention_factor)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1.0 else 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _llama3(inv_freq: np.ndarray, config: RopeConfig) -> np.ndarray:
    original = _original_max_position(config)
    turns = original * inv_freq / (2 * math.pi)  # [P], within the original context
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)  # [P], 1: as it was, 0: over factor
    return inv_freq * kept + inv_freq / config.factor * (1.0 - kept)
