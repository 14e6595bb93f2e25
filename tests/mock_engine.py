"""Engines around the mock model, a tokenizer whose texts a test chooses, and the short forms that tests share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from mock_model import MAX_MODEL_LEN, VOCAB, MockDecoder

from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.text import as_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=16)

# One place count, so two programs: most tests share the engine that these make. The pool is short for its rows.
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 2,
    "num_blocks": 20,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "decode_steps": 8,
    "batch_invariant": True,
}


@functools.cache
def engine(**options: Any) -> LLM:
    """An engine around the mock, made once for all tests that ask for the same options: compiling takes the time."""
    return LLM(MockDecoder(), **OPTIONS | options)


def pace(llm: LLM, *, budget: int | None = None, decode_steps: int | None = None) -> None:
    """Makes an engine plan with fewer tokens or inner steps than it is compiled for; without numbers, as it was."""
    scheduler, config = llm._engine.scheduler, llm.config
    scheduler.max_num_batched_tokens = config.max_num_batched_tokens if budget is None else budget
    scheduler.max_running = min(config.max_num_seqs, scheduler.max_num_batched_tokens)
    scheduler.decode_steps = config.decode_steps if decode_steps is None else decode_steps


def idle() -> Iterator[LLM]:
    """The shared engine, idle before and after a test, and with nothing cached at first."""
    llm = engine()
    llm.audit()
    llm.update_params(llm._runner.params)
    yield llm
    pace(llm)
    finish(llm)
    llm.audit()


def finish(llm: LLM) -> dict[str, RequestOutput]:
    """Steps to the end; each request's last output."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(500):
        if not llm.has_unfinished_requests():
            return outputs
        outputs |= {output.request_id: output for output in llm.step()}
    raise AssertionError("no end in sight")


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


class Pieces:
    """A tokenizer in which each id is a piece of text; raises at the ids in `broken`."""

    def __init__(self, pieces: dict[int, str] | None = None, broken: Sequence[int] = (), special: Sequence[int] = ()):
        self.pieces = {i: chr(ord("a") + i % 26) for i in range(VOCAB)} | (pieces or {})
        self.broken, self.special_ids = broken, special

    def encode(self, text: str) -> list[int]:
        return [ord(char) - ord("a") for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        if any(token in self.broken for token in token_ids):
            raise LookupError("no text for this id")
        return "".join(self.pieces[token] for token in token_ids)


def use_tokenizer(monkeypatch: pytest.MonkeyPatch, llm: LLM, tokenizer: Pieces) -> None:
    adapted = as_tokenizer(tokenizer)
    monkeypatch.setattr(llm, "tokenizer", adapted)
    monkeypatch.setattr(llm._maker, "tokenizer", adapted)
