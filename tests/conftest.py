"""Fixtures that several tests share."""

from __future__ import annotations

import pathlib

import pytest

from pagedjax import LLM
from pagedjax.loaders import hub


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """SmolLM2-135M-Instruct as a GGUF file: fetched on first use, from the cache afterwards."""
    return hub.fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: pathlib.Path) -> LLM:
    """An engine on SmolLM2 in float32 with few programs, for tests that leave it idle."""
    return LLM.load(smollm2_path, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=2**26)
