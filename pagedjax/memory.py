"""What the KV pool stores and how large it is: from the options, or from what the device has left."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax import capacity
from pagedjax.config import ModelConfig
from pagedjax.engine_config import DEFAULT_CPU_KV_BYTES, EngineConfig
from pallas_kernels import KVPages

FP8 = "float8_e4m3fn"  # what kv_cache_dtype="fp8" stands for


def kv_pool_dtype(kv_cache_dtype: str, params_dtype: jnp.dtype) -> jnp.dtype:
    """The pool's dtype for an engine option."""
    if kv_cache_dtype == "auto":
        return params_dtype
    return jnp.dtype(FP8 if kv_cache_dtype == "fp8" else kv_cache_dtype)


def kv_block_bytes(model: ModelConfig, dtype: jnp.dtype, block_size: int) -> int:
    """Bytes of a block in all layers of a pool of `dtype` on this device, scales and padding included."""
    sizes = (model.num_layers, 1, block_size, model.num_kv_heads, model.head_dim)
    return jax.eval_shape(lambda: KVPages.zeros(*sizes, dtype)).nbytes


def num_pool_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of the pool, the null block included.

    Args:
        config: `num_blocks` wins; else `kv_cache_memory_bytes`, else the memory the device reports as free, capped at
            what all rows together could use.
        block_bytes: bytes a block.

    Raises:
        ValueError: not even two blocks fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    most = config.max_num_seqs * config.max_blocks_per_seq + 1  # more could never be used
    memory = config.kv_cache_memory_bytes or _free_memory(config.memory_utilization)
    num_blocks = min(capacity.num_blocks_in(memory, block_bytes), most)
    if num_blocks < 2:
        raise ValueError(
            f"{memory} bytes hold {num_blocks} KV blocks of {block_bytes} bytes, and 2 are the least (block 0 is the "
            "null block); raise kv_cache_memory_bytes or memory_utilization"
        )
    return num_blocks


def _free_memory(utilization: float) -> int:
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return DEFAULT_CPU_KV_BYTES
    return max(0, int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"])
