"""Tiny models for engines on a mesh, and what they should say: the dense forward of the same module on one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pagedjax import Decoder, ModelConfig, RequestOutput, SamplingParams

MAX_MODEL_LEN = 64
CLEAR = 1e-3  # a margin that rounding does not reach

# 8 and 4 heads: divided over 2 and 4 devices, over 8 two of them hold each KV head. 9 and 3 divide over none of these.
MODELS = {
    "llama": ModelConfig("llama", 96, 64, 128, 2, 8, 4, 16, MAX_MODEL_LEN, qkv_bias=True),
    "qwen3": ModelConfig("qwen3", 96, 64, 128, 2, 8, 2, 16, MAX_MODEL_LEN, qk_norm=True, tie_word_embeddings=True),
    "nine": ModelConfig("llama", 96, 72, 128, 2, 9, 3, 8, MAX_MODEL_LEN, tie_word_embeddings=True),
}
# One size of step, so two programs an engine; and a pool beside which a step's temporaries are small.
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 4,
    "num_blocks": 600,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "batch_invariant": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)

_SHARED = range(20, 31)
PROMPTS = [[*_SHARED, 1], [*_SHARED, 2, 3], [5, 6, 7], [*range(40, 62)], [*_SHARED, 1]]


def split(name: str, seed: int = 0) -> tuple[Any, Any]:
    """The model's graph and its parameters, whose biases are not the zeros they start as."""
    graphdef, params = nnx.split(Decoder(MODELS[name], rngs=nnx.Rngs(seed)))
    noise = np.random.default_rng(seed)
    return graphdef, jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape, np.float32), params)


def assert_right(name: str, params: Any, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        (sample,) = output.outputs
        assert_most_likely(name, params, output.prompt_token_ids, sample.token_ids, sample.cumulative_logprob)


def assert_most_likely(name: str, params: Any, prompt: list[int], token_ids: list[int], logprob: float | None) -> None:
    """Greedy tokens are the most likely ones wherever that is clear, and `logprob` is the sum of theirs."""
    tokens = prompt + token_ids
    padded = np.zeros((1, MAX_MODEL_LEN), np.int32)
    padded[0, : len(tokens)] = tokens
    logprobs = np.asarray(_dense(MODELS[name], params, padded))[len(prompt) - 1 : len(tokens) - 1]
    best = np.sort(logprobs)[:, ::-1]
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert clear.sum() >= len(token_ids) - 1 > 0
    np.testing.assert_array_equal(np.array(token_ids)[clear], logprobs.argmax(1)[clear])
    np.testing.assert_allclose(logprob, logprobs[np.arange(len(token_ids)), token_ids].sum(), rtol=0, atol=1e-3)


@functools.partial(jax.jit, static_argnums=0)
def _dense(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    graphdef, _ = nnx.split(Decoder.abstract(config))
    return jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens))[0]


def sampled(n: int = 1) -> SamplingParams:
    return dataclasses.replace(GREEDY, temperature=1.0, seed=7, n=n, top_k=20)
