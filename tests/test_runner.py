"""pagedjax.runner: the set of programs is closed, and a step takes the least that holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
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
    llm.defragment()
    assert llm.plan.programs == ("rows", "defragment", "step[32]")
    assert set(llm._runner.compiled) == set(llm.plan.programs)
    compile_seconds = llm.stats().compile_seconds
    llm.warmup()
    assert llm.stats().compile_seconds == compile_seconds
    monkeypatch.setattr(llm._runner, "config", dataclasses.replace(llm.config, strict_compile=True))
    assert ids(generate(llm, [[1]])[0]) == Oracle([1], GREEDY).generate()
    monkeypatch.setattr(llm._runner, "_programs", {})
    with pytest.raises(RuntimeError, match="program rows is not compiled, and strict_compile is on"):
        generate(llm, [[1]])


def test_the_pool_is_made_once(llm: LLM) -> None:
    """A device that the pool nearly fills has no room for a second one while the engine starts."""
    memory = jax.jit(llm._runner._zero_state).lower().compile().memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes > llm._runner.state.kv_pages.pool.nbytes
    assert memory.temp_size_in_bytes < llm._runner.state.kv_pages.pool.nbytes / 10


@pytest.mark.parametrize(
    ("budget", "ladder"),
    [(1, (1,)), (4, (1, 4)), (5, (1, 4, 5)), (65, (1, 4, 16, 64, 65)), (317, (1, 4, 16, 64, 128, 256, 317))],
)
def test_each_step_takes_the_least_program_that_holds_it(
    monkeypatch: pytest.MonkeyPatch, budget: int, ladder: tuple[int, ...]
) -> None:
    llm = LLM(
        mock_model.MockDecoder(), **mock_engine.OPTIONS | {"max_num_batched_tokens": budget, "batch_invariant": False}
    )
    assert llm.plan.programs == ("rows", "defragment", *(f"step[{size}]" for size in ladder))
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


def test_every_size_up_to_a_budget_of_317_has_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_num_batched_tokens": 317, "max_num_seqs": 8, "num_blocks": 200, "batch_invariant": False}
    llm = LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | sizes)
    names: list[str] = []

    def stop(name: str) -> Any:
        names.append(name)
        raise KeyboardInterrupt  # no failure: nothing ends with "error"

    monkeypatch.setattr(llm._runner, "change_rows", lambda plan: None)
    monkeypatch.setattr(llm._runner, "_program", stop)
    for total in (1, 4, 5, 16, 17, 63, 64, 65, 255, 256, 257, 316, 317):
        starts = range(0, total, 47)
        for index, start in enumerate(starts):  # no two begin alike: nothing waits for a prefix
            llm.add_request(str(start), [index] * min(47, total - start), SamplingParams(max_tokens=1))
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        for start in starts:
            llm._engine.discard(str(start))
        assert names.pop() == f"step[{min(s for s in llm.config.token_ladder if s >= total)}]"
