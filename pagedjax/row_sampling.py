"""Sampling parameters as the device sees them: one line of arrays per sample row.

Every request has the same shapes whatever it asks for, so options never make a new program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SEED_LIMIT, SamplingParams

# Dimensions: S sample rows, T = MAX_STOP_IDS, B = MAX_LOGIT_BIAS.

NO_TOKEN = np.iinfo(np.int32).max  # pads lists of token ids; outside every vocabulary, so that scatters drop it
NO_LOGPROBS = -1  # num_logprobs of a row that wants none
_FLOAT32 = np.finfo(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """How each sample row's token is drawn. `zeros` gives rows that take the most likely token."""

    temperature: jax.Array  # f32[S]; 0 is greedy
    top_p: jax.Array  # f32[S]; 1 is off
    top_k: jax.Array  # i32[S]; 0 is off
    min_p: jax.Array  # f32[S]; 0 is off
    repetition_penalty: jax.Array  # f32[S]; 1 is off
    presence_penalty: jax.Array  # f32[S]
    frequency_penalty: jax.Array  # f32[S]
    seed: jax.Array  # u32[S, 2]; high word, low word
    sample_index: jax.Array  # i32[S]; which of the request's n completions
    min_tokens: jax.Array  # i32[S]; stop ids are masked before this many outputs
    stop_ids: jax.Array  # i32[S, T]; padded with NO_TOKEN
    bias_ids: jax.Array  # i32[S, B]; padded with NO_TOKEN
    bias_values: jax.Array  # f32[S, B]
    num_logprobs: jax.Array  # i32[S]; NO_LOGPROBS, or how many alternatives
    sampled_logprobs: jax.Array  # bool[S]; whether the draw's own log-probability is wanted

    @classmethod
    def zeros(cls, num_rows: int) -> RowSampling:
        """Rows that ask for nothing: greedy, no penalties, no log-probabilities.

        Args:
            num_rows: S.
        """
        return jax.tree.map(lambda leaf: jnp.asarray(np.broadcast_to(leaf, (num_rows, *leaf.shape))), _neutral())

    def gather(self, rows: jax.Array) -> RowSampling:
        """The lines of the given rows, many to one allowed.

        Args:
            rows: i32[N], in range.

        Returns:
            RowSampling of N lines.
        """
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), self)

    def keep(self, lines: jax.Array) -> RowSampling:
        """The given lines, and neutral ones (see `zeros`) in the place of the others: they cost no draw.

        Args:
            lines: bool[S].
        """

        def choose(leaf: jax.Array, neutral: np.ndarray) -> jax.Array:
            return jnp.where(lines.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, neutral)

        return jax.tree.map(choose, self, _neutral())


def row_values(params: SamplingParams, *, seed: int, sample_index: int, stop_ids: Sequence[int]) -> RowSampling:
    """One row's values, on the host.

    Args:
        params: The request's parameters; its `seed` and `stop_token_ids` are not read here.
        seed: The seed in force, 0 .. 2**63 - 1 (the engine's choice where the request gave none).
        sample_index: Which of the request's n completions.
        stop_ids: Every id that ends the row: `stop_token_ids` united with the end-of-sequence ids in force.

    Returns:
        RowSampling with numpy leaves and no row axis: scalars, [2], [T], [B].

    Raises:
        ValueError: The seed is out of range, or there are more than MAX_STOP_IDS stop ids.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed is {seed}; give an integer from 0 to {SEED_LIMIT - 1}")
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"{len(stop_ids)} stop ids (stop_token_ids and end-of-sequence ids together), at most {MAX_STOP_IDS} fit; "
            "remove some stop_token_ids"
        )
    bias = params.logit_bias or {}
    values: dict[str, Any] = {
        "temperature": _float32(params.temperature),
        "top_p": _float32(params.top_p),
        "top_k": np.int32(min(params.top_k, NO_TOKEN)),
        "min_p": _float32(params.min_p),
        "repetition_penalty": _float32(max(params.repetition_penalty, float(_FLOAT32.tiny))),
        "presence_penalty": _float32(params.presence_penalty),
        "frequency_penalty": _float32(params.frequency_penalty),
        "seed": np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        "sample_index": np.int32(sample_index),
        "min_tokens": np.int32(min(params.min_tokens, NO_TOKEN)),
        "stop_ids": _padded(stop_ids, MAX_STOP_IDS, NO_TOKEN, np.int32),
        "bias_ids": _padded(list(bias), MAX_LOGIT_BIAS, NO_TOKEN, np.int32),
        "bias_values": _padded([_float32(value) for value in bias.values()], MAX_LOGIT_BIAS, 0, np.float32),
        "num_logprobs": np.int32(NO_LOGPROBS if params.logprobs is None else params.logprobs),
        "sampled_logprobs": np.bool_(params.sampled_logprobs),
    }
    return RowSampling(**values)


def _neutral() -> RowSampling:
    return row_values(SamplingParams(temperature=0.0), seed=0, sample_index=0, stop_ids=())


def _float32(value: float) -> np.float32:
    return np.float32(min(max(value, float(_FLOAT32.min)), float(_FLOAT32.max)))


def _padded(values: Sequence, length: int, fill: int, dtype: type) -> np.ndarray:
    padded: np.ndarray = np.full(length, fill, dtype)
    padded[: len(values)] = values
    return padded
