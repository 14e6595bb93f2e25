"""`async_scheduling`: the next step is planned and started before the result of the last one is there.

That outputs stay what they are is shown at random in test_engine_fuzz and test_scheduler_random; here is what happens
around a step that is on its way.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import mock_engine
import numpy as np
import pytest
from mock_engine import GREEDY, SEEDED, Pieces, finish, generate, ids, use_tokenizer
from mock_model import Oracle

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.engine_config import EngineConfig
from pagedjax.llm import _async_scheduling
from pagedjax.plan import StepPlan, StepResult


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    for llm in mock_engine.idle():
        monkeypatch.setattr(llm._engine, "_async_scheduling", True)
        mock_engine.pace(llm, decode_steps=1)
        yield llm


def watch(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[str]:
    """What starts and is waited for, in order, from now on."""
    log: list[str] = []
    start = llm._runner.start

    def started(plan: StepPlan) -> Callable[[], StepResult]:
        number = sum(entry.startswith("start") for entry in log)
        log.append(f"start {number}")
        result = start(plan)

        def waited() -> StepResult:
            log.append(f"wait {number}")
            return result()

        return waited

    monkeypatch.setattr(llm._runner, "start", started)
    return log


def is_ahead(llm: LLM) -> bool:
    return llm._engine._running is not None


def test_a_step_starts_before_the_last_one_is_waited_for(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    log = watch(monkeypatch, llm)
    (output,) = generate(llm, [[1, 2]], SamplingParams(temperature=0.0, max_tokens=4))
    assert len(ids(output)) == 4
    # The fourth token is the last, which is known before it is there: no fifth step.
    assert log == ["start 0", "start 1", "wait 0", "start 2", "wait 1", "start 3", "wait 2", "wait 3"]


def test_a_step_in_vain_is_taken_back(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """An end token is seen by the device alone: the step after it computes nothing, and nothing comes of it."""
    expected = Oracle([1], GREEDY).generate()
    end = next(place for place, token in enumerate(expected) if place > 1 and token not in expected[:place])
    log, before = watch(monkeypatch, llm), llm.stats().num_generated_tokens
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[expected[end]])
    assert ids(generate(llm, [[1]], params)[0]) == expected[: end + 1]
    assert log.count("start") == 0
    assert (log[-2:], len(log)) == ([f"wait {end}", f"wait {end + 1}"], 2 * (end + 2))
    assert llm.stats().num_generated_tokens - before == end + 1
    llm.audit()


def test_a_stop_string_ends_the_text_where_it_did(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The host alone sees it, a step late: what was drawn meanwhile is dropped."""
    expected = Oracle([1], GREEDY).generate()
    use_tokenizer(monkeypatch, llm, Pieces({expected[3]: "@"}))
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["@"])
    (output, other) = generate(llm, [[1], [5, 6]], [params, SEEDED])
    assert ids(output) == expected[: expected.index(expected[3]) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert ids(other) == Oracle([5, 6], SEEDED).generate()


def test_aborted_while_a_step_is_on_its_way(llm: LLM) -> None:
    llm.add_request("a", [1, 2], SEEDED)
    llm.add_request("b", [3], SEEDED)
    for _ in range(3):
        llm.step()
    assert is_ahead(llm)
    llm.abort("a")
    outputs = finish(llm)
    assert outputs["a"].outputs[0].finish_reason == "abort"
    assert ids(outputs["a"]) == Oracle([1, 2], SEEDED).generate()[:3]
    assert ids(outputs["b"]) == Oracle([3], SEEDED).generate()


def test_who_waits_gets_the_place_of_who_ends_at_once(llm: LLM) -> None:
    """No step is started ahead of an end that is sure to come while somebody waits for the row."""
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    long = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for index in range(llm.config.max_num_seqs):
        llm.add_request(str(index), [index], short if index == 0 else long)
    llm.step()
    llm.add_request("next", [7], short)
    steps = []
    while "next" not in {output.request_id for output in llm.step()}:
        steps.append(is_ahead(llm))
    assert steps == [True, False]  # the second token of the short one, and its last
    finish(llm)


def test_other_weights_count_from_the_next_step_on(llm: LLM) -> None:
    llm.add_request("a", [1, 2], GREEDY)
    llm.step()
    assert is_ahead(llm)
    old = llm.weights_version
    llm.update_params(llm._runner.params, running="keep")
    assert not is_ahead(llm)
    versions = finish(llm)["a"].outputs[0].weights_versions
    assert versions == [old] * 2 + [old + 1] * (len(versions) - 2)


def test_what_looks_at_the_device_waits(llm: LLM, tmp_path: pathlib.Path) -> None:
    """And what came of the step comes out of the next one."""
    expected = Oracle([1, 2], GREEDY).generate()

    def export() -> None:
        k, _ = llm.export_kv("a")
        assert k.shape[1] == 2 + 2 - 1 + (1 if len(seen) else 0)

    seen: list[int] = []
    actions: tuple[Callable[[], Any], ...] = (export, llm.defragment, lambda: llm.save_state(tmp_path))
    for action in actions:
        llm.add_request("a", [1, 2], GREEDY)
        llm.step()
        assert is_ahead(llm)
        action()
        assert not is_ahead(llm)
        outputs = llm.step()
        assert [ids(output)[:2] for output in outputs] == [expected[:2]]
        assert ids(finish(llm)["a"]) == expected


def test_a_failure_of_a_step_on_its_way(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Nothing is lost: both steps are computed again."""
    start, calls = llm._runner.start, iter(range(100))

    def broken(plan: StepPlan) -> Callable[[], StepResult]:
        result, number = start(plan), next(calls)

        def failing() -> StepResult:
            raise RuntimeError("device on fire")

        return failing if number == 2 else result

    monkeypatch.setattr(llm._runner, "start", broken)
    llm.add_request("a", [1, 2], SEEDED)
    llm.step()
    llm.step()
    assert is_ahead(llm)
    with pytest.raises(RuntimeError, match="on fire"):
        llm.step()
    assert not is_ahead(llm)
    assert ids(finish(llm)["a"]) == Oracle([1, 2], SEEDED).generate()


def test_beams_are_not_planned_ahead(llm: LLM) -> None:
    llm._engine.add(llm._maker.searched("a", None, [1, 2], BeamSearchParams(width=2, max_tokens=4)))
    while llm.has_unfinished_requests():
        llm.step()
        assert not is_ahead(llm)


def test_the_share_of_the_host(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """With steps that start ahead the device waits for the host at the ends alone."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    schedule, fetch = llm._engine.scheduler.schedule, llm._runner._fetch

    def slow_schedule() -> StepPlan:
        now[0] += 1.0
        return schedule()

    def slow_fetch(*args: Any) -> StepResult:
        now[0] += 3.0
        return fetch(*args)

    monkeypatch.setattr(llm._engine.scheduler, "schedule", slow_schedule)
    monkeypatch.setattr(llm._runner, "_fetch", slow_fetch)
    shares = {}
    for ahead in (False, True):
        monkeypatch.setattr(llm._engine, "_async_scheduling", ahead)
        clock = llm._runner.clock
        clock.step_seconds = clock.idle_seconds = 0.0
        generate(llm, [[1, 2]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        shares[ahead] = llm.stats().host_share
    num_steps = 8
    assert shares[False] == pytest.approx((num_steps * 1 + 1) / (num_steps * 4 + 1))  # one more plan, of releases
    assert shares[True] < shares[False] / 3
    assert np.isfinite(shares[True])


def test_on_by_itself_where_the_device_is_not_the_cpu() -> None:
    params = mock_engine.engine()._runner.params
    assert not _async_scheduling(EngineConfig(), params)
    assert _async_scheduling(EngineConfig(async_scheduling=True), params)
    assert mock_engine.engine().config.async_scheduling is None
