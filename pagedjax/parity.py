"""Whether the engine and the dense training forward say the same: log-probabilities, token by token.

The engine comes by a log-probability in two ways. Of a known token it is computed with the tokens before it, in chunks
of a prompt; of a drawn token, decoding one step at a time over K/V that the prefix cache may have had. A text is
compared in both, a rollout as it was drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.params import place_params
from pagedjax.prompts import parse_prompts
from pagedjax.rollout import Rollout, own_logprobs
from pagedjax.sampling_params import SamplingParams
from pagedjax.tensor_parallel import tensor_parallel

NUM_DRAWN = 16  # tokens that are drawn in place of a text's last ones; of a shorter text, all but its first
_PERCENTILES = (0, 1, 50, 99, 100)


@dataclasses.dataclass(frozen=True)
class Parity:
    """Engine minus dense forward; `print` it.

    Attributes:
        differences: f32[N], of the log-probability of each token: of every text's but its first, text after text, then
            of those that were drawn.
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


class _Said(NamedTuple):
    """What the engine has said of a sequence."""

    tokens: list[int]
    logprobs: list[float]  # of the last so many tokens


def check_parity(llm: LLM, params: Any, texts: Rollout | Sequence[Any]) -> Parity:
    """Compares the engine with the dense forward of the same module.

    The engine computes a text twice: wholly, and once more up to its last `NUM_DRAWN` tokens, with whatever its prefix
    cache holds, to draw as many from there. Both run as requests do. Of a rollout nothing is computed again: its tokens
    have the log-probabilities that they were drawn with, in whatever chunks, with whatever hits and preemptions.

    Args:
        llm: the engine.
        params: the trainer's parameters, which should be the engine's, and those that a rollout was drawn with; as for
            `LLM.update_params`.
        texts: texts or lists of token ids, each of two tokens at least and `max_model_len` at most; or what
            `LLM.rollout` gives, or a list of RequestOutputs with logprobs.

    Raises:
        ValueError: a text does not fit the engine, or there is nothing to compare.
    """
    parallel = tensor_parallel(llm.config.mesh, llm.model_config)
    params = place_params(params, llm.params, None if parallel is None else parallel.param_sharding)
    given = texts.outputs if isinstance(texts, Rollout) else texts
    if isinstance(given, list | tuple) and given and all(isinstance(each, RequestOutput) for each in given):
        said = _drawn(given)
    else:
        said = _computed(llm, [prompt.token_ids for prompt in parse_prompts(given, llm.tokenizer)])

    def compare(params: Any) -> list[np.ndarray]:
        return [np.asarray(each.logprobs, np.float32) - _dense_logprobs(llm, params, each) for each in said]

    differences = compare(params) if parallel is None else parallel.apply(compare, params)
    return Parity(np.concatenate(differences) if differences else np.zeros(0, np.float32))


def _computed(llm: LLM, texts: list[list[int]]) -> list[_Said]:
    """Of all tokens of texts but the first, and of those that the engine draws in place of the last ones."""
    for tokens in texts:
        if len(tokens) < 2:
            raise ValueError(f"a text has {len(tokens)} token, and the first has no log-probability; give longer ones")
    scores = dict(llm.score_many([tokens[:1] for tokens in texts], [[tokens[1:]] for tokens in texts]))
    known = [_Said(tokens, scores[index][0].token_logprobs) for index, tokens in enumerate(texts)]
    nums_drawn = [min(NUM_DRAWN, len(tokens) - 1) for tokens in texts]
    asked = [SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True, logprobs=0) for num in nums_drawn]
    heads = [tokens[:-num] for tokens, num in zip(texts, nums_drawn, strict=True)]
    return known + _drawn(llm.generate(heads, asked, use_tqdm=False))


def _drawn(outputs: Sequence[RequestOutput]) -> list[_Said]:
    return [
        _Said(output.prompt_token_ids + sample.token_ids, own_logprobs(sample))
        for output in outputs
        for sample in output.outputs
    ]


def _dense_logprobs(llm: LLM, params: Any, said: _Said) -> np.ndarray:
    """f32[len(said.logprobs)], of the same tokens."""
    tokens, length = said.tokens, len(said.tokens)
    places = min(1 << (length - 1).bit_length(), llm.model_config.max_position_embeddings)  # few, so few programs
    padded = np.zeros((1, places), np.int32)
    padded[0, :length] = tokens
    logprobs = _next_logprobs(llm.graphdef, params, padded, llm.num_vocab_tokens)
    return np.asarray(logprobs)[length - 1 - len(said.logprobs) : length - 1]


def _forward(graphdef: Any, params: Any, tokens: jax.Array, num_vocab_tokens: int) -> jax.Array:
    logits = nnx.merge(graphdef, params)(tokens)[0, :-1, :num_vocab_tokens].astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, 1:, None], axis=-1)[:, 0]


_next_logprobs = jax.jit(_forward, static_argnums=(0, 3))
