"""Whether the engine and the dense training forward say the same: log-probabilities of given texts, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.llm import LLM
from pagedjax.params import place_params
from pagedjax.sampling_params import SamplingParams

_PERCENTILES = (0, 1, 50, 99, 100)


@dataclasses.dataclass(frozen=True)
class Parity:
    """Engine minus dense forward; `print` it.

    Attributes:
        differences: f32[N], of the log-probability of each token but a text's first, text after text.
    """

    differences: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.differences)

    @property
    def max_difference(self) -> float:
        return float(np.abs(self.differences).max(initial=0.0))

    @property
    def mean_difference(self) -> float:
        """Mean of the absolute differences."""
        return float(np.abs(self.differences).mean()) if self.num_tokens else 0.0

    @property
    def ratios(self) -> dict[int, float]:
        """Importance ratios exp(dense - engine), by percentile: 1 for a trainer that agrees with its sampler."""
        if not self.num_tokens:
            return {}
        return dict(zip(_PERCENTILES, np.percentile(np.exp(-self.differences), _PERCENTILES).tolist(), strict=True))

    def __str__(self) -> str:
        ratios = ", ".join(f"p{percent} {value:.6f}" for percent, value in self.ratios.items())
        return (
            f"{self.num_tokens} tokens: |difference of logprobs| max {self.max_difference:.2e}, mean "
            f"{self.mean_difference:.2e}; importance ratios {ratios}"
        )


def check_parity(llm: LLM, params: Any, texts: Sequence[Any]) -> Parity:
    """Compares the engine with the dense forward of the same module.

    The engine computes the texts as it would a prompt, with whatever its cache holds.

    Args:
        llm: the engine.
        params: the trainer's parameters, which should be the engine's; as for `LLM.update_params`.
        texts: texts or lists of token ids, each of two tokens at least.

    Raises:
        ValueError: a text does not fit the engine, or has nothing to compare.
    """
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    differences: list[np.ndarray] = []
    params = place_params(params, llm.params)
    for output in llm.generate(list(texts), asked, use_tqdm=False):
        tokens = output.prompt_token_ids
        if len(tokens) < 2:
            raise ValueError(f"a text has {len(tokens)} token, and the first has no log-probability; give longer ones")
        entries = output.prompt_logprobs
        assert entries is not None
        engine = [entry[token] for token, entry in zip(tokens[1:], entries[1:], strict=True) if entry is not None]
        differences.append(np.asarray(engine, np.float32) - _dense_logprobs(llm, params, tokens))
    return Parity(np.concatenate(differences) if differences else np.zeros(0, np.float32))


def _dense_logprobs(llm: LLM, params: Any, tokens: list[int]) -> np.ndarray:
    """f32[T - 1], of each token after the first."""
    padded = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)  # few lengths, so few programs
    padded[0, : len(tokens)] = tokens
    logprobs = _next_logprobs(llm.graphdef, params, padded, llm.num_vocab_tokens)
    return np.asarray(logprobs)[: len(tokens) - 1]


def _forward(graphdef: Any, params: Any, tokens: jax.Array, num_vocab_tokens: int) -> jax.Array:
    logits = nnx.merge(graphdef, params)(tokens)[0, :-1, :num_vocab_tokens].astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, 1:, None], axis=-1)[:, 0]


_next_logprobs = jax.jit(_forward, static_argnums=(0, 3))
