"""Where a waiting sequence starts from: a sibling's row that is forked, blocks of the prefix cache, or nothing.

A sequence whose prefix is just being computed by an earlier one waits for it instead of computing it again. It waits as
long as the other goes on, which is a bounded time.
"""

from __future__ import annotations

import dataclasses

from pagedjax.block import Block, BlockKey
from pagedjax.block_ledger import BlockLedger
from pagedjax.plan import Scheduled, StepPlan
from pagedjax.request import Sequence


@dataclasses.dataclass(frozen=True)
class Start:
    """What a sequence starts from."""

    blocks: list[Block | None]  # of somebody else; None where a window has passed
    num_tokens: int  # how many of their tokens it takes over
    parent: int | None  # the row they are forked from; None: they come from the prefix cache


def find_start(ledger: BlockLedger, sequence: Sequence, plan: StepPlan, coming: set[BlockKey]) -> Start | None:
    """The start that spares a sequence most, or None: it should wait for a better one.

    Args:
        ledger: of the pool.
        sequence: waiting, the next to start.
        plan: as made so far; what it computes can be taken from the next plan on.
        coming: `keys_to_come` of everything in the plan.
    """
    limit = sequence.num_reusable
    start = Start([], 0, None)
    if ledger.cache is not None:
        # Keys are made as they are asked for: of a long prompt that is held, the first few.
        num_keys = limit // ledger.block_size
        blocks = ledger.cache.match(ledger.key(sequence, index) for index in range(num_keys))
        if len(blocks) < num_keys and ledger.key(sequence, len(blocks)) in coming:
            return None
        num_tokens = len(blocks) * ledger.block_size
        passed = ledger.num_passed(num_tokens)  # need not be woken: no query will see them
        start = Start([None] * passed + list(blocks[passed:]), num_tokens, None)
    shared = len(sequence.request.prompt_ids) - 1  # the last prompt token is computed by each: its draw differs
    if start.num_tokens >= min(shared, limit) or shared > limit:
        return start
    wait = False
    for sibling in sequence.request.sequences:
        if sibling.row is None or sibling.weights_version != ledger.weights_version:
            continue
        # A fork takes what the device holds before this plan: of a row that this plan starts, nothing.
        starting = any(admission.sequence is sibling for admission in plan.admits)
        if starting or plan.scheduled[sibling.row].first_position < shared:
            wait = True
        elif ledger.reaches_back(sibling, shared):
            return Start(list(sibling.blocks), shared, sibling.row)
    return None if wait else start


def keys_to_come(ledger: BlockLedger, part: Scheduled) -> list[BlockKey]:
    """Keys of the full blocks, of tokens it knows, that a running sequence has not filled before this plan."""
    sequence, first = part.sequence, part.first_position // ledger.block_size
    num_known = sequence.num_tokens // ledger.block_size
    current = sequence.weights_version == ledger.weights_version
    if ledger.cache is None or first == num_known or not current:
        return []
    return ledger.keys(sequence, num_known)[first:]
