"""The decoder in float64 NumPy, one sequence and one head at a time: an oracle that shares no code with the package.

It reads a `ModelConfig` and the parameter tree of the loaders. Dimensions: T tokens, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagedjax.config import ModelConfig, RopeConfig


def logits(config: ModelConfig, params: dict[str, Any], tokens: np.ndarray, max_len: int | None = None) -> np.ndarray:
    """The logits after each token.

    Args:
        config: the architecture, all families.
        params: nested dict of arrays as the loaders return it.
        tokens: [T] integers.
        max_len: for rope kind dynamic, the longest sequence; None: the original context.

    Returns:
        float64 [T, V].
    """
    turns = _turns(config.rope, config.head_dim, len(tokens), max_len)
    windows = config.sliding_windows or [None] * config.num_layers
    x = _float(params["embed"]["embedding"])[tokens]
    for number, window in enumerate(windows):
        layer = _layer(params["layers"], number)
        x = x + _attention(config, layer["attention"], _norm(config, layer["attention_norm"], x), turns, window)
        x = x + _mlp(config, layer["mlp"], _norm(config, layer["mlp_norm"], x))
    x = _norm(config, params["final_norm"], x)
    head = _float(params["embed"]["embedding"]).T if config.tie_word_embeddings else _float(params["lm_head"]["kernel"])
    return x @ head


def rope_frequencies(rope: RopeConfig, head_dim: int, max_len: int | None = None) -> tuple[list[float], float]:
    """Radians per position of each pair, and the factor on cosine and sine, pair by pair from the definitions."""
    theta, original = rope.theta, rope.original_max_position or 0
    if rope.kind == "dynamic" and max_len is not None and max_len > original:
        theta *= (rope.factor * max_len / original - rope.factor + 1) ** (head_dim / (head_dim - 2))
    frequencies = []
    for pair in range(head_dim // 2):
        frequency = 1.0 / theta ** (2 * pair / head_dim)
        turns = original * frequency / (2 * math.pi)
        if rope.kind == "linear" or (rope.kind == "llama3" and turns < rope.low_freq_factor):
            frequency /= rope.factor
        elif rope.kind == "llama3" and turns < rope.high_freq_factor:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        elif rope.kind == "yarn":
            frequency *= 1 - _yarn_ramp(rope, head_dim, pair) * (1 - 1 / rope.factor)
        frequencies.append(frequency)
    return frequencies, _yarn_scaling(rope) if rope.kind == "yarn" else 1.0


def _yarn_ramp(rope: RopeConfig, head_dim: int, pair: int) -> float:
    # The pair whose frequency makes n turns in the original context: original * theta^(-2 pair / D) = 2 pi n.
    assert rope.original_max_position is not None
    low, high = (
        head_dim / 2 * math.log(rope.original_max_position / (2 * math.pi * turns), rope.theta)
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return min(max((pair - low) / (high - low or 0.001), 0.0), 1.0)


def _yarn_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        log = math.log(rope.factor)
        return (0.1 * rope.mscale * log + 1) / (0.1 * rope.mscale_all_dim * log + 1)
    return 0.1 * math.log(rope.factor) + 1


def _turns(rope: RopeConfig, head_dim: int, length: int, max_len: int | None) -> np.ndarray:
    """Complex [T, D / 2]: what each pair, as a complex number, is multiplied by."""
    frequencies, scaling = rope_frequencies(rope, head_dim, max_len)
    return scaling * np.exp(1j * np.outer(np.arange(length), frequencies))


def _attention(config: ModelConfig, part: dict[str, Any], x: np.ndarray, turns: np.ndarray, window: Any) -> np.ndarray:
    heads = _linear(part["qkv"], x).reshape(len(x), -1, config.head_dim)
    group = config.num_q_heads // config.num_kv_heads
    outputs = []
    for head in range(config.num_q_heads):
        key_head = config.num_q_heads + head // group
        q, k = heads[:, head], heads[:, key_head]
        if config.qk_norm:
            q, k = _norm(config, part["q_norm"], q), _norm(config, part["k_norm"], k)
        scores = _rotate(q, turns) @ _rotate(k, turns).T / math.sqrt(config.head_dim)
        outputs.append(_softmax(scores, window) @ heads[:, key_head + config.num_kv_heads])
    return _linear(part["out"], np.concatenate(outputs, axis=-1))


def _softmax(scores: np.ndarray, window: int | None) -> np.ndarray:
    weights = np.zeros_like(scores)
    for query in range(len(scores)):
        first = 0 if window is None else max(0, query - window + 1)
        visible = np.exp(scores[query, first : query + 1] - scores[query, first : query + 1].max())
        weights[query, first : query + 1] = visible / visible.sum()
    return weights


def _rotate(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _mlp(config: ModelConfig, part: dict[str, Any], x: np.ndarray) -> np.ndarray:
    both = _linear(part["gate_up"], x)
    gate, up = both[:, : config.intermediate_size], both[:, config.intermediate_size :]
    return _linear(part["down"], gate / (1 + np.exp(-gate)) * up)


def _norm(config: ModelConfig, part: dict[str, Any], x: np.ndarray) -> np.ndarray:
    return _float(part["scale"]) * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps)


def _linear(part: dict[str, Any], x: np.ndarray) -> np.ndarray:
    return x @ _float(part["kernel"]) + (_float(part["bias"]) if "bias" in part else 0.0)


def _layer(stacked: dict[str, Any], number: int) -> dict[str, Any]:
    return {key: _layer(value, number) if isinstance(value, dict) else value[number] for key, value in stacked.items()}


def _float(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
