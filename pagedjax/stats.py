"""The engine's figures at one moment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.engine import Engine


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the engine holds and has done; fields can be read as attributes or by name.

    Attributes:
        kv_usage: share of the usable blocks that rows hold, 0 to 1.
        peak_kv_usage: the highest share since the start, as plans were made.
        num_free_blocks: usable blocks that are free.
        num_cached_blocks: blocks held by the prefix cache alone.
        prefix_hit_rate: share of prompt tokens found in the prefix cache.
        num_running: sequences in rows.
        num_waiting: sequences in the queue.
        num_preemptions: times a running sequence had to give way, since the start.
        num_steps: steps run since the start.
        num_generated_tokens: tokens sampled since the start.
        num_compiled_programs: programs compiled so far.
        compile_seconds: time that took.
    """

    kv_usage: float
    peak_kv_usage: float
    num_free_blocks: int
    num_cached_blocks: int
    prefix_hit_rate: float
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    num_generated_tokens: int
    num_compiled_programs: int
    compile_seconds: float

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @classmethod
    def of(cls, engine: Engine) -> Stats:
        scheduler, runner, ledger = engine.scheduler, engine.runner, engine.scheduler.ledger
        return cls(
            kv_usage=1.0 - ledger.num_available_blocks / scheduler.num_usable_blocks,
            peak_kv_usage=1.0 - scheduler.least_available_blocks / scheduler.num_usable_blocks,
            num_free_blocks=ledger.num_free_blocks,
            num_cached_blocks=ledger.num_idle_blocks,
            prefix_hit_rate=scheduler.num_cached_tokens / max(scheduler.num_prompt_tokens, 1),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_steps=engine.num_steps,
            num_generated_tokens=engine.num_generated_tokens,
            num_compiled_programs=len(runner.compiled),
            compile_seconds=runner.compile_seconds,
        )
