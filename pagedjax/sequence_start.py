"""Where a waiting sequence starts from: a sibling's row that is forked, blocks of the prefix cache, or nothing.

A sequence whose prefix is just being computed by an earlier one waits for it instead of computing it again. It waits as
long as the other goes on, which is a bounded time.
"""

from __future__ import annotations

import dataclasses

from pagedjax.block import Block, BlockKey
from pagedjax.block_ledger import BlockLedger
from pagedjax.plan import StepPlan
from pagedjax.request import Sequence


@dataclasses.dataclass(frozen=True)
class Start:
    """What a sequence starts from."""

    blocks: list[Block | None]  # of somebody else; None where a window has passed
    num_tokens: int  # how many of their tokens it takes over
    parent: int | None  # the row they are forked from; None: they come from the prefix cache


def find_start(
    ledger: BlockLedger, sequence: Sequence, tokens: dict[Sequence, int], plan: StepPlan, coming: set[BlockKey]
) -> Start | None:
    """The start that spares a sequence most, or None: it should wait for a better one.

    Args:
        ledger: of the pool.
        sequence: waiting, the next to start.
        tokens: that each running sequence computes in the plan; they can be taken over from the next plan on.
        plan: as made so far.
        coming: `keys_to_come` of all these tokens.
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
        if starting or sibling.num_computed - tokens.get(sibling, 0) < shared:
            wait = True
        elif ledger.reaches_back(sibling, shared):
            return Start(list(sibling.blocks), shared, sibling.row)
    return None if wait else start


def keys_to_come(ledger: BlockLedger, tokens: dict[Sequence, int]) -> set[BlockKey]:
    """Keys of the full blocks, of tokens they know, that running sequences had not filled before this plan.

    Args:
        ledger: of the pool; it has a cache.
        tokens: that each computes in the plan; its `num_computed` includes them.
    """
    keys: set[BlockKey] = set()
    for sequence, count in tokens.items():
        first = (sequence.num_computed - count) // ledger.block_size
        num_known = sequence.num_tokens // ledger.block_size
        if first < num_known and sequence.weights_version == ledger.weights_version:
            keys.update(ledger.keys(sequence, num_known)[first:])
    return keys
