"""Fixtures that several tests share, and the place where compiled programs are kept for one run of the tests."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import pytest

from pagedjax import LLM
from pagedjax.loaders import hub

CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"
CACHE_LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def pytest_configure(config: pytest.Config) -> None:
    """What one process has compiled, the others find, and the scripts that tests start; gone after the run.

    Most of what the tests do is compile, so LLVM leaves out its optimisations, unless XLA_FLAGS says otherwise.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if CACHE_DIR not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="pagedjax-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ |= {CACHE_DIR: folder.name, CACHE_LEAST_SECONDS: "0.2"}
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE_DIR])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(os.environ.get(CACHE_LEAST_SECONDS, 1)))


@pytest.fixture
def compiled() -> Iterator[list[float]]:
    """Seconds of every program that is compiled during the test, eager ones too."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.clear_event_listeners()


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """SmolLM2-135M-Instruct as a GGUF file: fetched on first use, from the cache afterwards."""
    return hub.fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: pathlib.Path) -> LLM:
    """An engine on SmolLM2 in float32 with few programs, for tests that leave it idle."""
    return LLM.load(smollm2_path, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=2**26)
