"""The engine's figures at one moment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pagedjax.events import Preemption, Times

if TYPE_CHECKING:
    from pagedjax.engine import Engine


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the engine holds and has done; fields can be read as attributes or by name.

    Attributes:
        kv_usage: share of the usable blocks that rows hold, 0 to 1.
        peak_kv_usage: the highest share since the start, as plans were made.
        num_free_blocks: usable blocks that are free.
        num_used_blocks: blocks that rows hold.
        num_shared_blocks: of those, held by more than one row.
        tokens_per_slot: tokens with K/V that rows see, over the slots of the blocks they hold: above 1 where sharing
            saves more than last blocks waste.
        tail_waste: share of the slots of used blocks that are empty because a sequence ends within its last block.
        num_cached_blocks: blocks held by the prefix cache alone.
        prefix_hit_rate: share of prompt tokens found in the prefix cache.
        num_running: sequences in rows.
        num_waiting: sequences in the queue.
        num_preemptions: times a running sequence had to give way to another, since the start.
        preemptions: the last ones, for whatever reason: which request, how many tokens lost, why.
        queue_time: seconds from arrival to a row.
        time_to_first_token: seconds from arrival to the first token.
        inter_token_time: seconds a token after the first, a request's mean.
        host_share: share of the wall time of steps in which the device waited for the host, 0 to 1.
        num_steps: steps run since the start.
        num_generated_tokens: tokens sampled since the start.
        num_proposed_tokens: tokens proposed and verified since the start (`num_speculative_tokens`).
        num_accepted_tokens: tokens gained by that, since the start.
        num_compiled_programs: programs compiled so far.
        compile_seconds: time that took.
    """

    kv_usage: float
    peak_kv_usage: float
    num_free_blocks: int
    num_used_blocks: int
    num_shared_blocks: int
    tokens_per_slot: float
    tail_waste: float
    num_cached_blocks: int
    prefix_hit_rate: float
    num_running: int
    num_waiting: int
    num_preemptions: int
    preemptions: tuple[Preemption, ...]
    queue_time: Times
    time_to_first_token: Times
    inter_token_time: Times
    host_share: float
    num_steps: int
    num_generated_tokens: int
    num_proposed_tokens: int
    num_accepted_tokens: int
    num_compiled_programs: int
    compile_seconds: float

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @classmethod
    def of(cls, engine: Engine) -> Stats:
        scheduler, runner, ledger = engine.scheduler, engine.runner, engine.scheduler.ledger
        used = {block for sequence in scheduler.running for block in sequence.blocks if block is not None}
        size = scheduler.block_size
        num_tokens = sum(s.num_computed - size * s.blocks.count(None) for s in scheduler.running)
        num_empty = sum(-s.num_computed % size for s in scheduler.running)
        num_slots = max(len(used), 1) * size
        return cls(
            kv_usage=1.0 - ledger.num_available_blocks / scheduler.num_usable_blocks,
            peak_kv_usage=1.0 - scheduler.least_available_blocks / scheduler.num_usable_blocks,
            num_free_blocks=ledger.num_free_blocks,
            num_used_blocks=len(used),
            num_shared_blocks=sum(block.num_rows > 1 for block in used),
            tokens_per_slot=num_tokens / num_slots,
            tail_waste=num_empty / num_slots,
            num_cached_blocks=ledger.num_idle_blocks,
            prefix_hit_rate=scheduler.num_cached_tokens / max(scheduler.num_prompt_tokens, 1),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            preemptions=tuple(engine.observer.preemptions),
            queue_time=Times.of(engine.observer.times.queue),
            time_to_first_token=Times.of(engine.observer.times.first_token),
            inter_token_time=Times.of(engine.observer.times.inter_token),
            host_share=runner.clock.host_share,
            num_steps=engine.num_steps,
            num_generated_tokens=engine.num_generated_tokens,
            num_proposed_tokens=engine.num_proposed_tokens,
            num_accepted_tokens=engine.num_accepted_tokens,
            num_compiled_programs=len(runner.compiled),
            compile_seconds=runner.compile_seconds,
        )
