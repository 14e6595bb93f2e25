"""What happens to requests, as values: for a callback, and for the figures of `LLM.stats`."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Literal

from pagedjax.outputs import RequestMetrics

EventName = Literal["added", "started", "first_token", "preempted", "finished"]
PreemptionReason = Literal["blocks", "weights", "failure"]

RECENT_REQUESTS = 1000
RECENT_PREEMPTIONS = 100


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that has happened to a request.

    Attributes:
        name: "added", "started" (got a row), "first_token", "preempted" or "finished".
        request_id: whose.
        time: in seconds on `time.monotonic`'s clock.
        index: which of its samples; 0 for "added" and "finished", which concern all.
        num_tokens: "added": of the prompt; "started": found in the cache or shared with a sample of the same request;
            "preempted": computed and lost, but for what the cache keeps; "finished": generated, by all samples.
        reason: of "preempted": "blocks" (the pool was full), "weights" (they changed) or "failure" (a step failed); of
            "finished": the first sample's finish_reason.
    """

    name: EventName
    request_id: str
    time: float
    index: int = 0
    num_tokens: int = 0
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Preemption:
    """A running sample that had to give its row and blocks back, to be computed again later."""

    request_id: str
    index: int
    num_tokens: int  # that it had computed
    reason: PreemptionReason


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds over the last finished requests; None while there are none."""

    p50: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, values: deque[float]) -> Times:
        if not values:
            return cls()
        ordered = sorted(values)
        return cls(*(ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.95)))


class RecentTimes:
    """How long the last `RECENT_REQUESTS` finished requests took."""

    def __init__(self) -> None:
        self.queue: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self.first_token: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self.inter_token: deque[float] = deque(maxlen=RECENT_REQUESTS)

    def add(self, metrics: RequestMetrics, num_tokens: int) -> None:
        """Counts a finished request whose longest sample has `num_tokens` tokens."""
        if metrics.first_scheduled_time is not None:
            self.queue.append(metrics.first_scheduled_time - metrics.arrival_time)
        if metrics.first_token_time is not None and metrics.finished_time is not None:
            self.first_token.append(metrics.first_token_time - metrics.arrival_time)
            if num_tokens > 1:
                self.inter_token.append((metrics.finished_time - metrics.first_token_time) / (num_tokens - 1))
