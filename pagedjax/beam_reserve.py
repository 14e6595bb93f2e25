"""What is set aside for the beam searches that run, so that none of them has to give way half done.

A search has one row until it forks for the first time, and its beams need ever more blocks. Its rows, and the most
blocks it may come to hold, are kept from everybody else from the start.
"""

from __future__ import annotations

from pagedjax.block_ledger import BlockLedger
from pagedjax.request import Request


class BeamReserve:
    """Knows the running searches.

    Args:
        ledger: accounts for the blocks.
    """

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self.running: dict[Request, None] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks set aside that no beam holds yet."""
        total = 0
        for request in self.running:
            held = {block for sequence in request.sequences for block in sequence.blocks}
            total += max(self.most_blocks(request) - len(held - {None}), 0)
        return total

    @property
    def num_rows(self) -> int:
        """Rows set aside that no beam has yet."""
        return sum(sequence.row is None for request in self.running for sequence in request.sequences)

    def most_blocks(self, request: Request) -> int:
        """Blocks that a search may hold at once: the prompt's full ones, and all others once a beam."""
        width, num_tokens = len(request.sequences), request.sequences[0].end_len - 1
        num_full = len(request.prompt_ids) // self._ledger.block_size
        num_own = self._ledger.num_blocks(num_tokens) - num_full
        return min(num_full + num_own * width, self._ledger.room(0, num_tokens) * width)

    def check_fits(self, request: Request, max_running: int) -> None:
        """Raises ValueError, with the arithmetic and what to change, if a search could never run."""
        width, end_len = len(request.sequences), request.sequences[0].end_len
        if width > max_running:
            raise ValueError(
                f"a beam search of width {width} needs as many rows, and {max_running} can run at once; raise "
                "max_num_seqs and max_num_batched_tokens, or lower the width"
            )
        needed, usable = self.most_blocks(request), self._ledger.num_usable_blocks
        if needed > usable:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens and {width} beams up to {end_len} tokens need up to {needed} "
                f"blocks of {self._ledger.block_size} tokens, and the pool has {usable} usable ones; raise num_blocks "
                "or kv_cache_memory_bytes, or lower max_tokens or the width"
            )
