"""What a block size costs: slots that stay empty in a sequence's last block, against the length of its block table.

s tokens of a sequence, B block_size, S_max max_model_len.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pagedjax.capacity.lengths import BlockCounts

BLOCK_SIZES = (8, 16, 32, 64)


def paged_utilization(num_tokens: int, block_size: int) -> float:
    """Share of the slots that s tokens fill: s / (ceil(s / B) B)."""
    return num_tokens / (-(-num_tokens // block_size) * block_size)


def contiguous_utilization(num_tokens: float, max_model_len: int) -> float:
    """The same where each sequence has its longest length set aside: s / S_max."""
    return num_tokens / max_model_len


@dataclasses.dataclass(frozen=True)
class BlockSizeCost:
    """One block size, for one length or over the life of requests.

    Attributes:
        block_size: tokens a block.
        num_blocks: blocks that a sequence holds; over the life of requests the mean over time.
        worst_waste: most slots of a sequence that stay empty, B - 1.
        utilization: share of the slots held that have a token.
        table_length: entries of a block table for the longest of these sequences.
    """

    block_size: int
    num_blocks: float
    worst_waste: int
    utilization: float
    table_length: int


def cost_at(num_tokens: int, block_sizes: Iterable[int] = BLOCK_SIZES) -> tuple[BlockSizeCost, ...]:
    """What block sizes cost a sequence of `num_tokens`."""
    return tuple(
        BlockSizeCost(
            size, -(-num_tokens // size), size - 1, paged_utilization(num_tokens, size), -(-num_tokens // size)
        )
        for size in block_sizes
    )


def cost_over_life(
    lengths: Sequence[tuple[int, int]], block_sizes: Iterable[int] = BLOCK_SIZES
) -> tuple[BlockSizeCost, ...]:
    """What block sizes cost requests (prompt_len, output_len) while they grow: means over time."""
    num_steps = sum(output_len for _, output_len in lengths)
    # In step t = 0 .. o - 1 a request has p + t tokens.
    num_tokens = sum(p * o + o * (o - 1) // 2 for p, o in lengths)
    longest = max(p + o - 1 for p, o in lengths)
    costs = []
    for size in block_sizes:
        mean = BlockCounts(size).mean_over_life(lengths)
        share = num_tokens / (mean * num_steps * size)
        costs.append(BlockSizeCost(size, mean, size - 1, share, -(-longest // size)))
    return tuple(costs)
