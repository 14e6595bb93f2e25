"""What can be seen of a running engine: events, figures, exported K/V, and defragmentation that changes nothing."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mock_engine
import mock_model
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams, block_table
from pagedjax.events import Event

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[Event]:
    seen: list[Event] = []
    monkeypatch.setattr(llm._engine.observer, "on_event", seen.append)
    return seen


def check(llm: LLM, outputs: dict[str, Any], prompts: dict[str, list[int]], params: SamplingParams) -> None:
    for name, prompt in prompts.items():
        for sample in outputs[name].outputs:
            mock_model.Oracle(prompt, params, index=sample.index).check(sample)
    llm.audit()


def test_events_tell_a_requests_life(llm: LLM, events: list[Event]) -> None:
    params = dataclasses.replace(GREEDY, n=2)
    llm.add_request("a", [1, 2, 3], params)
    check(llm, mock_engine.finish(llm), {"a": [1, 2, 3]}, params)
    assert [(e.name, e.index) for e in events] == [
        ("added", 0),
        ("started", 0),
        ("first_token", 0),
        ("started", 1),
        ("finished", 0),
    ]
    assert [e.num_tokens for e in events] == [3, 0, 0, 2, 24]
    assert events[-1].reason == "length"
    assert [e.time for e in events] == sorted(e.time for e in events)


def test_preemptions_are_told_with_their_reason(llm: LLM, events: list[Event]) -> None:
    prompts = {str(i): [i] * 4 for i in range(6)}
    params = dataclasses.replace(GREEDY, max_tokens=20)
    before = llm.stats()
    for name, prompt in prompts.items():
        llm.add_request(name, prompt, params)
    for _ in range(3):
        llm.step()
    llm.update_params(llm._runner.params, running="recompute")
    check(llm, mock_engine.finish(llm), prompts, params)
    stats = llm.stats()
    told = [e for e in events if e.name == "preempted"]
    reasons = Counter(e.reason for e in told)
    assert reasons["blocks"] == stats.num_preemptions - before.num_preemptions > 0
    assert reasons["weights"] > 0
    last = [(p.request_id, p.index, p.num_tokens, p.reason) for p in stats.preemptions][-len(told) :]
    assert last == [(e.request_id, e.index, e.num_tokens, e.reason) for e in told]
    assert all(e.num_tokens >= 4 for e in told)


def test_a_callback_that_fails_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(llm._engine.observer, "on_event", fail)
    with caplog.at_level(logging.ERROR):
        check(llm, {"a": mock_engine.generate(llm, [1, 2], GREEDY)[0]}, {"a": [1, 2]}, GREEDY)
    assert "on_event failed at 'added'" in caplog.text


@pytest.mark.parametrize("name", ["added", "started", "first_token", "preempted", "finished"])
def test_a_callback_may_call_the_engine(monkeypatch: pytest.MonkeyPatch, llm: LLM, name: str) -> None:
    """It aborts the request it is told of, moves blocks, and changes the weights."""
    other = dataclasses.replace(GREEDY, max_tokens=18)

    def act(event: Event) -> None:
        if event.name == name and event.request_id != "b":
            if event.request_id in llm._engine.requests:
                llm.abort(event.request_id)
            llm.defragment()
            llm.update_params(llm._runner.params, running="recompute")

    monkeypatch.setattr(llm._engine.observer, "on_event", act)
    prompts = {key: [i, 2, 3, 4, 5] for i, key in enumerate("abcd")}
    for key, prompt in prompts.items():
        llm.add_request(key, prompt, other)
    outputs = mock_engine.finish(llm)
    assert set(outputs) == set(prompts)
    check(llm, outputs, prompts, other)


def test_figures_of_shared_blocks_and_last_blocks(llm: LLM) -> None:
    """4 prompt tokens in 2 full blocks, and one token of each of 3 samples in a block of its own."""
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [7, 8, 9, 10, 11], dataclasses.replace(GREEDY, n=3))
    llm.step()  # the prompt; the first sample's first token is drawn
    llm.step()  # the first sample's token; the others compute the prompt's last
    stats = llm.stats()
    assert stats.num_used_blocks == 5
    assert stats.num_shared_blocks == 2
    assert stats.tokens_per_slot == pytest.approx((6 + 5 + 5) / 10)
    assert stats.tail_waste == pytest.approx(2 / 10)
    counts = np.asarray(llm._runner.state.table.ref_counts) - np.asarray(llm._runner.state.table.retain_counts)
    assert np.sum(counts > 0) == 5
    assert np.sum(counts > 1) == 2
    mock_engine.finish(llm)


def test_times(llm: LLM) -> None:
    outputs = mock_engine.generate(llm, [[1, 2], [3, 4]], GREEDY)
    stats = llm.stats()
    for times in (stats.queue_time, stats.time_to_first_token, stats.inter_token_time):
        assert times.p50 is not None
        assert times.p95 is not None
        assert 0 <= times.p50 <= times.p95
    m = outputs[-1].metrics
    assert m.first_token_time is not None
    assert m.finished_time is not None
    assert (m.finished_time - m.first_token_time) / 11 in llm._engine.observer.times.inter_token
    assert m.first_token_time - m.arrival_time in llm._engine.observer.times.first_token


def test_exported_kv_is_what_was_written(llm: LLM) -> None:
    """The mock stores each token's id in K and V."""
    llm.add_request("a", [3, 1, 4, 1, 5], dataclasses.replace(GREEDY, n=2))
    llm.step()
    llm.step()
    sequence = llm._engine.requests["a"].sequences[1]
    k, v = llm.export_kv("a", 1)
    tokens = np.array(sequence.token_ids[: sequence.num_computed], np.float32)
    assert k.shape == v.shape == (2, len(tokens), 1, 8)
    for layer in range(2):
        np.testing.assert_array_equal(k[layer, :, 0, 0], tokens * 4 + 2 * layer)
        np.testing.assert_array_equal(v[layer, :, 0, 0], tokens * 4 + 2 * layer + 1)
    with pytest.raises(ValueError, match="has 2 samples, and none is number 2"):
        llm.export_kv("a", 2)
    llm._engine.scheduler.finish(sequence, "abort")
    with pytest.raises(ValueError, match="sample 1 of request 'a' has ended"):
        llm.export_kv("a", 1)
    with pytest.raises(KeyError, match="'b'"):
        llm.export_kv("b")
    llm.add_request("b", [1] * 10, dataclasses.replace(GREEDY, n=6))
    with pytest.raises(ValueError, match="sample 5 of request 'b' waits"):
        llm.export_kv("b", 5)
    mock_engine.finish(llm)


