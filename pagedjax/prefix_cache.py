"""The prefix cache: full blocks by what they hold, so that a later sequence with the same beginning starts from them.

A block is published after the step that filled it, and the device has taken the cache's reference in that very step. A
block that no row holds any more stays as long as nobody needs its place: these idle blocks count as available, and the
one used longest ago goes first; of one sequence's, the last, without which the others are still of use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pagedjax.block import Block, BlockKey


class PrefixCache:
    """Published blocks."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, Block] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()  # no row holds them; oldest first

    @property
    def num_idle(self) -> int:
        """Blocks that nobody but the cache holds."""
        return len(self._idle)

    @property
    def blocks(self) -> Iterable[Block]:
        """All published blocks."""
        return self._blocks.values()

    @property
    def block_ids(self) -> list[int]:
        """Where all published blocks lie."""
        return [block.block_id for block in self._blocks.values() if block.block_id is not None]

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def match(self, keys: Iterable[BlockKey]) -> list[Block]:
        """The published blocks of the leading keys, up to the first that is missing."""
        blocks = []
        for key in keys:
            if key not in self._blocks:
                break
            blocks.append(self._blocks[key])
        return blocks

    def publish(self, key: BlockKey, block: Block) -> bool:
        """Makes a full block findable; False if one with the same content is published already."""
        if key in self._blocks:
            return False
        self._blocks[key] = block
        block.key = key
        if block.num_rows == 0:
            self.rest(block)
        return True

    def rest(self, block: Block) -> None:
        """The last row has given a published block back."""
        self._idle[block] = None

    def wake(self, block: Block) -> None:
        """A row is about to hold an idle block."""
        del self._idle[block]

    def evict(self) -> int:
        """Forgets the idle block used longest ago; returns its id, for the device to drop."""
        block, _ = self._idle.popitem(last=False)
        return self._forget(block)

    def clear(self) -> list[int]:
        """Forgets everything; returns the ids, for the device to drop. Rows keep what they hold."""
        self._idle.clear()
        return [self._forget(block) for block in list(self._blocks.values())]

    def _forget(self, block: Block) -> int:
        assert block.key is not None
        assert block.block_id is not None
        del self._blocks[block.key]
        block.key = None
        return block.block_id
