"""Fixtures that several tests share."""

from __future__ import annotations

import pathlib

import pytest

from pagedjax.loaders import hub


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """SmolLM2-135M-Instruct as a GGUF file: fetched on first use, from the cache afterwards."""
    return hub.fetch("smollm2-135m-instruct")
