"""Bytes, blocks and concurrency: what fits a device, asked before there is one. Imports no jax."""

from pagedjax.capacity.accelerators import ACCELERATORS, Accelerator
from pagedjax.capacity.block_sizes import (
    BLOCK_SIZES,
    BlockSizeCost,
    contiguous_utilization,
    cost_at,
    cost_over_life,
    paged_utilization,
)
from pagedjax.capacity.capacity_plan import CapacityPlan, Concurrency
from pagedjax.capacity.engine_plan import EnginePlan
from pagedjax.capacity.kv_shape import KVShape
from pagedjax.capacity.planner import plan
from pagedjax.capacity.pool import LEAST_BLOCKS, kv_memory, num_blocks_in
from pagedjax.capacity.replay import Replay
from pagedjax.capacity.units import parse_bytes, show_bytes

__all__ = [
    "ACCELERATORS",
    "BLOCK_SIZES",
    "LEAST_BLOCKS",
    "Accelerator",
    "BlockSizeCost",
    "CapacityPlan",
    "Concurrency",
    "EnginePlan",
    "KVShape",
    "Replay",
    "contiguous_utilization",
    "cost_at",
    "cost_over_life",
    "kv_memory",
    "num_blocks_in",
    "paged_utilization",
    "parse_bytes",
    "plan",
    "show_bytes",
]
