"""The compiled step: the KV pool is updated in place, and the set of programs is closed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams
from pagedjax.step import step

CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=30,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    return LLM(model, num_blocks=600, block_size=16, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128)


def test_the_pool_is_updated_in_place(llm: LLM) -> None:
    """30 layers, and inner steps in a loop around them: what a step needs beside its arguments holds no second pool."""
    runner = llm._runner
    pool_bytes = runner.state.kv_pages.nbytes
    assert pool_bytes > 60e6
    for places, proposals in ((1, 0), (16, 0), (12, 2)):
        options: dict[str, Any] = {"max_steps": 8, "num_vocab_tokens": 96, "implementation": None}
        options |= {"num_tokens": places, "max_proposals": proposals}

        def run(params: Any, state: Any, *counts: jax.Array, options: dict[str, Any] = options) -> Any:
            return step(nnx.merge(runner.graphdef, params), state, *counts, **options)

        jitted = jax.jit(run, donate_argnums=(1,))
        counts = (np.zeros(4, np.int32), np.int32(1), np.int32(proposals))
        compiled = jitted.lower(runner.params, runner.state, *counts).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 10
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < pool_bytes / 100


def test_mixed_work_compiles_only_what_the_plan_lists(llm: LLM, compiled: list[float]) -> None:
    """100 requests with every option, and not one compilation by jax outside the listed programs."""
    rng = np.random.default_rng(0)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 1.2, "top_k": 5, "repetition_penalty": 1.2},
        {"logprobs": 3, "prompt_logprobs": 2, "min_p": 0.1},
        {"logit_bias": {3: 2.0}, "stop_token_ids": [5, 6], "min_tokens": 2, "n": 2},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    ]
    assert set(llm.plan.programs) == {"rows", "defragment", "step[1]", "step[4]", "step[16]"}
    llm.warmup()
    prompts = [rng.integers(0, 96, rng.integers(1, 60)).tolist() for _ in range(100)]
    params = [
        SamplingParams(max_tokens=int(rng.integers(1, 12)), **{"min_tokens": 0, **options[i % len(options)]})
        if i % len(options) != 4
        else SamplingParams(max_tokens=9, **options[4])
        for i in range(100)
    ]
    compiled.clear()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))  # the counter counts
    assert len(compiled) == 1
    assert len(outputs) == 100
    assert llm.stats().num_compiled_programs == len(llm.plan.programs)
    llm.audit()


def test_a_step_for_nobody_changes_nothing(llm: LLM) -> None:
    before = jax.tree.map(np.asarray, llm._runner.state.table)
    assert llm.step() == []
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(llm._runner.state.table), strict=True):
        np.testing.assert_array_equal(old, new)
