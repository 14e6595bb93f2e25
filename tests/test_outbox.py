"""pagedjax.outbox: an output is made when it is taken, and shows the request as it then stands."""

from __future__ import annotations

from collections.abc import Iterator

import mock_engine
import pytest
from mock_engine import GREEDY, finish, generate, ids
from mock_model import Oracle

from pagedjax import LLM
from pagedjax.request import Request


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


def test_what_others_steps_have_moved_comes_once_and_up_to_date(llm: LLM) -> None:
    llm.add_request("a", [1], GREEDY)
    generate(llm, [[2]])
    (output,) = llm.step()
    assert (output.request_id, ids(output)) == ("a", Oracle([1], GREEDY).generate())
    assert not llm.has_unfinished_requests()


def test_an_output_does_not_change_any_more(llm: LLM) -> None:
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1], GREEDY)
    first, second = llm.step()[0], llm.step()[0]
    assert len(ids(first)) + 1 == len(ids(second))
    assert ids(finish(llm)["a"])[:2] == ids(second)[:2]
    assert len(ids(first)) == 1


def test_outputs_that_nobody_takes_are_not_made(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    made: list[str] = []
    output = Request.output
    monkeypatch.setattr(Request, "output", lambda request: made.append(request.request_id) or output(request))
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1], GREEDY)
    generate(llm, [[2]])
    assert "a" not in made
    finish(llm)
    assert made.count("a") == 1
