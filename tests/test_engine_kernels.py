"""The engine's whole step through the interpreted Pallas kernels: its tokens are those of the dense forward pass.

Prompts of several lengths are prefilled in chunks beside rows that decode, in a pool so short that a row is preempted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import interpreted
import jax
import jax.numpy as jnp
import mock_engine
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels
from pagedjax import LLM, Decoder, ModelConfig, SamplingParams

CONFIG = ModelConfig("llama", 96, 64, 64, 2, 4, 2, 64, 64)
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 8,
    "num_blocks": 6,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 12,
    "batch_invariant": True,  # one size of step
}
PROMPTS = [np.random.default_rng(i).integers(0, 96, n).tolist() for i, n in enumerate((14, 7, 8))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def model(dtype: str) -> Decoder:
    return Decoder(CONFIG, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


def dense_logprobs(dtype: str, tokens: list[list[int]]) -> np.ndarray:
    """f64[rows, max_model_len, vocabulary] after each token, by the forward pass for training: no pool, no steps."""
    padded = np.zeros((len(tokens), OPTIONS["max_model_len"]), np.int32)
    for line, row in zip(padded, tokens, strict=True):
        line[: len(row)] = row
    logits = nnx.jit(lambda model, ids: model(ids))(model(dtype), jnp.asarray(padded))
    return np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)), np.float64)


def check_engine(kernel: str, dtype: str, tolerance: float, decode_steps: int) -> None:
    """Each token is the most likely one, where rounding leaves no doubt, and its logprob is right."""
    llm = LLM(model(dtype), **OPTIONS, decode_steps=decode_steps, attention=kernel)
    outputs = mock_engine.generate(llm, PROMPTS, PARAMS)
    interpreted.assert_no_race(kernel)
    assert llm.stats().num_preemptions > 0
    llm.audit()
    generated = [mock_engine.ids(output) for output in outputs]
    expected = dense_logprobs(dtype, [prompt + ids for prompt, ids in zip(PROMPTS, generated, strict=True)])
    for prompt, ids, output, lines in zip(PROMPTS, generated, outputs, expected, strict=True):
        assert len(ids) == PARAMS.max_tokens
        lines = lines[len(prompt) - 1 :][: len(ids)]
        of_tokens = lines[np.arange(len(ids)), ids]
        assert (of_tokens > lines.max(1) - tolerance).all()
        found = [entry[token] for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        np.testing.assert_allclose(found, of_tokens, rtol=0, atol=tolerance)


@pytest.mark.parametrize("decode_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_through_the_tpu_kernels(decode_steps: int) -> None:
    with pltpu.force_tpu_interpret_mode(interpreted.PARAMS["tpu"]):
        check_engine("tpu", "float32", 1e-4, decode_steps)


@pytest.mark.slow
def test_through_the_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have a form of their own for the interpreter, and the engine has no option that asks for it."""
    attend: Callable[..., Any] = pallas_kernels.paged_attention

    def interpret(*arguments: Any, **options: Any) -> Any:
        return attend(*arguments, **options, interpret=interpreted.PARAMS["gpu"])

    monkeypatch.setattr(pallas_kernels, "paged_attention", interpret)
    check_engine("gpu", "bfloat16", 5e-2, decode_steps=2)
