"""The sampler in float64 NumPy, by sorting: what the device code is compared with.

Random bits come from `jax.random` (threefry, partitionable); everything else is written from the definitions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.sampling_params import SamplingParams


def processed_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], stop_ids: list[int]
) -> np.ndarray:
    """f64[V]: bias, held-back stop ids, repetition, frequency, presence; token by token."""
    x = np.where(np.isnan(logits), -np.inf, np.asarray(logits, np.float64))
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_ids:
            x[token] = -np.inf
    for token in set(prompt + output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def kept(x: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """bool[V]: the tokens that survive top-k, top-p and min-p, in (logit descending, id ascending) order.

    `slack` moves the borders of top-p and min-p by that fraction.
    """
    order = np.argsort(-x, kind="stable")
    weights = np.exp((x[order] - x[order[0]]) / params.temperature)
    keep = np.ones(len(x), bool)
    if params.top_k:
        keep[params.top_k :] = False
        weights[params.top_k :] = 0
    probs = weights / weights.sum()
    if params.top_p < 1:
        keep &= np.cumsum(probs) - probs < params.top_p * (1 + slack)
    keep &= probs >= params.min_p * (1 - slack) * probs[0]
    keep[0] = True
    mask = np.zeros(len(x), bool)
    mask[order[keep]] = True
    return mask


def distribution(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """f64[V]: the probabilities a token is drawn with."""
    weights = np.where(kept(x, params), np.exp((x - x.max()) / params.temperature), 0.0)
    return weights / weights.sum()


@jax.jit
def _bits(seed_words: jax.Array, sample_indices: jax.Array, positions: jax.Array, num_tokens: jax.Array) -> jax.Array:
    def row(words: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sample_index), position), num_tokens.shape)

    return jax.vmap(row)(seed_words, sample_indices, positions)


def noise(seeds: list[int], sample_indices: list[int], positions: list[int], num_tokens: int) -> np.ndarray:
    """f64[S, V]: standard Gumbel noise."""
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    with jax.threefry_partitionable(True):
        bits = np.asarray(_bits(words, np.array(sample_indices), np.array(positions), jnp.zeros(num_tokens)))
    return -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))


def draw(x: np.ndarray, params: SamplingParams, gumbel: np.ndarray) -> tuple[int, bool]:
    """The token, and whether it is clear: by more than 1e-3, wherever within 1e-5 the borders of the cut lie."""
    if params.temperature < 1e-5:
        second, first = np.partition(x, -2)[-2:]
        return int(np.argmax(x)), bool(first - second > 1e-3)
    perturbed = x / params.temperature + gumbel
    winners = []
    for slack in (0.0, 1e-5, -1e-5):
        candidates = np.where(kept(x, params, slack), perturbed, -np.inf)
        winners.append(int(np.argmax(candidates)))
        second, first = np.partition(candidates, -2)[-2:]
        if not first - second > 1e-3:
            return winners[0], False
    return winners[0], len(set(winners)) == 1
