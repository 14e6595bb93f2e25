"""Beam search, against a plain one over the mock model's exact logits that keeps every sequence in full."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mock_engine
import mock_model
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.beam_search import Beam, BeamSearch

END_IDS = (5,)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    for llm in mock_engine.idle():
        monkeypatch.setattr(llm._maker, "end_ids", frozenset(END_IDS))
        yield llm


def search(prompt: list[int], params: BeamSearchParams, end_ids: tuple[int, ...] = END_IDS) -> list[tuple[float, Any]]:
    """Score and tokens of the best completions, from a table of every beam times the whole vocabulary."""
    width, penalty = params.width, params.length_penalty
    max_tokens = min(params.max_tokens, mock_model.MAX_MODEL_LEN - len(prompt))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        table = np.array([mock_model.logprobs(mock_model.raw_logits(prompt + ids)[-1]) + total for total, ids in live])
        order = np.argsort(-table, axis=None, kind="stable")[: max(2, 1 + len(end_ids)) * width]
        grown = [(float(table.flat[i]), [*live[i // table.shape[1]][1], int(i % table.shape[1])]) for i in order]
        stops = [length == max_tokens or ids[-1] in end_ids for _, ids in grown]
        ended += [
            (total / length**penalty, ids)
            for (total, ids), stop in list(zip(grown, stops, strict=True))[:width]
            if stop
        ]
        ended = sorted(ended, key=lambda pair: -pair[0])[:width]
        live = [pair for pair, stop in zip(grown, stops, strict=True) if not stop][:width]
        if not live:
            break
        if len(ended) == width:
            most = max_tokens if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or live[0][0] / most**penalty <= ended[-1][0]:
                break
    return ended


def check(output: Any, prompt: list[int], params: BeamSearchParams) -> None:
    expected = search(prompt, params)
    assert len(output.outputs) == params.width
    for found, (score, ids) in zip(output.outputs, expected, strict=True):
        assert found.token_ids == ids
        assert found.cumulative_logprob / len(ids) ** params.length_penalty == pytest.approx(score, abs=1e-5)
        assert found.finish_reason == ("stop" if ids[-1] in END_IDS else "length")
        assert [next(iter(entry)) for entry in found.logprobs] == ids


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
def test_against_a_plain_search(llm: LLM, length_penalty: float, early_stopping: Any) -> None:
    rng = random.Random(0)
    for width, length, max_tokens in ((1, 3, 8), (3, 1, 12), (4, 7, 6), (2, 20, 8)):
        params = BeamSearchParams(width, max_tokens, length_penalty, early_stopping)
        prompt = [rng.randrange(mock_model.VOCAB) for _ in range(length)]
        (output,) = llm.beam_search(prompt, params, use_tqdm=False)
        check(output, prompt, params)
    llm.audit()


def test_many_beside_other_requests(llm: LLM) -> None:
    """Searches that wait for rows and blocks, in a pool that is short for the requests beside them."""
    rng = random.Random(1)
    mock_engine.pace(llm, budget=7)
    params = BeamSearchParams(width=3, max_tokens=8)
    prompts = [[rng.randrange(mock_model.VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(6)]
    requests = [
        llm._engine.add(llm._maker.searched(f"beams-{i}", None, prompt, params)) for i, prompt in enumerate(prompts)
    ]
    others = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True) for _ in range(6)]
    before = llm.stats().num_preemptions
    for index, other in enumerate(others):
        llm.add_request(f"other-{index}", [index] * 10, other)
    outputs = mock_engine.finish(llm)
    for index, prompt in enumerate(prompts):
        check(outputs[f"beams-{index}"], prompt, params)
    for index, other in enumerate(others):
        mock_model.Oracle([index] * 10, other).check(outputs[f"other-{index}"].outputs[0])
    assert llm.stats().num_preemptions > before
    assert not any(sequence.row is not None for request in requests for sequence in request.sequences)
    llm.audit()


def test_beams_share_blocks(llm: LLM) -> None:
    """A prompt of 12 blocks is held once, not three times."""
    prompt = list(range(25))
    llm._engine.add(llm._maker.searched("a", None, prompt, BeamSearchParams(width=3, max_tokens=3)))
    while llm.has_unfinished_requests():
        llm.step()
        used = int(np.sum(np.asarray(llm._runner.state.table.ref_counts) > llm._runner.state.table.retain_counts))
        assert used <= 12 + 3 * 2


def test_aborted_and_with_new_weights(llm: LLM) -> None:
    params = BeamSearchParams(width=3, max_tokens=9)
    llm._engine.add(llm._maker.searched("a", None, [1, 2, 3], params))
    llm._engine.add(llm._maker.searched("b", None, [4, 5, 6], params))
    llm.step()
    llm.step()
    llm.abort("a")
    llm.update_params(llm._runner.params, running="recompute")
    outputs = mock_engine.finish(llm)
    for sample in outputs["a"].outputs:  # what it had found so far
        assert sample.finish_reason == "abort"
        assert sample.logprobs is not None
        assert [next(iter(entry)) for entry in sample.logprobs] == sample.token_ids
        assert sample.cumulative_logprob == pytest.approx(sum(next(iter(e.values())) for e in sample.logprobs))
    check(outputs["b"], [4, 5, 6], params)
    llm.audit()


def test_what_cannot_be_searched(llm: LLM) -> None:
    for params, message in (
        (BeamSearchParams(width=7, max_tokens=2), "width 7 needs as many rows, and 6 can run"),
        (BeamSearchParams(width=11, max_tokens=2), "looks at 22 candidates a beam, and a step returns 20"),
        (BeamSearchParams(width=6, max_tokens=20), "6 beams up to 23 tokens need up to"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.beam_search([1, 2, 3], params, use_tqdm=False)
    with pytest.raises(ValueError, match=r"length_penalty -400.0 is too large for 6 tokens"):
        llm.beam_search([1, 2, 3], BeamSearchParams(2, 6, -400.0), use_tqdm=False)
    for options, message in (
        ({"early_stopping": 1}, "early_stopping is 1"),
        ({"length_penalty": None}, "length_penalty is None"),
        ({"width": 0}, "width is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"early_stopping": "maybe"}, "early_stopping is 'maybe'"),
        ({"length_penalty": float("inf")}, "length_penalty is inf"),
    ):
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**options)  # type: ignore[arg-type]
    assert not llm.has_unfinished_requests()


def test_an_end_beyond_the_width_is_dropped() -> None:
    """Of the candidates only the first `width` may end; an end token further down neither ends nor goes on."""
    beams = BeamSearch(BeamSearchParams(width=2, max_tokens=5), frozenset({9}))
    assert beams.advance([[(1, -1.0), (2, -2.0), (9, -3.0), (3, -4.0)]]) == [0, 0]
    assert beams.beams == [Beam((1,), (-1.0,), -1.0), Beam((2,), (-2.0,), -2.0)]
    assert beams.advance(
        [[(9, -0.1), (4, -2.0), (5, -9.0), (6, -9.0)], [(9, -3.0), (7, -3.5), (8, -9.0), (0, -9.0)]]
    ) == [0, 1]
    assert [beam.token_ids for beam in beams.beams] == [(1, 4), (2, 7)]
    assert [beam.token_ids for _, beam in beams.completions] == [(1, 9)]
