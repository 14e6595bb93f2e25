"""How large the KV pool is: from the options, or from what the device has left."""

from __future__ import annotations

import jax

from pagedjax import capacity
from pagedjax.engine_config import DEFAULT_CPU_KV_BYTES, EngineConfig


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
