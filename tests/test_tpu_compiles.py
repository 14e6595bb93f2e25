"""The kernels compile for every TPU generation at the sizes of real models, and leave the KV pool where it is.

Run in an environment with libtpu: JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 pytest -m compiles tests/test_tpu_compiles.py
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import real_shapes
from collectives import collectives
from real_shapes import MODELS, WORK

from pallas_kernels import device_free

pytestmark = pytest.mark.compiles

CHIPS = ["v5e", "v5p", "v6e", "tpu7x"]
# The oldest and the newest; the ones between have their form of each check among the slow ones.
MOST_DIFFERENT = ["v5e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("v5p", "v6e")), "tpu7x"]


def check(chip: str, model: str, work: str, **options: Any) -> None:
    target = device_free.target(chip)
    with device_free.tracing_for(target.abstract):
        function, arguments = real_shapes.attention(MODELS[model], WORK[work], **options)
    compiled = device_free.compile_for(target, function, *arguments, donate_argnums=0)
    kernels = ["write_kv", "paged_decode"] + (["paged_prefill"] if work in real_shapes.WITH_PREFILL else [])
    real_shapes.assert_holds(compiled, kernels)
    real_shapes.assert_pool_in_place(compiled, arguments[0])
    real_shapes.assert_nothing_copied(compiled, arguments[0])


@pytest.mark.parametrize("chip", MOST_DIFFERENT)
@pytest.mark.parametrize("model", MODELS)
def test_models(chip: str, model: str) -> None:
    """A mixed batch: the decode kernel, the prefill kernel and the write."""
    check(chip, model, "mixed", dtype=jnp.bfloat16)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("work", ["mixed", "mixed-256x2048", "verify", "prefill-8192"])
def test_batches(chip: str, work: str) -> None:
    check(chip, "llama-3-8b", work, dtype=jnp.bfloat16)


@pytest.mark.parametrize("chip", MOST_DIFFERENT)
@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes(chip: str, block_size: int) -> None:
    check(chip, "llama-3-8b", "mixed", dtype=jnp.bfloat16, block_size=block_size)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn")]
)
def test_dtypes(chip: str, dtype: str, kv_dtype: str) -> None:
    check(chip, "llama-3-8b", "mixed", dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(kv_dtype))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("model", "block_size"), [("smollm2-135m", 64), ("llama-3-8b", 8), ("gemma-3-1b", 8), ("phi-2", 16)]
)
def test_scales_that_are_padded(chip: str, model: str, block_size: int) -> None:
    """Heads times block_size is no multiple of 128; the last one's is, and its values are padded."""
    check(chip, model, "mixed", dtype=jnp.bfloat16, kv_dtype=jnp.dtype("int8"), block_size=block_size)


# 16 GiB of a v5e do not hold 8 billion weights of 2 bytes and a pool: there it is half of the layers.
@pytest.mark.slow  # the sampler over 128,256 tokens takes a TPU's compiler a minute or two
@pytest.mark.parametrize(("chip", "num_layers"), [("v6e", 32), ("v5e", 16)])
def test_the_engines_step_of_llama_3_8b(chip: str, num_layers: int) -> None:
    kernels = ["write_kv", "paged_decode", "paged_prefill"]
    real_shapes.check_engine_step(device_free.target(chip), kernels, num_layers)


@pytest.mark.slow
def test_the_engines_step_of_llama_3_8b_on_four_chips() -> None:
    """All layers on the four v5e of a host: a quarter of the pool on each, and activations alone between them."""
    num_tokens, config = 512, real_shapes.LLAMA_3_8B
    compiled, pool = real_shapes.engine_step_on_mesh(device_free.target("v5e"), num_tokens)
    real_shapes.assert_holds(compiled, ["write_kv", "paged_decode", "paged_prefill"])
    memory = compiled.memory_analysis()
    assert pool.nbytes / 4 <= memory.alias_size_in_bytes < pool.nbytes / 4 + 2**24
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 8 * 2**30
    sent = collectives(compiled)
    largest_activation = num_tokens * 2 * config.intermediate_size
    assert 2 <= len(sent) <= 20
    assert max(each.num_elements for each in sent) <= largest_activation < config.hidden_size * config.intermediate_size
