"""What fits a device, as a value: blocks, tokens, sequences, and the rows that will run.

Raw figures divide memory; usable ones leave out the null block, which holds nobody's tokens; what the scheduler admits
also leaves the watermark free. A sequence that slides holds no more blocks than its window needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from pagedjax.capacity.accelerators import Accelerator, Platform
from pagedjax.capacity.block_sizes import BLOCK_SIZES, BlockSizeCost, contiguous_utilization, cost_over_life
from pagedjax.capacity.kv_shape import KVShape
from pagedjax.capacity.lengths import BlockCounts
from pagedjax.capacity.replay import Replay
from pagedjax.capacity.trace import Lengths


class Concurrency(NamedTuple):
    """Sequences of one length that fit at once, rows aside."""

    raw: int  # memory divided by the blocks of each
    usable: int  # without the null block
    admitted: int  # without the watermark either


@dataclasses.dataclass(frozen=True)
class Device:
    """What is known of the device."""

    memory_bytes: int | None
    platform: Platform | None
    accelerator: Accelerator | None = None

    @property
    def note(self) -> str | None:
        if self.accelerator is None or self.platform != "gpu":
            return None
        return "jax takes 75% of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; here is all of it"


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """Made by `pagedjax.capacity.plan`; `print` it. All bytes are those of one device.

    Attributes:
        model: how it was named.
        shape: what the device holds of it.
        device: memory and platform.
        memory_utilization: share of the memory that weights, workspace and K/V may take.
        workspace_bytes: what a step needs beside weights and K/V.
        tensor_parallel: devices that share the model.
        kv_cache_dtype: what the pool stores.
        block_size: tokens a block.
        bytes_per_block: all layers, K and V, scales and padding included.
        num_blocks: of the pool, the null block included.
        max_model_len: tokens a sequence, S_max.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step.
        watermark: share of the blocks kept free when a sequence is admitted beside running ones.
        notes: what one may not expect.
        lengths: prompt and output tokens of the requests, if any were given.
        lengths_are_means: all requests are taken to be as long as the one in `lengths`.
        replay: what running the trace has shown.
    """

    model: str
    shape: KVShape
    device: Device
    memory_utilization: float
    workspace_bytes: int
    tensor_parallel: int
    kv_cache_dtype: str
    block_size: int
    bytes_per_block: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    notes: tuple[str, ...] = ()
    lengths: Lengths | None = None
    lengths_are_means: bool = False
    replay: Replay | None = None

    # Memory

    @property
    def bytes_per_token(self) -> float:
        """Of the pool; not a whole number where a TPU pads the scales of a block."""
        exact, rest = divmod(self.bytes_per_block, self.block_size)
        return self.bytes_per_block / self.block_size if rest else exact

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_slots(self) -> int:
        """Tokens the usable blocks hold."""
        return self.num_usable_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        return math.ceil(self.watermark * self.num_usable_blocks)

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(self.block_size, self.shape.window, self.max_num_batched_tokens)

    # Sequences of one length

    def blocks_per_seq(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds at once."""
        return self.counts.at_most(num_tokens)

    def concurrency(self, num_tokens: int) -> Concurrency:
        """Sequences of `num_tokens` that fit at once."""
        each = self.blocks_per_seq(num_tokens)
        usable = self.num_usable_blocks // each
        beside_watermark = (self.num_usable_blocks - self.watermark_blocks) // each
        return Concurrency(self.num_blocks // each, usable, max(beside_watermark, min(usable, 1)))

    @property
    def contiguous_sequences(self) -> int:
        """Sequences that fit the same memory where each has max_model_len tokens set aside, whatever its length."""
        return self.num_blocks * self.block_size // self.max_model_len

    # Requests of the given lengths

    @functools.cached_property
    def mean_blocks(self) -> float | None:
        """Blocks that a running row holds, averaged over time."""
        return None if self.lengths is None else self.counts.mean_over_life(self.lengths)

    @property
    def block_bound(self) -> float | None:
        """Rows that the blocks carry on average: those beside the watermark / `mean_blocks` (Little's law)."""
        if self.mean_blocks is None:
            return None
        return (self.num_usable_blocks - self.watermark_blocks) / self.mean_blocks

    @property
    def mean_running_waiting(self) -> float | None:
        """Rows that run while requests wait: of the replay, or for mean lengths the formula. None without lengths, or
        where nobody had to wait."""
        if self.replay is not None:
            return self.replay.mean_running_waiting if self.replay.num_steps_waiting else None
        if self.block_bound is None:
            return None
        return min(self.block_bound, self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def mean_running(self) -> float | None:
        """Rows that run, averaged over all steps; for mean lengths the queue never ends."""
        return self.replay.mean_running if self.replay is not None else self.mean_running_waiting

    @property
    def live_share(self) -> float | None:
        """Share of the slots of held blocks that have a token, averaged over time."""
        if self.replay is not None:
            return self.replay.live_share
        return None if self.lengths is None else self.block_size_costs([self.block_size])[0].utilization

    @property
    def contiguous_share(self) -> float | None:
        """The same where each row has max_model_len slots."""
        if self.lengths is None:
            return None
        num_steps = sum(output_len for _, output_len in self.lengths)
        num_tokens = sum(p * o + o * (o - 1) / 2 for p, o in self.lengths)
        return contiguous_utilization(num_tokens / num_steps, self.max_model_len)

    def block_size_costs(self, block_sizes: Any = BLOCK_SIZES) -> tuple[BlockSizeCost, ...]:
        """What block sizes cost the given requests, or sequences of max_model_len tokens; windows aside."""
        return cost_over_life(self.lengths or ((self.max_model_len, 1),), block_sizes)

    @property
    def limited_by(self) -> str:
        """What keeps concurrency from being higher: "rows" (raise max_num_seqs) or "blocks" (memory)."""
        bound = self.block_bound
        if bound is None:
            bound = self.concurrency(self.max_model_len).usable
        return "rows" if bound >= min(self.max_num_seqs, self.max_num_batched_tokens) else "blocks"

    def to_dict(self) -> dict[str, Any]:
        """Everything, also what follows from it, in types that JSON has; the lengths themselves left out."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "lengths"}
        derived = (
            *("bytes_per_token", "pool_bytes", "num_usable_blocks", "num_slots", "watermark_blocks"),
            *("contiguous_sequences", "mean_blocks", "mean_running", "mean_running_waiting", "live_share"),
            *("contiguous_share", "limited_by"),
        )
        return {
            **fields,
            **{name: getattr(self, name) for name in derived},
            "concurrency_at_max_len": self.concurrency(self.max_model_len)._asdict(),
            "block_sizes": [dataclasses.asdict(cost) for cost in self.block_size_costs()],
        }

    def __str__(self) -> str:
        from pagedjax.capacity.table import table

        return table(self)
