"""How much of an engine's time the device waits for the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Measures the wall time of steps, and of that the part in which the device had nothing to do.

    Attributes:
        step_seconds: within `step`.
        idle_seconds: of those, while no program of a step was on its way; a program counts until the host has its
            result, so one that is done before anybody looks counts as running.
    """

    def __init__(self) -> None:
        self.step_seconds = self.idle_seconds = 0.0
        self._num_in_flight = 0
        self._idle_since = 0.0

    @property
    def host_share(self) -> float:
        """0 to 1."""
        return self.idle_seconds / self.step_seconds if self.step_seconds else 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; not within one."""
        began = self._idle_since = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self.step_seconds += now - began
            if not self._num_in_flight:
                self.idle_seconds += now - self._idle_since

    def started(self) -> None:
        """A program has gone to the device."""
        if not self._num_in_flight:
            self.idle_seconds += time.perf_counter() - self._idle_since
        self._num_in_flight += 1

    def fetched(self) -> None:
        """The result of the oldest one is there."""
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._idle_since = time.perf_counter()

    def reset(self) -> None:
        """Nothing is on its way any more."""
        self._num_in_flight = 0
        self._idle_since = time.perf_counter()
