"""Outputs are made when they are taken: every finished one comes once, whatever callbacks and other callers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mock_engine
import pytest
from mock_engine import GREEDY

from pagedjax import LLM
from pagedjax.events import Event


@pytest.fixture
def llm() -> Iterator[LLM]:
    for llm in mock_engine.idle():
        yield llm
        llm._engine.observer.on_event = None


def finished(llm: LLM) -> Counter[str]:
    """How often each request comes out finished, until nothing is left."""
    found: Counter[str] = Counter()
    while llm.has_unfinished_requests():
        found.update(output.request_id for output in llm.step() if output.finished)
    return found


@pytest.mark.parametrize("name", ["first_token", "started"])
def test_a_request_that_a_callback_aborts_comes_once(llm: LLM, name: str) -> None:

    def abort(event: Event) -> None:
        if event.name == name and event.request_id == "aborted":
            llm.abort(event.request_id)

    llm._engine.observer.on_event = abort
    llm.add_request("aborted", [1, 2], GREEDY)
    llm.add_request("other", [3], GREEDY)
    assert finished(llm) == {"aborted": 1, "other": 1}
    assert not llm.step()


def test_a_callback_that_steps_takes_what_has_ended(llm: LLM) -> None:
    """It takes the step that ends the request; the step around it hands the request out no second time."""
    inner: Counter[str] = Counter()

    def step(event: Event) -> None:
        if event.name == "first_token" and not inner:
            inner["stepping"] += 1
            inner.update(finished(llm))

    llm._engine.observer.on_event = step
    llm.add_request("one", [1, 2], GREEDY)
    outer = finished(llm)
    del inner["stepping"]
    assert outer + inner == {"one": 1}