def test_defragmentation_while_requests_run(llm: LLM) -> None:
    """Blocks move under running, forked and cached sequences; cached ones are still found."""
    prompts = {name: [i, i + 1, i + 2, i + 3, i + 4] for i, name in enumerate("abcd")}
    params = dataclasses.replace(GREEDY, n=2, max_tokens=4)
    for name, prompt in prompts.items():
        llm.add_request(name, prompt, params)
    llm.step()
    llm.step()
    llm.abort("a")
    llm.step()
    moved = llm.defragment()
    table = llm._runner.state.table
    used = np.flatnonzero(np.asarray(table.ref_counts))
    np.testing.assert_array_equal(used, np.arange(1, len(used) + 1))
    outputs = mock_engine.finish(llm)
    check(llm, outputs, {name: prompts[name] for name in "bcd"}, params)
    moved += llm.defragment()
    assert moved > 0
    again = mock_engine.generate(llm, list(prompts.values())[1:], GREEDY)
    assert [output.num_cached_tokens for output in again] == [4, 4, 4]
    check(llm, dict(zip("bcd", again, strict=True)), {name: prompts[name] for name in "bcd"}, GREEDY)


def test_an_idle_engine_tidies_up(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm._engine, "_defragment_above", 0.0)
    for name in "abcd":
        llm.add_request(name, [ord(name) % 32] * 6, dataclasses.replace(GREEDY, max_tokens=2))
    llm.step()
    llm.abort("a")
    mock_engine.finish(llm)
    ids = llm._engine.scheduler.ledger.cache.block_ids  # type: ignore[union-attr]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    block_table.check(llm._runner.state.table, ids)
    with pytest.raises(ValueError, match=r"defragment_above=1\.5"):
        LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | {"defragment_above": 1.5})
