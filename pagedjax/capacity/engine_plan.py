"""What an engine reserves and compiles, and what limits how many sequences it runs: printed at its start."""

from __future__ import annotations

import dataclasses

from pagedjax.capacity.lengths import BlockCounts
from pagedjax.capacity.units import show_bytes


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """What an engine reserves and compiles; `print` it. All bytes are those of one device.

    Attributes:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens a block.
        block_bytes: bytes a block, all layers, K and V, the scales of a quantised pool included.
        kv_cache_dtype: what the pool stores.
        params_bytes: bytes of the parameters.
        max_num_seqs: rows.
        max_model_len: tokens a sequence.
        programs: names of all programs the engine may compile.
        derived_copies: parameters that the engine holds in another form beside the ones it was given.
        max_num_batched_tokens: tokens a step.
        window: the largest sliding window, where every layer has one; blocks behind it are given back.
        sized_by: what has decided the number of blocks.
        num_devices: that the model is divided over.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    kv_cache_dtype: str
    params_bytes: int
    max_num_seqs: int
    max_model_len: int
    programs: tuple[str, ...]
    derived_copies: tuple[str, ...] = ()
    max_num_batched_tokens: int = 512
    window: int | None = None
    sized_by: str = "num_blocks"
    num_devices: int = 1

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_slots(self) -> int:
        """Tokens the usable blocks hold."""
        return self.num_usable_blocks * self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def max_running(self) -> int:
        """Most rows that run at once: each gets a token a step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def blocks_at_max_len(self) -> int:
        """Most blocks that a sequence of max_model_len tokens holds at once."""
        return BlockCounts(self.block_size, self.window, self.max_num_batched_tokens).at_most(self.max_model_len)

    @property
    def concurrency_at_max_len(self) -> int:
        """Sequences of max_model_len tokens that fit at once, rows aside."""
        return self.num_usable_blocks // self.blocks_at_max_len

    @property
    def limited_by(self) -> str:
        """What keeps more sequences from running at once: "rows", or "blocks" where they are long enough."""
        return "rows" if self.concurrency_at_max_len >= self.max_running else "blocks"

    def __str__(self) -> str:
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens, by {self.sized_by}"
        each = f"{self.block_bytes / self.block_size / 2**10:,.2f} KiB each, {self.kv_cache_dtype}"
        at_once = self.num_usable_blocks / self.blocks_at_max_len
        where = f" on each of {self.num_devices} devices" if self.num_devices > 1 else ""
        rows = [
            ("parameters", f"{show_bytes(self.params_bytes)}{where}"),
            ("KV pool", f"{show_bytes(self.pool_bytes)}{where}: {blocks}"),
            ("KV cache size", f"{self.num_slots:,} tokens ({each})"),
            ("Maximum concurrency", f"for {self.max_model_len:,} tokens per request: {at_once:.2f}x"),
            ("limited by", self._limit()),
            ("programs", f"{len(self.programs)}: {', '.join(self.programs)}"),
            ("derived weight copies", ", ".join(self.derived_copies) or "none"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _limit(self) -> str:
        rows = f"max_num_seqs={self.max_num_seqs}"
        if self.max_running < self.max_num_seqs:
            rows = f"max_num_batched_tokens={self.max_num_batched_tokens}"
        if self.limited_by == "rows":
            return f"rows ({rows}): the blocks would carry more"
        tokens = self.num_slots // self.max_running
        return f"blocks, where sequences have more than {tokens:,} tokens on average; else rows ({rows})"
