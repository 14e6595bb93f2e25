"""The host's account of blocks: what each sequence holds, what the prefix cache keeps, and how many can be had.

It joins the bound on free blocks, the prefix cache and the blocks of running sequences. What a release gives back
follows from who else holds a block; a block is allotted by counting it and located by the device alone.

Invariants: a sequence with a row has one entry for each block of its `num_computed` tokens, but for a shared last one
that is not full: it computes a token in the next plan and copies that one, which counts as growth. A block counts the
entries that name it; a published block without entries rests in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.block import Block, BlockKey
from pagedjax.block_budget import BlockBudget
from pagedjax.prefix_cache import PrefixCache
from pagedjax.request import Sequence


class BlockLedger:
    """Accounts for the blocks of a pool.

    Args:
        num_usable_blocks: of the pool, without the null block.
        block_size: tokens a block.
        cache: where full blocks are published, or None: nothing is shared but by forks.
        window: keys a later query can see where every layer has a sliding window, else None.
        max_new_tokens: most tokens that a sequence gets in one inner step.
    """

    def __init__(
        self,
        num_usable_blocks: int,
        block_size: int,
        cache: PrefixCache | None,
        window: int | None,
        max_new_tokens: int,
    ) -> None:
        self.num_usable_blocks, self.block_size, self.window = num_usable_blocks, block_size, window
        self._max_new_tokens = max_new_tokens
        self.cache = cache
        self.weights_version = 0
        self.drops: list[int] = []  # ids whose cached reference the next plan gives back
        self._budget = BlockBudget(num_usable_blocks)
        self._num_in_flight = 0  # plans whose result has not come

    @property
    def num_free_blocks(self) -> int:
        """Lower bound on the free blocks, those of rows about to be released included."""
        return self._budget.available

    @property
    def num_available_blocks(self) -> int:
        """Free blocks, and those that only the cache holds."""
        return self._budget.available + self.num_idle_blocks

    @property
    def num_idle_blocks(self) -> int:
        return 0 if self.cache is None else self.cache.num_idle

    def reaches_back(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether it still has what the token after the first `num_tokens` sees, so that they can be forked from it."""
        first = 0 if self.window is None else max(num_tokens - self.window + 1, 0) // self.block_size
        return all(block is not None for block in sequence.blocks[first : self.num_blocks(num_tokens)])

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `num_tokens` more would take."""
        return self.num_blocks(sequence.num_computed + num_tokens) - len(sequence.blocks)

    def room(self, num_computed: int, num_tokens: int) -> int:
        """Most blocks that a sequence comes to hold at once, beyond those of its `num_computed` tokens, on the way to
        `num_tokens`: what a window passes, it gives back."""
        num_held = self.num_blocks(num_computed)
        grown = max(self.num_blocks(num_tokens) - num_held, 0)
        if self.window is None:
            return grown
        most = self.num_blocks(self.window + self._max_new_tokens - 1) + 1
        return min(grown, max(most - (num_held - self.num_passed(num_computed)), 0))

    def num_passed(self, num_tokens: int) -> int:
        """Leading blocks that no query sees any more once `num_tokens` are computed."""
        return 0 if self.window is None else max(num_tokens - self.window, 0) // self.block_size

    # Plans

    def debit(self, num_blocks: int) -> None:
        """Takes blocks that are available, idle ones if need be."""
        while num_blocks > self._budget.available and self.cache is not None and self.cache.num_idle:
            self.drops.append(self.cache.evict())
            self._budget.credit(1)
        self._budget.debit(num_blocks)

    def growths(self, num_tokens: dict[Sequence, int]) -> dict[Sequence, int]:
        """Blocks that so many more tokens of each sequence would take, of those that need any."""
        size = self.block_size
        return {
            sequence: self.growth(sequence, count)
            for sequence, count in num_tokens.items()
            if sequence.num_computed + count > len(sequence.blocks) * size
        }

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence has `num_tokens` computed from now on; its blocks have been debited, or counted by a result."""
        sequence.num_computed = num_tokens
        grown = self.num_blocks(num_tokens) - len(sequence.blocks)
        sequence.blocks += [Block(num_rows=1) for _ in range(grown)]

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens less: the device has stopped before them, and so has not taken the blocks for them, or may
        come to do so. The next result's count says what is free."""
        sequence.num_computed -= num_tokens
        num_left = self.num_blocks(sequence.num_computed)
        for block in sequence.blocks[num_left:]:
            assert block is not None  # just computed, so no window has passed it
            block.num_rows -= 1  # a fork may hold it already
        del sequence.blocks[num_left:]

    def advance_all(self, num_tokens: dict[Sequence, int], growths: dict[Sequence, int]) -> None:
        """Each sequence has so many tokens more, for which it needed these blocks."""
        for sequence, count in num_tokens.items():
            sequence.num_computed += count
        for sequence in growths:
            self.advance(sequence, sequence.num_computed)

    def share(self, sequence: Sequence, blocks: Iterable[Block | None], num_tokens: int) -> None:
        """Starts a sequence from `num_tokens` tokens in blocks that others hold."""
        sequence.blocks = list(blocks)[: num_tokens // self.block_size]
        sequence.num_computed = num_tokens
        self._hold(sequence.blocks)

    def resume(self, sequence: Sequence, blocks: list[Block | None], num_tokens: int) -> None:
        """A sequence goes on with `num_tokens` tokens in blocks that the device holds for it already."""
        for block in blocks:
            if block is not None:
                if block.num_rows == 0:
                    self._budget.debit(1)
                block.num_rows += 1
        sequence.blocks, sequence.num_computed = blocks, num_tokens

    def fork(self, sequences: list[Sequence], parents: list[int]) -> None:
        """Sequence i goes on from what sequence `parents[i]` holds; all parents have equally many tokens.

        The first child of a parent keeps a last block that is not full, the others copy it.
        """
        num_tokens = sequences[parents[0]].num_computed
        lines: list[tuple[list[Block | None], list[BlockKey], int]] = []
        for place, parent in enumerate(parents):
            shares_tail = parent in parents[:place]
            blocks = sequences[parent].blocks[: num_tokens // self.block_size if shares_tail else None]
            lines.append((blocks, list(sequences[parent].keys), sequences[parent].keys_version))
        for blocks, _, _ in lines:
            self._hold(blocks)
        for sequence, (blocks, keys, version) in zip(sequences, lines, strict=True):
            self._budget.credit(sum(self._let_go(block) for block in sequence.blocks if block is not None))
            sequence.blocks, sequence.num_computed = blocks, num_tokens
            sequence.keys, sequence.keys_version = keys, version

    def release(self, sequence: Sequence) -> None:
        """Gives back what a sequence holds, the last block first.

        Nothing is credited twice: what a plan in flight may fill, `discard` credits when the cache's reference is given
        up; what it may find behind the window is in its result's count. Where that is too little, the next result or
        `settle_idle` puts it right.
        """
        freed = 0
        for block in reversed(sequence.blocks):
            if block is not None and self._let_go(block):
                fills = self.cache is not None and block.block_id is None
                freed += not (self._num_in_flight and (fills or self.window is not None))
        self._budget.credit(freed)
        sequence.blocks = []
        sequence.num_computed = 0

    def dispatch(self) -> None:
        """A plan that brings a result goes to the device."""
        self._budget.dispatch()
        self._num_in_flight += 1

    def take_drops(self) -> list[int]:
        drops, self.drops = self.drops, []
        return drops

    # Results

    def settle(self, num_free_blocks: int) -> None:
        """Takes the device's count of free blocks from the oldest plan's result."""
        self._budget.settle(num_free_blocks)
        self._num_in_flight -= 1

    def settle_idle(self) -> None:
        """No row is taken: unless a result is on its way, what the cache does not hold is free."""
        if not self._num_in_flight:
            self._budget.reset(self.num_usable_blocks - self.num_idle_blocks)

    def fill(self, sequence: Sequence, first_block: int, block_ids: list[int]) -> None:
        """Blocks of a sequence have become full, and the device has taken a reference to each for the cache.

        They are published, unless others with the same tokens are, or their tokens are not known here (a stop string
        has ended the text before the device's last token).
        """
        if not block_ids:
            return
        current = sequence.weights_version == self.weights_version
        keys = self.keys(sequence, first_block + len(block_ids)) if current else []
        for index, block_id in enumerate(block_ids, first_block):
            block = sequence.blocks[index]
            assert block is not None
            block.block_id = block_id
            if self.cache is None or index >= len(keys) or not self.cache.publish(keys[index], block):
                self.drops.append(block_id)

    def discard(self, block_ids: list[int]) -> None:
        """Blocks that a sequence had filled when it was given up: nobody holds them but the cache's reference."""
        self.drops += block_ids
        self._budget.credit(len(block_ids))

    def pass_window(self, sequence: Sequence) -> None:
        """Mirrors what the device has given back behind the window.

        Its count of free blocks includes them already, but for one that was full in that very step and not published:
        the cache's reference is still to be dropped.
        """
        for index in reversed(range(self.num_passed(sequence.num_computed))):
            block = sequence.blocks[index]
            if block is None:
                break  # and all before it
            if self._let_go(block) and block.block_id in self.drops:
                self._budget.credit(1)
            sequence.blocks[index] = None

    # The cache

    def keys(self, sequence: Sequence, num_blocks: int) -> list[BlockKey]:
        """Keys of a sequence's leading full blocks under the present weights, at most `num_blocks`."""
        if sequence.keys_version != self.weights_version:
            sequence.keys, sequence.keys_version = [], self.weights_version
        keys, size = sequence.keys, self.block_size
        if len(keys) < min(num_blocks, sequence.num_tokens // size):
            root = BlockKey.root(self.weights_version, sequence.params.cache_salt)
            for index in range(len(keys), min(num_blocks, sequence.num_tokens // size)):
                parent = keys[-1].digest if keys else root
                keys.append(BlockKey.after(parent, sequence.ids_between(index * size, (index + 1) * size)))
        return keys[:num_blocks]

    def key(self, sequence: Sequence, index: int) -> BlockKey:
        """Key of a sequence's full block number `index` under the present weights."""
        if sequence.keys_version != self.weights_version or index >= len(sequence.keys):
            self.keys(sequence, index + 1)
        return sequence.keys[index]

    def change_weights(self) -> None:
        """What has been computed so far belongs to older weights: none of it can be found any more."""
        self.weights_version += 1
        if self.cache is not None:
            idle = self.cache.num_idle
            self.drops += self.cache.clear()
            self._budget.credit(idle)

    @property
    def fragmentation(self) -> float:
        """Of an idle pool: the share of gaps among the blocks up to the last cached one."""
        ids = self.cache.block_ids if self.cache is not None else []
        return 1 - len(ids) / max(ids) if ids else 0.0

    def move(self, moves: dict[int, int], running: Iterable[Sequence]) -> None:
        """Blocks have changed places in the pool, from id to id."""
        self.drops = [moves.get(block_id, block_id) for block_id in self.drops]
        blocks = {block for sequence in running for block in sequence.blocks if block is not None}
        if self.cache is not None:
            blocks.update(self.cache.blocks)
        for block in blocks:
            if block.block_id is not None:
                block.block_id = moves.get(block.block_id, block.block_id)

    def reset(self) -> None:
        """The device's state is fresh; no sequence has a row."""
        self.drops = []
        if self.cache is not None:
            self.cache.clear()
        self._budget.reset(self.num_usable_blocks)
        self._num_in_flight = 0

    def _hold(self, blocks: list[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                if block.num_rows == 0:
                    assert self.cache is not None
                    self.cache.wake(block)
                block.num_rows += 1

    def _let_go(self, block: Block) -> bool:
        """Takes one row off a block; whether the block is free now."""
        block.num_rows -= 1
        if block.num_rows == 0 and block.key is not None:
            assert self.cache is not None
            self.cache.rest(block)
        return block.num_rows == 0 and block.key is None
