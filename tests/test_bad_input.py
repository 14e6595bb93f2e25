"""Requests and options that cannot be served: each has its own message, and the next request is fine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mock_engine
import mock_model
import numpy as np
import pytest
from mock_model import VOCAB, Oracle

from pagedjax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture
def llm() -> Iterator[LLM]:
    """The shared engine; afterwards it still serves."""
    llm = mock_engine.engine()
    yield llm
    assert not llm.has_unfinished_requests()
    (output,) = llm.generate([1, 2], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == Oracle([1, 2], GREEDY).generate()
    llm.audit()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "a text prompt needs a tokenizer"),
        ([[1], []], {}, "prompt 1: the prompt is an empty list of token ids"),
        ([[]], {}, "prompt 0: the prompt is an empty list of token ids"),
        ([VOCAB], {}, f"token id {VOCAB} of the prompt is outside the vocabulary; ids go from 0 to {VOCAB - 1}"),
        ([1, -1], {}, "token id -1 of the prompt is outside the vocabulary"),
        ([2**63], {}, f"token id {2**63} of the prompt is outside the vocabulary"),
        ([1.5], {}, "must be integers"),
        ([1], {"logit_bias": {VOCAB: 5}}, f"logit_bias has token id {VOCAB}, the vocabulary has {VOCAB} tokens"),
        ([1], {"stop_token_ids": [VOCAB]}, f"stop_token_ids has token id {VOCAB}"),
        ([1], {"stop": "x"}, "needs a tokenizer"),
        ([1] * 48, {}, "the prompt has 48 tokens, which leaves no room to generate within max_model_len=48"),
        ([1] * 49, {}, "the prompt has 49 tokens"),
        ([1] * 39, {}, r"39 prompt tokens \+ 9 to generate need 24 blocks of 2 .*19 usable ones \(38 tokens\)"),
        ([1] * 20, {"max_tokens": 20}, r"20 prompt tokens \+ 20 to generate need 20 blocks .*lower max_tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_requests(llm: LLM, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, SamplingParams(**options), use_tqdm=False)
    if not (prompt and isinstance(prompt[0], list)):
        with pytest.raises(ValueError, match=message):
            llm.add_request("a", prompt, SamplingParams(**options))


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, None])
def test_max_tokens(llm: LLM, max_tokens: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens is"):
        llm.generate([1], SamplingParams(max_tokens=max_tokens), use_tqdm=False)


def test_as_many_stop_ids_as_fit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=list(range(32)), max_tokens=3)
    assert llm.generate([1], params, use_tqdm=False)[0].outputs[0].finish_reason == "stop"
    with monkeypatch.context() as patch:
        patch.setattr(llm._maker, "end_ids", frozenset({32}))
        with pytest.raises(
            ValueError, match="32 stop_token_ids and the model's end tokens are 33 ids, and a row holds 32"
        ):
            llm.generate([1], params, use_tqdm=False)


def test_numpy_prompts(llm: LLM) -> None:
    outputs = llm.generate(np.array([[1, 2], [3, 4]], np.uint8), GREEDY, use_tqdm=False)
    for prompt, output in zip(([1, 2], [3, 4]), outputs, strict=True):
        assert output.outputs[0].token_ids == Oracle(prompt, GREEDY).generate()


def test_parameters_for_another_number_of_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params is a dict"):
        llm.add_request("a", [1], {"max_tokens": 3})  # type: ignore[arg-type]


def test_text_needs_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="stream yields text, which needs a tokenizer"):
        llm.stream([1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, r"unknown engine options \['max_num_seq'\]"),
        ({"block_size": 0}, "block_size=0 is too small"),
        ({"num_blocks": 1}, "num_blocks=1 is too small; it must be at least 2"),
        ({"max_model_len": 1}, "max_model_len=1 is too small"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens=2.5 is not an integer"),
        ({"decode_steps": True}, "decode_steps=True is not an integer"),
        ({"num_blocks": 8, "kv_cache_memory_bytes": 1000}, "both size the pool"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 100}, "100 bytes hold 0 KV blocks of 256 bytes"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"watermark": float("nan")}, "watermark=nan"),
        ({"memory_utilization": 0.0}, "memory_utilization=0.0"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3' is not one of"),
        ({"attention": "fast"}, "attention='fast' is not one of"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "does not fit 63 bits"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_engine_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | options)


def test_the_models_own_length_is_the_limit() -> None:
    llm = LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | {"max_model_len": 1000})
    with pytest.raises(ValueError, match=f"max_model_len={mock_model.MAX_MODEL_LEN}"):
        llm.add_request("a", [1] * mock_model.MAX_MODEL_LEN)
