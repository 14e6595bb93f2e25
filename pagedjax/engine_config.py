"""The engine's options: one validated value, so that a wrong option fails at the start and names itself."""

from __future__ import annotations

import dataclasses
from typing import Any

# The CPU backend reports no memory of its own: without num_blocks or kv_cache_memory_bytes the pool gets this much.
DEFAULT_CPU_KV_BYTES = 2**30

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
ATTENTION_IMPLEMENTATIONS = (None, "reference", "xla", "cpu", "tpu", "gpu")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        max_model_len: most tokens a sequence may have, prompt and generated; capped by the model's own limit.
        block_size: tokens a KV block.
        num_blocks: blocks of the pool, the null block included; None: from kv_cache_memory_bytes, or from memory.
        kv_cache_memory_bytes: bytes of the pool, instead of num_blocks.
        memory_utilization: share of the device's memory that weights and pool may take, where the device reports it.
        kv_cache_dtype: "auto" (the parameters'), "float32", "bfloat16" or "float16"; or "int8" or "fp8"
            (float8_e4m3fn): quantised, with a float32 scale a token and head.
        max_num_seqs: batch rows: sequences that run at once.
        max_num_batched_tokens: tokens a step, prefill chunks, decode rows and proposals together.
        decode_steps: most inner steps of one program, before the host looks; each gives a row one token, or with
            proposals up to 1 + num_speculative_tokens.
        num_speculative_tokens: most tokens that a row proposes from its own history in each inner step, to be verified
            together with the next one (`pagedjax.speculation`); 0 is off. Outputs are the same, and where text repeats
            itself they come in fewer steps. Steps in which anyone computes a prompt or searches with beams do without.
        watermark: share of the blocks kept free when a sequence is admitted beside running ones.
        enable_prefix_caching: keep the K/V of full blocks, as long as there is room, for requests that begin alike.
        defragment_above: when the engine becomes idle, and of the blocks up to the last cached one more than this share
            is free, the cached ones are moved together. None: never. What runs is as fast either way.
        batch_invariant: compute every step in one fixed shape, and attention token by token, so that a logit has the
            same bits whatever runs beside a request and however its prompt was cut, recomputed, shared or found in the
            cache. Slower, most of all for long prompts.
        async_scheduling: plan and start a step before the result of the last one is there, so that the device does not
            wait for the host. Outputs are the same. A step that depends on the result (with proposals or beams, or with
            windows in all layers) is not started ahead. None: where the device is not the CPU, which has both to do.
        strict_compile: raise when a program is needed that `warmup` has not compiled.
        mesh: devices to divide the model over, along the axis called "tensor" or "model", or the only one; None: one
            device (`pagedjax.tensor_parallel`).
        attention: implementation of `pallas_kernels.paged_attention`; None picks by platform.
        seed: what the seeds of requests without one are derived from.
    """

    max_model_len: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    decode_steps: int = 8
    num_speculative_tokens: int = 0
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    defragment_above: float | None = None
    batch_invariant: bool = False
    async_scheduling: bool | None = None
    strict_compile: bool = False
    mesh: Any = None
    attention: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_model_len", 2),
            ("block_size", 1),
            ("num_blocks", 2),
            ("kv_cache_memory_bytes", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("decode_steps", 1),
            ("num_speculative_tokens", 0),
            ("seed", 0),
        ):
            self._check_int(name, least)
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and kv_cache_memory_bytes={self.kv_cache_memory_bytes} both size the "
                "pool; give one of them"
            )
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ValueError(f"memory_utilization={self.memory_utilization} is not in (0, 1]")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark={self.watermark} is not in [0, 1)")
        if self.defragment_above is not None and not 0.0 <= self.defragment_above < 1.0:
            raise ValueError(f"defragment_above={self.defragment_above} is not in [0, 1)")
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed} does not fit 63 bits; use a smaller one")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not one of {KV_CACHE_DTYPES}")
        if self.attention not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(f"attention={self.attention!r} is not one of {ATTENTION_IMPLEMENTATIONS}")
        if self.num_speculative_tokens >= self.max_num_batched_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} and the token before them do not fit a step of "
                f"max_num_batched_tokens={self.max_num_batched_tokens}; lower the one or raise the other"
            )
        if self.mesh is not None and not all(hasattr(self.mesh, name) for name in ("axis_names", "devices", "shape")):
            raise ValueError(f"mesh={self.mesh!r} is not a jax.sharding.Mesh of devices")

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def token_ladder(self) -> tuple[int, ...]:
        """The numbers of token places a step may be compiled for, ascending; the last is the token budget."""
        budget = self.max_num_batched_tokens
        if self.batch_invariant:
            return (budget,)
        return _ladder(budget)

    @property
    def verify_ladder(self) -> tuple[int, ...]:
        """The numbers of token places of the steps that verify proposals, ascending; empty without speculation."""
        if not self.num_speculative_tokens:
            return ()
        budget, places = self.max_num_batched_tokens, 1 + self.num_speculative_tokens
        if self.batch_invariant:
            return (budget,)
        return tuple(sorted({min(places * num_rows, budget) for num_rows in _ladder(self.max_num_seqs)}))

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None and name in ("num_blocks", "kv_cache_memory_bytes"):
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}={value!r} is not an integer")
        if value < least:
            raise ValueError(f"{name}={value} is too small; it must be at least {least}")


def _ladder(last: int) -> tuple[int, ...]:
    """Powers of 4 up to 64, powers of 2 from there, all below `last`; and `last`.

    A step of few tokens takes as long as it takes to read the weights; one of many as long as it has places.
    """
    powers = [4**i for i in range(3)] + [2**i for i in range(6, last.bit_length())]
    return (*(power for power in powers if power < last), last)
