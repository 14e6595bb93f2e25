"""Tells a callback what happens to requests, and remembers the last of it for the figures.

Events are told when the call in which they happened is over, so that the callback may call the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from pagedjax.events import RECENT_PREEMPTIONS, Event, EventName, Preemption, RecentTimes
from pagedjax.plan import Admission
from pagedjax.request import Request

logger = logging.getLogger(__name__)


class Observer:
    """Fills in the requests' metrics as it goes.

    Args:
        on_event: called with each Event; what it raises is logged. None: nobody listens.
    """

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.on_event = on_event
        self._untold: deque[Event] = deque()
        self.times = RecentTimes()
        self.preemptions: deque[Preemption] = deque(maxlen=RECENT_PREEMPTIONS)  # the last ones

    def added(self, request: Request) -> None:
        self._tell("added", request, num_tokens=len(request.prompt_ids))

    def started(self, admission: Admission) -> None:
        request = admission.sequence.request
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.monotonic()
        if request.beams is None or not admission.sequence.output_ids:  # beams change places all the time
            self._tell("started", request, admission.sequence.index, admission.num_tokens)

    def drew(self, request: Request, index: int) -> None:
        """A token has come, maybe the first."""
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.monotonic()
            self._tell("first_token", request, index)

    def preempted(self, preemptions: Iterable[Preemption], requests: dict[str, Request]) -> None:
        """These have given way; `requests` are the unfinished ones."""
        for preemption in preemptions:
            self.preemptions.append(preemption)
            request = requests.get(preemption.request_id)
            if request is not None:
                self._tell("preempted", request, preemption.index, preemption.num_tokens, preemption.reason)

    def finished(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        lengths = [len(sequence.output_ids) for sequence in request.sequences]
        self.times.add(request.metrics, max(lengths))
        self._tell("finished", request, num_tokens=sum(lengths), reason=request.sequences[0].finish_reason)

    def deliver(self) -> None:
        """Tells the callback what has happened since the last time."""
        while self._untold and self.on_event is not None:
            event = self._untold.popleft()
            try:
                self.on_event(event)
            except Exception:
                logger.exception("on_event failed at %r of request %r", event.name, event.request_id)

    def _tell(
        self, name: EventName, request: Request, index: int = 0, num_tokens: int = 0, reason: str | None = None
    ) -> None:
        if self.on_event is not None:
            self._untold.append(Event(name, request.request_id, time.monotonic(), index, num_tokens, reason))
