"""The write kernel compiles for every TPU generation, and a scan over layers that carries the pool copies none of it.

Needs libtpu: JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 pytest -m slow tests/test_tpu_write_compiles.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import real_shapes

from pallas_kernels import KVPages, device_free, write_kv

pytestmark = [pytest.mark.compiles, pytest.mark.slow]  # tests/test_tpu_compiles.py has a write in every program

NUM_LAYERS = 32


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "block_size", "dtype", "num_tokens"),
    [
        (128, 8, 16, "bfloat16", 64),
        (128, 8, 16, "bfloat16", 2048),
        (128, 8, 16, "float32", 64),
        (128, 8, 16, "int8", 2048),
        (128, 8, 16, "float8_e4m3fn", 64),
        (128, 4, 32, "bfloat16", 1024),
        (64, 8, 64, "bfloat16", 64),
        (64, 3, 16, "int8", 64),
        (256, 1, 8, "bfloat16", 64),
        (256, 4, 64, "int8", 512),
        (80, 8, 16, "bfloat16", 64),
        (96, 3, 64, "int8", 64),
    ],
)
def test_write(chip: str, head_dim: int, num_heads: int, block_size: int, dtype: str, num_tokens: int) -> None:
    target = device_free.target(chip)
    with device_free.tracing_for(target.abstract):
        pool = jax.eval_shape(lambda: KVPages.zeros(NUM_LAYERS, 512, block_size, num_heads, head_dim, dtype))

    def run(pool: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVPages:
        def one_layer(pool: KVPages, layer: Any) -> tuple[KVPages, None]:
            return write_kv(pool, layer, k, v, slots, implementation="tpu"), None

        return jax.lax.scan(one_layer, pool, jnp.arange(NUM_LAYERS))[0]

    kv = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    compiled = device_free.compile_for(target, run, pool, kv, kv, slots, donate_argnums=0)
    real_shapes.assert_pool_in_place(compiled, pool)
    real_shapes.assert_nothing_copied(compiled, pool)
