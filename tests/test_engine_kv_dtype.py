"""The engine on quantised pools: the same schedule and the same tokens, more of them in the same memory."""

from __future__ import annotations

from typing import Any

import mock_engine
import mock_model
import numpy as np
import pytest
from flax import nnx
from mock_engine import GREEDY, SEEDED, generate, ids
from mock_model import Oracle

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams

STORED = {"int8": "int8", "fp8": "float8_e4m3fn"}
PROMPTS = ([7], [1, 2, 3], [4] * 10, [9, 8, 7, 6, 5])

quantised = pytest.mark.parametrize("kv_cache_dtype", list(STORED))


@quantised
def test_tokens_are_the_oracles_also_after_preemption(kv_cache_dtype: str) -> None:
    """The mock's K and V are constant over a vector, which a quantised pool keeps exactly."""
    llm = mock_engine.engine(kv_cache_dtype=kv_cache_dtype)
    assert llm._runner.state.kv_pages.is_quantised
    for prompt, output in zip(PROMPTS, generate(llm, list(PROMPTS)), strict=True):
        assert ids(output) == Oracle(prompt, GREEDY).generate()
    before = llm.stats().num_preemptions
    prompts = [[i, i + 1, i + 2] * 2 for i in range(6)]  # 6 rows of 22 tokens; the pool holds 38
    for prompt, output in zip(prompts, generate(llm, prompts, SEEDED), strict=True):
        assert ids(output) == Oracle(prompt, SEEDED).generate()
    assert llm.stats().num_preemptions > before
    llm.audit()


@quantised
def test_the_memory_holds_more_blocks_and_the_scales_count(kv_cache_dtype: str) -> None:
    # A token: 2 layers, K and V, one head of 8 values and a scale of 4 bytes. A block: 2 tokens.
    options: dict[str, Any] = {"num_blocks": None, "kv_cache_memory_bytes": 5000}
    plain = LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | options)
    small = LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | options, kv_cache_dtype=kv_cache_dtype)
    assert (plain.plan.block_bytes, plain.plan.num_blocks) == (2 * 2 * 2 * 8 * 4, 19)
    assert (small.plan.block_bytes, small.plan.num_blocks) == (2 * 2 * 2 * (8 + 4), 52)
    for llm in (plain, small):
        assert llm.plan.pool_bytes == llm._runner.state.kv_pages.nbytes <= 5000


@pytest.mark.parametrize(("option", "stored"), [("auto", "float32"), ("bfloat16", "bfloat16"), *STORED.items()])
def test_the_plan_names_what_the_pool_stores(option: str, stored: str) -> None:
    llm = LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS, kv_cache_dtype=option)
    assert llm.plan.kv_cache_dtype == stored == llm._runner.state.kv_pages.dtype.name
    assert f"KiB each, {stored})" in str(llm.plan)


@pytest.mark.slow
def test_a_decoders_logprobs_are_close_to_those_of_a_float32_pool() -> None:
    config = ModelConfig("llama", 96, 32, 64, 2, 4, 2, 16, 64)
    model = Decoder(config, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, 96, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    found = {}
    for kv_cache_dtype in ("float32", "int8"):
        sizes: dict[str, Any] = {"max_model_len": 64, "block_size": 8, "num_blocks": 12, "max_num_seqs": 2}
        llm = LLM(
            model,
            **sizes,
            max_num_batched_tokens=16,
            batch_invariant=True,
            decode_steps=2,
            kv_cache_dtype=kv_cache_dtype,
        )
        (output,) = generate(llm, [prompt], params)
        assert output.prompt_logprobs is not None
        entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found[kv_cache_dtype] = np.array([entry[token] for entry, token in entries if entry is not None])
    difference = np.abs(found["int8"] - found["float32"])
    assert 0 < difference.max() < 0.02
