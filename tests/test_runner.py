"""pagedjax.runner: the set of programs is closed, and a step takes the least that holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mock_engine
import mock_model
import pytest
from mock_engine import GREEDY, generate, ids
from mock_model import Oracle

from pagedjax import LLM, SamplingParams


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


def test_the_program_set_is_closed(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    generate(llm, [[1]])
    assert llm.plan.programs == llm._runner.compiled == ("rows", "step[32]")
    compile_seconds = llm.stats().compile_seconds
    llm.warmup()
    assert llm.stats().compile_seconds == compile_seconds
    monkeypatch.setattr(llm._runner, "config", dataclasses.replace(llm.config, strict_compile=True))
    assert ids(generate(llm, [[1]])[0]) == Oracle([1], GREEDY).generate()
    monkeypatch.setattr(llm._runner, "_programs", {})
    with pytest.raises(RuntimeError, match="program rows is not compiled, and strict_compile is on"):
        generate(llm, [[1]])


@pytest.mark.parametrize(
    ("budget", "ladder"), [(1, (1,)), (4, (1, 4)), (5, (1, 4, 5)), (317, (1, 4, 16, 64, 256, 317))]
)
def test_each_step_takes_the_least_program_that_holds_it(
    monkeypatch: pytest.MonkeyPatch, budget: int, ladder: tuple[int, ...]
) -> None:
    llm = LLM(
        mock_model.MockDecoder(), **mock_engine.OPTIONS | {"max_num_batched_tokens": budget, "batch_invariant": False}
    )
    assert llm.plan.programs == ("rows", *(f"step[{size}]" for size in ladder))
    names: list[str] = []

    def stop(name: str) -> Any:
        names.append(name)
        raise InterruptedError

    monkeypatch.setattr(llm._runner, "change_rows", lambda plan: None)
    monkeypatch.setattr(llm._runner, "_program", stop)
    for total in range(1, min(budget, 20) + 1):
        llm.add_request("a", [1] * total, SamplingParams(max_tokens=1))
        with pytest.raises(InterruptedError):
            llm.step()
        llm._engine.discard("a")
        assert names.pop() == f"step[{min(size for size in ladder if size >= total)}]"
