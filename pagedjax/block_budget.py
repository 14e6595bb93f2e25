"""The host's lower bound on free blocks.

The device has the truth; between results the host debits what it plans at once and credits only what it knows to be
exclusive. Every result replaces the bound by its own count, adjusted by the plans that it does not reflect yet.
Invariant: the bound never exceeds the truth, and equals it when nothing is in flight.
"""

from __future__ import annotations

from collections import deque


class BlockBudget:
    """Counts blocks, never ids.

    Args:
        num_free_blocks: free blocks of the idle pool (the null block is not among them).
    """

    def __init__(self, num_free_blocks: int) -> None:
        self.available = num_free_blocks
        self._open = 0  # net change by the plan being made
        self._in_flight: deque[int] = deque()  # net change of each plan whose result has not come

    def debit(self, num_blocks: int) -> None:
        if num_blocks > self.available:
            raise RuntimeError(f"planned {num_blocks} blocks with {self.available} available")
        self.available -= num_blocks
        self._open -= num_blocks

    def credit(self, num_blocks: int) -> None:
        self.available += num_blocks
        self._open += num_blocks

    def dispatch(self) -> None:
        """The plan being made goes to the device."""
        self._in_flight.append(self._open)
        self._open = 0

    def settle(self, num_free_blocks: int) -> None:
        """The oldest plan in flight has come back with the device's own count."""
        self._in_flight.popleft()
        self.available = num_free_blocks + sum(self._in_flight) + self._open

    def reset(self, num_free_blocks: int) -> None:
        self.__init__(num_free_blocks)  # type: ignore[misc]
