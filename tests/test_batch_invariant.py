"""batch_invariant=True: a request's logprobs are the same bits however the engine came to compute them.

The reference is the request alone in a fresh engine with the same programs: its prompt in one piece, then a token a
step. A small transformer with grouped heads and a sliding window in one of its layers; float32.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import mock_engine
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, RequestOutput, SamplingParams

VOCAB = 96
CONFIG = dataclasses.replace(ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 16, 64), sliding_windows=(8, None))
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 4,
    "num_blocks": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "decode_steps": 4,
    "batch_invariant": True,
}
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(VOCAB) for _ in range(length)] for length in (1, 3, 8, 17, 24, 30)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(Decoder(CONFIG, rngs=nnx.Rngs(0)), **OPTIONS)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """Each prompt by itself, on an empty cache, in pieces as large as can be."""
    mock_engine.pace(llm, decode_steps=1)
    outputs = []
    for prompt in PROMPTS:
        llm.update_params(llm._runner.params)
        outputs += mock_engine.generate(llm, prompt, PARAMS)
    mock_engine.pace(llm)
    return outputs


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for a, b in zip(found, expected, strict=True):
        for sample in a.outputs:
            assert sample.token_ids == b.outputs[0].token_ids
            assert sample.logprobs == b.outputs[0].logprobs  # bit for bit


@pytest.mark.parametrize("budget", [4, 5, 11, 24])
def test_chunks_and_company(llm: LLM, alone: list[RequestOutput], budget: int) -> None:
    """All together, in small pieces; rows of one token beside chunks."""
    llm.update_params(llm._runner.params)
    mock_engine.pace(llm, budget=budget)
    assert_same(mock_engine.generate(llm, PROMPTS, PARAMS), alone)
    mock_engine.pace(llm)


def test_cached(llm: LLM, alone: list[RequestOutput]) -> None:
    mock_engine.generate(llm, PROMPTS, PARAMS)
    outputs = mock_engine.generate(llm, PROMPTS, PARAMS)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 4, 16, 20, 28]
    assert_same(outputs, alone)


def test_forked(llm: LLM, alone: list[RequestOutput]) -> None:
    """More greedy samples than rows: all are the same."""
    params = dataclasses.replace(PARAMS, n=6)
    assert_same([mock_engine.generate(llm, prompt, params)[0] for prompt in PROMPTS], alone)


def test_preempted(llm: LLM, alone: list[RequestOutput]) -> None:
    """Thrown out every few steps, and computed again: with the cache, and without it."""
    for forget in (False, True):
        for index, prompt in enumerate(PROMPTS):
            llm.add_request(str(index), prompt, PARAMS)
        outputs: dict[str, RequestOutput] = {}
        mock_engine.pace(llm, decode_steps=1)
        while llm.has_unfinished_requests():
            for _ in range(8 if forget else 3):
                outputs |= {output.request_id: output for output in llm.step()}
            llm._engine.scheduler.preempt_all("weights")
            if forget:
                llm._engine.scheduler.change_weights(recompute=False)
        mock_engine.pace(llm)
        assert_same([outputs[str(index)] for index in range(len(PROMPTS))], alone)


def test_moved(llm: LLM, alone: list[RequestOutput]) -> None:
    for index, prompt in enumerate(PROMPTS):
        llm.add_request(str(index), prompt, PARAMS)
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
        llm.defragment()
    assert_same([outputs[str(index)] for index in range(len(PROMPTS))], alone)


def test_scored(llm: LLM, alone: list[RequestOutput]) -> None:
    """The logprobs of what was generated are those it was drawn with."""
    for prompt, output in zip(PROMPTS, alone, strict=True):
        (sample,) = output.outputs
        assert sample.logprobs is not None
        scores = llm.score(prompt, [sample.token_ids, sample.token_ids[:3]])
        drawn = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert scores[0].token_logprobs == drawn
        assert scores[1].token_logprobs == drawn[:3]
        assert scores[0].is_greedy


def test_with_proposals(alone: list[RequestOutput]) -> None:
    llm = LLM(Decoder(CONFIG, rngs=nnx.Rngs(0)), **OPTIONS | {"num_speculative_tokens": 3})
    outputs = mock_engine.generate(llm, PROMPTS, PARAMS)
    assert llm.stats().num_proposed_tokens > 0
    assert_same(outputs, alone)
