"""The memory that is left for K/V, and the blocks it holds: what a planner computes and an engine reserves."""

from __future__ import annotations

import math
from fractions import Fraction

LEAST_BLOCKS = 2  # one is the null block


def kv_memory(device_memory: int, utilization: float, used: int) -> int:
    """Bytes left for K/V: utilization * device memory - used; below zero where that is too little.

    The share is taken as the decimal it is written as: 0.9 of 80 GiB is 72 GiB, not a byte less.
    """
    return math.floor(Fraction(repr(utilization)) * device_memory) - used


def num_blocks_in(memory_bytes: int, block_bytes: int) -> int:
    """Blocks that fit a pool of `memory_bytes`, the null block included."""
    return memory_bytes // block_bytes
