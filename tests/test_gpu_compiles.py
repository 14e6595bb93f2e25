"""The kernels compile for an H200 at the sizes of real models, and leave the KV pool where it is.

Run in an environment with the CUDA plugin and ptxas: JAX_PLATFORMS=cpu pytest -m compiles tests/test_gpu_compiles.py
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import real_shapes
from real_shapes import MODELS, WORK

from pallas_kernels import device_free

pytestmark = pytest.mark.compiles


def check(model: str, work: str, **options: Any) -> None:
    function, arguments = real_shapes.attention(MODELS[model], WORK[work], **options)
    compiled = device_free.compile_for(device_free.target("h200"), function, *arguments, donate_argnums=0)
    kernels = ["paged_decode"] + (["paged_prefill"] if work in real_shapes.WITH_PREFILL else [])
    real_shapes.assert_holds(compiled, kernels)
    real_shapes.assert_pool_in_place(compiled, arguments[0])


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str) -> None:
    """A mixed batch: the decode kernel and the prefill kernel."""
    check(model, "mixed", dtype=jnp.bfloat16)


@pytest.mark.parametrize("work", ["decode-256x2048", "verify", "prefill-8192", "mixed-256x2048"])
def test_batches(work: str) -> None:
    check("llama-3-8b", work, dtype=jnp.bfloat16)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes(block_size: int) -> None:
    check("llama-3-8b", "mixed", dtype=jnp.bfloat16, block_size=block_size)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_dtypes(kv_dtype: str) -> None:
    check("llama-3-8b", "mixed", dtype=jnp.bfloat16, kv_dtype=jnp.dtype(kv_dtype))


def test_the_engines_step_of_llama_3_8b() -> None:
    real_shapes.check_engine_step(device_free.target("h200"), ["paged_decode", "paged_prefill"])
