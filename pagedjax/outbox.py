"""Hands a step's outputs to whoever the requests belong to.

Callers of `generate` and `stream` claim their requests, and may be interleaved with each other and with `step`: any of
them may take the step that moves another's request, and nothing is lost. What is kept are the requests; an output,
which copies all tokens so far, is made when it is taken, and shows the request as it then stands.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.engine import Engine
from pagedjax.outputs import RequestOutput
from pagedjax.request import Request

Box = dict[str, Request]  # those with an output not yet taken, by id


class Outbox:
    """Takes the engine's steps and sorts what comes out.

    Args:
        engine: whose outputs are handed out.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boxes: dict[str, Box] = {}  # of claimed requests, by request id
        self._unclaimed: dict[Request, None] = {}
        self._brought: list[RequestOutput] = []  # of another process
        self._taken: dict[str, RequestOutput] = {}  # finished ones, while their claims last

    @property
    def held(self) -> list[RequestOutput]:
        """Outputs that would be lost with this process: nobody has taken them, or a caller that is not done yet."""
        boxes = {id(box): box for box in self._boxes.values()}
        in_boxes = (request for box in boxes.values() for request in box.values())
        return [*self._taken.values(), *self._outputs([*self._unclaimed, *in_boxes, *self._engine.leaving])]

    def bring(self, outputs: Iterable[RequestOutput]) -> None:
        """Takes over what another process has held."""
        self._brought += outputs

    @property
    def has_unclaimed(self) -> bool:
        return bool(self._brought or self._unclaimed)

    def claim(self, ids: Iterable[str]) -> Box:
        """Reserves the outputs of these requests for the box that is returned."""
        box: Box = {}
        self._boxes |= dict.fromkeys(ids, box)
        return box

    def take(self, box: Box) -> list[RequestOutput]:
        """The latest outputs in a box; takes a step if there are none."""
        if not box:
            self._step()
        outputs = [request.output() for request in box.values()]
        self._taken |= {output.request_id: output for output in outputs if output.finished}
        box.clear()
        return outputs

    def take_unclaimed(self) -> list[RequestOutput]:
        """Takes a step; what nobody has claimed since the last time."""
        self._step()
        outputs = self._outputs(self._unclaimed)
        self._brought, self._unclaimed = [], {}
        return outputs

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """What was brought, and the outputs of requests, of each one."""
        requests = dict.fromkeys(requests)
        newer = {request.request_id for request in requests}
        # An unfinished output gives way to a newer one; a finished one stands for itself, its id may be in use again.
        brought = [output for output in self._brought if output.finished or output.request_id not in newer]
        return brought + [request.output() for request in requests]

    def give_up(self, ids: Iterable[str]) -> None:
        """Ends a claim; requests that still run are aborted, and their outputs dropped."""
        for request_id in ids:
            self._boxes.pop(request_id, None)
            self._taken.pop(request_id, None)
            self._engine.discard(request_id)

    def _step(self) -> None:
        for request in self._engine.step():
            if request.request_id in self._boxes:
                self._boxes[request.request_id][request.request_id] = request
            else:
                self._unclaimed[request] = None
