"""Faults of the host's account of blocks: methods of the ledger, the cache and the scheduler as they might be wrong.

Each takes the right one first, then its arguments, so that one page says what is planted where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from pagedjax import scheduler as scheduler_module
from pagedjax.block import Block, BlockKey
from pagedjax.block_ledger import BlockLedger
from pagedjax.plan import StepPlan
from pagedjax.prefix_cache import PrefixCache
from pagedjax.request import Sequence
from pagedjax.scheduler import Scheduler
from pagedjax.sequence_start import Start


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong version of one function.

    Attributes:
        owner: the class or module it is planted in.
        name: what it takes the place of there.
        wrong: called with the right function, and its arguments.
    """

    owner: Any
    name: str
    wrong: Callable[..., Any]

    def __str__(self) -> str:
        return self.wrong.__name__

    def planted(self) -> Any:
        """What takes the right one's place."""
        right = self.owner.__dict__[self.name]
        if isinstance(right, property):
            return property(lambda owner: self.wrong(right.fget, owner))
        if isinstance(right, staticmethod | classmethod):
            return type(right)(lambda *args: self.wrong(right.__func__, *args))
        return lambda *args, **options: self.wrong(right, *args, **options)


# Publishing and adopting


def advance_publishes_before_the_step(right: Any, ledger: BlockLedger, sequence: Sequence, num_tokens: int) -> None:
    """A block can be found as soon as a plan is to fill it."""
    right(ledger, sequence, num_tokens)
    if ledger.cache is not None:
        keys = ledger.keys(sequence, num_tokens // ledger.block_size)
        for key, block in zip(keys, sequence.blocks, strict=False):
            if block is not None and block.key is None:
                ledger.cache.publish(key, block)


def start_forks_what_is_not_computed(
    right: Any,
    ledger: BlockLedger,
    sequence: Sequence,
    tokens: dict[Sequence, int],
    plan: StepPlan,
    coming: set[BlockKey],
) -> Start | None:
    """A sibling's row is forked though its prompt is computed in this plan, or a later one."""
    start = right(ledger, sequence, tokens, plan, coming)
    shared = len(sequence.request.prompt_ids) - 1
    for sibling in sequence.request.sequences:
        if start is None and sibling.row is not None and 0 < shared <= sibling.num_computed:
            return Start(list(sibling.blocks), shared, sibling.row)
    return start


def fill_publishes_what_older_weights_wrote(
    right: Any, ledger: BlockLedger, sequence: Sequence, first_block: int, block_ids: list[int]
) -> None:
    """A row that goes on through a change of weights publishes under the new ones."""
    written, sequence.weights_version = sequence.weights_version, ledger.weights_version
    right(ledger, sequence, first_block, block_ids)
    sequence.weights_version = written


def match_verifies_the_first_token(right: Any, cache: PrefixCache, keys: Iterable[BlockKey]) -> list[Block]:
    """Of a block's tokens only the first is compared, and nothing before it."""
    by_token = {key.token_ids[0]: block for key, block in cache._blocks.items()}
    blocks: list[Block] = []
    for key in keys:
        if key.token_ids[0] not in by_token:
            break
        blocks.append(by_token[key.token_ids[0]])
    return blocks


def match_goes_on_after_a_gap(right: Any, cache: PrefixCache, keys: Iterable[BlockKey]) -> list[Block]:
    return [cache._blocks[key] for key in keys if key in cache._blocks]


def key_forgets_what_came_before(right: Any, cls: Any, parent: bytes, token_ids: list[int]) -> BlockKey:
    return right(cls, b"", token_ids)


def root_forgets_the_salt(right: Any, weights_version: int, cache_salt: str | None) -> bytes:
    return right(weights_version, None)


def nobody_waits_for_a_prefix(right: Any, ledger: BlockLedger, tokens: dict[Sequence, int]) -> set[BlockKey]:
    """Who begins like somebody who is just computing it computes it again."""
    return set()


def all_tokens_are_reusable(right: Any, sequence: Sequence) -> int:
    """Also the last, whose logits are drawn from."""
    return right(sequence) + 1


# Credits


def release_credits_twice(right: Any, ledger: BlockLedger, sequence: Sequence) -> None:
    before = ledger.num_free_blocks
    right(ledger, sequence)
    ledger._budget.credit(ledger.num_free_blocks - before)


def release_credits_nothing(right: Any, ledger: BlockLedger, sequence: Sequence) -> None:
    before = ledger.num_free_blocks
    right(ledger, sequence)
    ledger._budget.credit(before - ledger.num_free_blocks)


def release_credits_what_is_in_flight(right: Any, ledger: BlockLedger, sequence: Sequence) -> None:
    """What `discard` will credit once more."""
    in_flight, ledger._num_in_flight = ledger._num_in_flight, 0
    right(ledger, sequence)
    ledger._num_in_flight = in_flight


def let_go_credits_what_others_hold(right: Any, ledger: BlockLedger, block: Block) -> bool:
    return right(ledger, block) or block.key is None


def debit_counts_one_less(right: Any, ledger: BlockLedger, num_blocks: int) -> None:
    right(ledger, max(num_blocks - 1, 0))


def growth_rounds_down(right: Any, ledger: BlockLedger, sequence: Sequence, num_tokens: int) -> int:
    """A block that is filled in part is not counted."""
    in_all = (sequence.num_computed + num_tokens) // ledger.block_size
    return max(in_all - len(sequence.blocks), 0)


# Drops


def fill_forgets_a_drop(
    right: Any, ledger: BlockLedger, sequence: Sequence, first_block: int, block_ids: list[int]
) -> None:
    """Of a block that is published already."""
    drops = list(ledger.drops)
    right(ledger, sequence, first_block, block_ids)
    ledger.drops = drops


def discard_forgets_the_drops(right: Any, ledger: BlockLedger, block_ids: list[int]) -> None:
    ledger._budget.credit(len(block_ids))


def debit_forgets_a_drop(right: Any, ledger: BlockLedger, num_blocks: int) -> None:
    """Of a block that has left the cache."""
    drops = list(ledger.drops)
    right(ledger, num_blocks)
    ledger.drops = drops


def evicted_is_dropped_twice(right: Any, ledger: BlockLedger) -> list[int]:
    drops = right(ledger)
    return drops + drops[-1:]


def move_forgets_the_drops(right: Any, ledger: BlockLedger, moves: dict[int, int], running: Iterable[Sequence]) -> None:
    drops = ledger.drops
    right(ledger, moves, running)
    ledger.drops = drops


def move_forgets_the_cache(right: Any, ledger: BlockLedger, moves: dict[int, int], running: Iterable[Sequence]) -> None:
    """Blocks that no row holds keep their old places."""
    cache, ledger.cache = ledger.cache, None
    right(ledger, moves, running)
    ledger.cache = cache


# Holders, and who goes first


def share_wakes_nothing(right: Any, cache: PrefixCache, block: Block) -> None:
    """A block that a row holds again may still be evicted."""


def hold_counts_no_row(right: Any, ledger: BlockLedger, blocks: list[Block | None]) -> None:
    right(ledger, blocks)
    for block in blocks[:1]:
        if block is not None and block.num_rows > 1:
            block.num_rows -= 1


def release_rests_the_first_block_first(right: Any, ledger: BlockLedger, sequence: Sequence) -> None:
    """Of a sequence the head is evicted first, without which the others are of no use."""
    sequence.blocks.reverse()
    right(ledger, sequence)


def evict_takes_what_was_used_last(right: Any, cache: PrefixCache) -> int:
    block, _ = cache._idle.popitem(last=True)
    return cache._forget(block)


def window_passes_nothing(right: Any, ledger: BlockLedger, sequence: Sequence) -> None:
    pass


def window_credits_nothing(right: Any, ledger: BlockLedger, sequence: Sequence) -> None:
    before = ledger.num_free_blocks
    right(ledger, sequence)
    ledger._budget.credit(before - ledger.num_free_blocks)


def reaches_back_always(right: Any, ledger: BlockLedger, sequence: Sequence, num_tokens: int) -> bool:
    """Also where a window has passed what a fork would see."""
    return True


def release_does_not_tell_the_device(right: Any, scheduler: Scheduler, sequence: Sequence) -> None:
    right(scheduler, sequence)
    scheduler._releases.pop()


def release_keeps_the_epoch(right: Any, scheduler: Scheduler, sequence: Sequence) -> None:
    """A result on its way is taken for the sequence's next row's."""
    right(scheduler, sequence)
    sequence.epoch -= 1


FAULTS = [
    Fault(BlockLedger, "advance", advance_publishes_before_the_step),
    Fault(scheduler_module, "find_start", start_forks_what_is_not_computed),
    Fault(BlockLedger, "fill", fill_publishes_what_older_weights_wrote),
    Fault(PrefixCache, "match", match_verifies_the_first_token),
    Fault(PrefixCache, "match", match_goes_on_after_a_gap),
    Fault(BlockKey, "after", key_forgets_what_came_before),
    Fault(BlockKey, "root", root_forgets_the_salt),
    Fault(scheduler_module, "keys_to_come", nobody_waits_for_a_prefix),
    Fault(Sequence, "num_reusable", all_tokens_are_reusable),
    Fault(BlockLedger, "release", release_credits_twice),
    Fault(BlockLedger, "release", release_credits_nothing),
    Fault(BlockLedger, "release", release_credits_what_is_in_flight),
    Fault(BlockLedger, "_let_go", let_go_credits_what_others_hold),
    Fault(BlockLedger, "debit", debit_counts_one_less),
    Fault(BlockLedger, "growth", growth_rounds_down),
    Fault(BlockLedger, "fill", fill_forgets_a_drop),
    Fault(BlockLedger, "discard", discard_forgets_the_drops),
    Fault(BlockLedger, "debit", debit_forgets_a_drop),
    Fault(BlockLedger, "take_drops", evicted_is_dropped_twice),
    Fault(BlockLedger, "move", move_forgets_the_drops),
    Fault(BlockLedger, "move", move_forgets_the_cache),
    Fault(PrefixCache, "wake", share_wakes_nothing),
    Fault(BlockLedger, "_hold", hold_counts_no_row),
    Fault(BlockLedger, "release", release_rests_the_first_block_first),
    Fault(PrefixCache, "evict", evict_takes_what_was_used_last),
    Fault(BlockLedger, "pass_window", window_passes_nothing),
    Fault(BlockLedger, "pass_window", window_credits_nothing),
    Fault(BlockLedger, "reaches_back", reaches_back_always),
    Fault(Scheduler, "_release", release_does_not_tell_the_device),
    Fault(Scheduler, "_release", release_keeps_the_epoch),
]
