"""Hands a step's outputs to whoever the requests belong to.

Callers of `generate` and `stream` claim their requests, and may be interleaved with each other and with `step`: any of
them may take the step that moves another's request, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.engine import Engine
from pagedjax.outputs import RequestOutput

Box = dict[str, RequestOutput]  # the latest output not yet taken, by request id


class Outbox:
    """Takes the engine's steps and sorts what comes out.

    Args:
        engine: whose outputs are handed out.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boxes: dict[str, Box] = {}  # of claimed requests, by request id
        self._unclaimed: list[RequestOutput] = []
        self._taken: dict[str, RequestOutput] = {}  # finished ones, while their claims last

    @property
    def held(self) -> list[RequestOutput]:
        """Outputs that would be lost with this process: nobody has taken them, or a caller that is not done yet."""
        boxes = {id(box): box for box in self._boxes.values()}
        return [*self._taken.values(), *self._unclaimed, *(output for box in boxes.values() for output in box.values())]

    def bring(self, outputs: Iterable[RequestOutput]) -> None:
        """Takes over what another process has held."""
        self._unclaimed += outputs

    @property
    def has_unclaimed(self) -> bool:
        return bool(self._unclaimed)

    def claim(self, ids: Iterable[str]) -> Box:
        """Reserves the outputs of these requests for the box that is returned."""
        box: Box = {}
        self._boxes |= dict.fromkeys(ids, box)
        return box

    def take(self, box: Box) -> list[RequestOutput]:
        """The latest outputs in a box; takes a step if there are none."""
        if not box:
            self._step()
        outputs = list(box.values())
        self._taken |= {output.request_id: output for output in outputs if output.finished}
        box.clear()
        return outputs

    def take_unclaimed(self) -> list[RequestOutput]:
        """Takes a step; what nobody has claimed since the last time."""
        self._step()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def give_up(self, ids: Iterable[str]) -> None:
        """Ends a claim; requests that still run are aborted, and their outputs dropped."""
        for request_id in ids:
            self._boxes.pop(request_id, None)
            self._taken.pop(request_id, None)
            self._engine.discard(request_id)

    def _step(self) -> None:
        outputs = self._engine.step()
        newer = {output.request_id for output in outputs}
        # A newer output replaces an unfinished older one; a finished one stands for itself, its id may be in use again.
        self._unclaimed = [old for old in self._unclaimed if old.finished or old.request_id not in newer]
        for output in outputs:
            if output.request_id in self._boxes:
                self._boxes[output.request_id][output.request_id] = output
            else:
                self._unclaimed.append(output)
