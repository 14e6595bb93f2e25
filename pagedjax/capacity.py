"""Bytes, blocks and concurrency: the arithmetic that sizes the KV pool, and the plan the engine prints at its start."""

from __future__ import annotations

import dataclasses


def num_blocks_in(memory_bytes: int, block_bytes: int) -> int:
    """Blocks that fit a pool of `memory_bytes`, the null block included."""
    return memory_bytes // block_bytes


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """What an engine reserves and compiles; `print` it.

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
    def concurrency_at_max_len(self) -> int:
        """Sequences of max_model_len tokens that fit at once, rows aside."""
        return self.num_usable_blocks // -(-self.max_model_len // self.block_size)

    def __str__(self) -> str:
        at_max_len = self.concurrency_at_max_len
        limit = "rows (max_num_seqs)" if at_max_len >= self.max_num_seqs else "blocks, when sequences are long"
        bytes_each = f"{self.block_bytes / self.block_size / 2**10:,.1f} KiB each, {self.kv_cache_dtype}"
        rows = [
            ("parameters", f"{self.params_bytes / 2**20:,.0f} MiB"),
            ("KV pool", f"{self.pool_bytes / 2**20:,.0f} MiB: {self.num_blocks:,} blocks of {self.block_size} tokens"),
            ("KV tokens", f"{self.num_slots:,} ({bytes_each})"),
            ("concurrency", f"{self.max_num_seqs} rows; {at_max_len} sequences of {self.max_model_len:,} tokens"),
            ("limited by", limit),
            ("programs", f"{len(self.programs)}: {', '.join(self.programs)}"),
            ("derived weight copies", ", ".join(self.derived_copies) or "none"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
