"""Steps, tokenizers and people that break in: what was running is right afterwards, or ends with "error"."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mock_engine
import mock_model
import pytest
from mock_engine import GREEDY, SEEDED, Pieces, finish, generate, ids, use_tokenizer
from mock_model import VOCAB, Oracle

from pagedjax import LLM
from pagedjax.plan import StepPlan, StepResult


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


def break_step(monkeypatch: pytest.MonkeyPatch, llm: LLM, failures: list[BaseException | None]) -> None:
    """The step program raises these, one a call (None: it works), after it has consumed the donated state."""
    (name,) = (name for name in llm.plan.programs if name.startswith("step"))
    program = llm._runner._program(name)

    def broken(*args: Any) -> Any:
        result = program(*args)
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        return result

    monkeypatch.setitem(llm._runner._programs, name, broken)


def test_a_step_that_fails_once(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """With requests that decode, prefill in chunks, and wait; all come out right, and so does a new one."""
    mock_engine.pace(llm, budget=6, decode_steps=2)
    prompts = {"decode": [1, 2], "chunk": [3] * 12, "wait": [4] * 20}
    for request_id, prompt in prompts.items():
        llm.add_request(request_id, prompt, dataclasses.replace(SEEDED, prompt_logprobs=1))
    for _ in range(2):
        llm.step()
    break_step(monkeypatch, llm, [RuntimeError("device on fire")])
    with pytest.raises(RuntimeError, match="device on fire"):
        llm.step()
    prompts["new"] = [5]
    llm.add_request("new", [5], SEEDED)
    outputs = finish(llm)
    for request_id, prompt in prompts.items():
        assert ids(outputs[request_id]) == Oracle(prompt, SEEDED).generate()
    for request_id in ("decode", "chunk", "wait"):
        found = outputs[request_id].prompt_logprobs
        assert found is not None
        mock_model.check_logprobs(
            found[1:], 1, mock_model.raw_logits(prompts[request_id])[:-1], prompts[request_id][1:]
        )


def test_an_abort_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The row is given up once, its late token is dropped, and nobody else's."""
    mock_engine.pace(llm, decode_steps=1)
    run, calls = llm._runner.run, iter(range(100))

    def run_and_abort(plan: StepPlan) -> StepResult:
        result = run(plan)
        if next(calls) == 4:
            llm.abort("a")
        return result

    monkeypatch.setattr(llm._runner, "run", run_and_abort)
    llm.add_request("a", [1, 2], SEEDED)
    llm.add_request("b", [3], SEEDED)
    outputs = finish(llm)
    assert outputs["a"].outputs[0].finish_reason == "abort"
    assert ids(outputs["a"]) == Oracle([1, 2], SEEDED).generate()[:4]
    assert ids(outputs["b"]) == Oracle([3], SEEDED).generate()


def test_a_failing_generate_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    break_step(monkeypatch, llm, [None, RuntimeError("device on fire")])
    with pytest.raises(RuntimeError, match="device on fire"):
        generate(llm, [[1], [2]])
    assert not llm.has_unfinished_requests()
    llm.audit()
    assert ids(generate(llm, [[1]])[0]) == Oracle([1], GREEDY).generate()


def test_steps_that_fail_twice_end_what_was_running(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    for index in range(6):
        llm.add_request(f"running {index}", [index + 1, 2], GREEDY)
    llm.add_request("waiting", [9], GREEDY)
    llm.step()
    llm.abort("running 5")
    break_step(monkeypatch, llm, [RuntimeError("one"), RuntimeError("two"), None, RuntimeError("three")])
    with pytest.raises(RuntimeError, match="one"):
        llm.step()
    llm.add_request("late", [10], GREEDY)
    with pytest.raises(RuntimeError, match="two"):
        llm.step()
    assert llm.has_unfinished_requests()
    outputs = {output.request_id: output for output in llm.step()}
    reasons = {request_id: output.outputs[0].finish_reason for request_id, output in outputs.items()}
    assert reasons.pop("late") is None
    assert reasons.pop("running 5") == "abort"  # a step that failed in between has not swallowed it
    assert set(reasons.values()) == {"error"}
    assert all(output.finished == (request_id != "late") for request_id, output in outputs.items())
    with pytest.raises(RuntimeError, match="three"):
        llm.step()  # the first in a row again
    assert ids(finish(llm)["late"]) == Oracle([10], GREEDY).generate()


def test_an_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    break_step(monkeypatch, llm, [None, KeyboardInterrupt(), KeyboardInterrupt(), None, KeyboardInterrupt()])
    llm.add_request("a", [1], GREEDY)
    llm.step()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    llm.step()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[2]], dataclasses.replace(GREEDY, max_tokens=30))
    assert ids(finish(llm)["a"]) == Oracle([1], GREEDY).generate()


def test_an_interrupt_while_results_are_taken(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The first of two sequences has just ended when it comes: both still come out, once."""
    params = dataclasses.replace(GREEDY, max_tokens=1)
    llm.add_request("a", [1], params)
    llm.add_request("b", [2], params)
    take, calls = llm._engine._take_tokens, iter([True, False])

    def interrupted(*args: Any) -> bool:
        if not next(calls, True):
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(llm._engine, "_take_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    outputs = finish(llm)
    assert {request_id: ids(output) for request_id, output in outputs.items()} == {
        "a": Oracle([1], params).generate(),
        "b": Oracle([2], params).generate(),
    }


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_tokenizer_that_fails_for_one_request(monkeypatch: pytest.MonkeyPatch, llm: LLM, num_before: int) -> None:
    """It ends with "error"; its neighbours do not notice."""
    good, bad = Oracle([1], GREEDY).generate(), Oracle([2], GREEDY).generate()
    broken = next(token for token in bad[num_before:] if token not in good and token not in bad[:num_before])
    place = bad.index(broken)
    use_tokenizer(monkeypatch, llm, Pieces(broken=[broken]))
    outputs = generate(llm, [[1], [2]])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert ids(outputs[0]) == good
    assert ids(outputs[1]) == bad[: place + 1]
    assert outputs[1].outputs[0].text == Pieces().decode(bad[:place])
    llm.audit()


def test_a_tokenizer_that_fails_at_the_end(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    tokenizer = Pieces()
    use_tokenizer(monkeypatch, llm, tokenizer)
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1], GREEDY)
    llm.step()
    tokenizer.broken = range(VOCAB)
    llm.abort("a")
    (output,) = llm.step()
    assert output.outputs[0].finish_reason == "error"
    llm.audit()


@pytest.mark.parametrize("error", [RuntimeError("fire"), KeyboardInterrupt()], ids=["after donation", "before"])
def test_giving_back_the_last_rows_fails(monkeypatch: pytest.MonkeyPatch, llm: LLM, error: BaseException) -> None:
    program, calls = llm._runner._program("rows"), iter([True, False])  # the admission, then the last release

    def broken(*args: Any) -> Any:
        if next(calls, True):
            return program(*args)
        if isinstance(error, RuntimeError):
            program(*args)  # consumes the donated table
        raise error

    monkeypatch.setitem(llm._runner._programs, "rows", broken)
    llm.add_request("a", [1], dataclasses.replace(GREEDY, max_tokens=1))
    with pytest.raises(type(error)):
        llm.step()
    assert ids(finish(llm)["a"]) == Oracle([1], GREEDY).generate()[:1]  # not lost
    llm.audit()
    assert ids(generate(llm, [[2]])[0]) == Oracle([2], GREEDY).generate()
