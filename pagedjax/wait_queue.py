"""Sequences that wait for a row, in order of arrival.

One that was preempted comes back in its old place. What an operation costs does not grow with the queue but by its
logarithm, so that a hundred thousand requests can be handed in at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pagedjax.request import Sequence


class WaitQueue:
    """A heap by arrival, with removal from anywhere: what is removed stays in the heap until it reaches the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []  # arrivals differ, so sequences are never compared
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival, in a time that grows with the queue."""
        return (sequence for _, sequence in sorted(self._heap) if sequence in self._members)

    @property
    def first(self) -> Sequence:
        """The earliest arrival; the queue must not be empty."""
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place; it must not wait already, nor have been removed before."""
        heapq.heappush(self._heap, (sequence.arrival, sequence))
        self._members.add(sequence)

    def pop(self) -> Sequence:
        """Takes the earliest arrival out."""
        sequence = self.first
        heapq.heappop(self._heap)
        self._members.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out for good; one that does not wait is fine."""
        self._members.discard(sequence)
