"""New weights in a running engine with a warm cache, against the dense forward with the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import mock_engine
import numpy as np
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams

CONFIG = ModelConfig("llama", 96, 32, 64, 2, 4, 2, 16, 64)
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
NUM_UPDATES = 20


def test_twenty_updates_with_a_warm_cache() -> None:
    """As a trainer makes them: generate, change every weight, generate. The prompts share a prefix, and repeat."""
    graphdef, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    llm = LLM(
        nnx.merge(graphdef, params),
        max_model_len=64,
        block_size=4,
        num_blocks=60,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        batch_invariant=True,
    )
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 96, 20).tolist()
    prompts = [shared + rng.integers(0, 96, length).tolist() for length in (1, 4, 9)]
    no_prompt_logprobs = dataclasses.replace(PARAMS, prompt_logprobs=None)

    @jax.jit
    def dense(params: Any, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens))

    differences: list[float] = []
    for _ in range(NUM_UPDATES):
        noise = [rng.normal(size=leaf.shape) for leaf in jax.tree.leaves(params)]
        noise = jax.tree.unflatten(jax.tree.structure(params), noise)
        params = jax.tree.map(lambda leaf, step: leaf + 0.05 * jnp.std(leaf) * step.astype(leaf.dtype), params, noise)
        llm.update_params(params)
        cold = mock_engine.generate(llm, prompts, PARAMS)
        warm = mock_engine.generate(llm, prompts, no_prompt_logprobs)
        assert all(output.num_cached_tokens >= 20 for output in warm)
        for output, again in zip(cold, warm, strict=True):
            (sample,), (repeated,) = output.outputs, again.outputs
            assert sample.token_ids == repeated.token_ids
            tokens = output.prompt_token_ids + sample.token_ids
            padded = np.zeros((1, 40), np.int32)
            padded[0, : len(tokens)] = tokens
            expected = np.asarray(dense(params, padded))[0, range(len(tokens) - 1), tokens[1:]]
            assert output.prompt_logprobs is not None
            assert sample.logprobs is not None
            assert repeated.logprobs is not None
            entries = [*output.prompt_logprobs[1:], *sample.logprobs]
            found = np.array([entry[token] for entry, token in zip(entries, tokens[1:], strict=True) if entry])
            found_warm = [entry[token] for entry, token in zip(repeated.logprobs, sample.token_ids, strict=True)]
            differences += np.abs(found - expected).tolist()
            differences += np.abs(np.array(found_warm) - expected[-len(found_warm) :]).tolist()
    assert np.mean(differences) < 1e-4
    llm.audit()
