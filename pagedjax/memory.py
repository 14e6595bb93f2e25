"""What the KV pool stores and how large it is: from the options, or from what the device has left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pagedjax import capacity
from pagedjax.config import ModelConfig
from pagedjax.engine_config import DEFAULT_CPU_KV_BYTES, EngineConfig
from pagedjax.workspace import Workspace
from pallas_kernels import KVPages

FP8 = "float8_e4m3fn"  # what kv_cache_dtype="fp8" stands for
# On a device that reports no memory, the pool of a small model is no larger than so many times what all rows together
# can use: with a prefix cache, blocks that no row holds are of use too.
MOST_OF_ROWS = 2


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What a device reports, in bytes."""

    limit: int  # that jax may take: on a GPU by default 75% of the card
    in_use: int


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """The number of blocks, and where it is from.

    Attributes:
        num_blocks: the null block included.
        reason: what has decided it, for people.
    """

    num_blocks: int
    reason: str


def kv_pool_dtype(kv_cache_dtype: str, params_dtype: jnp.dtype) -> jnp.dtype:
    """The pool's dtype for an engine option."""
    if kv_cache_dtype == "auto":
        return params_dtype
    return jnp.dtype(FP8 if kv_cache_dtype == "fp8" else kv_cache_dtype)


def kv_block_bytes(model: ModelConfig, dtype: jnp.dtype, block_size: int) -> int:
    """Bytes of a block in all layers of a pool of `dtype` on this device, scales and padding included."""
    sizes = (model.num_layers, 1, block_size, model.num_kv_heads, model.head_dim)
    return jax.eval_shape(lambda: KVPages.zeros(*sizes, dtype)).nbytes


def device_memory() -> DeviceMemory | None:
    """What this process's first device reports; None on a CPU, which reports nothing."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return DeviceMemory(stats["bytes_limit"], stats["bytes_in_use"])


def pool_size(config: EngineConfig, block_bytes: int, workspace: Callable[[], Workspace]) -> PoolSize:
    """Blocks of the pool, the null block included.

    Args:
        config: `num_blocks` wins; else `kv_cache_memory_bytes`; else what the device reports, less what is in use and
            what a step needs; else a default. Without a prefix cache, no more than all rows together can use.
        block_bytes: bytes a block.
        workspace: what the engine needs beside weights and K/V; called only where the device reports its memory.

    Raises:
        ValueError: not even two blocks fit.
    """
    if config.num_blocks is not None:
        return PoolSize(config.num_blocks, "num_blocks")
    rows_use = config.max_num_seqs * config.max_blocks_per_seq
    most = None if config.enable_prefix_caching else rows_use + 1
    if config.kv_cache_memory_bytes is not None:
        memory, reason = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif (device := device_memory()) is not None:
        needs = workspace()
        memory = capacity.kv_memory(device.limit, config.memory_utilization, device.in_use)
        memory -= needs.step_bytes + needs.row_bytes
        block_bytes += needs.table_bytes_per_block
        reason = _reason(device, config.memory_utilization, needs)
    else:
        memory, reason = DEFAULT_CPU_KV_BYTES, "the default where a device reports no memory"
        most = (MOST_OF_ROWS if config.enable_prefix_caching else 1) * rows_use + 1
    num_blocks = capacity.num_blocks_in(memory, block_bytes)
    if num_blocks < capacity.LEAST_BLOCKS:
        raise ValueError(
            f"{memory} bytes hold {max(num_blocks, 0)} KV blocks of {block_bytes} bytes, and {capacity.LEAST_BLOCKS} "
            f"are the least (block 0 is the null block), by {reason}; raise kv_cache_memory_bytes or memory_utilization"
        )
    if most is not None and num_blocks > most:
        return PoolSize(most, "what all rows can use")
    return PoolSize(num_blocks, reason)


def _reason(device: DeviceMemory, utilization: float, needs: Workspace) -> str:
    show = capacity.show_bytes
    return (
        f"{utilization:g} of the {show(device.limit)} that jax may take, less {show(device.in_use)} in use and "
        f"{show(needs.step_bytes + needs.row_bytes)} for steps and rows"
    )
