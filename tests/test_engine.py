"""The engine on the mock model: every token, every end and every logprob is what the oracle says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import mock_engine
import mock_model
import numpy as np
import pytest
from mock_engine import GREEDY, SEEDED, finish, generate, ids
from mock_model import VOCAB, Oracle

from pagedjax import LLM, SamplingParams
from pagedjax.plan import NO_TOKEN, StepPlan, StepResult

LAST = VOCAB - 1
PROMPTS = ([7], [1, 2, 3], [4] * 10, [9, 8, 7, 6, 5])


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


def test_a_batch(llm: LLM) -> None:
    for prompt, output in zip(PROMPTS, generate(llm, list(PROMPTS)), strict=True):
        assert output.prompt_token_ids == prompt
        assert output.finished
        assert ids(output) == Oracle(prompt, GREEDY).generate()
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == ""


def test_the_longest_sequence_the_pool_holds(llm: LLM) -> None:
    usable = llm.plan.num_slots
    for prompt_len in (1, 2, usable - 1, usable):
        params = dataclasses.replace(GREEDY, max_tokens=usable + 1 - prompt_len)
        (output,) = generate(llm, [[3] * prompt_len], params)
        assert ids(output) == Oracle([3] * prompt_len, params).generate()


@pytest.mark.parametrize("prompt", [[11, 12, 13, 14, 15, 16, 17], [3]], ids=["7 tokens", "1 token"])
def test_seeds(llm: LLM, prompt: list[int]) -> None:
    """The same ids alone, as row 3 of 4, beside an unseeded row, preempted at 7, in chunks, and without inner steps."""
    expected = Oracle(prompt, SEEDED).generate()
    assert ids(generate(llm, [prompt], SEEDED)[0]) == expected

    others = [dataclasses.replace(SEEDED, seed=seed) for seed in (1, 2, 3)]
    assert ids(generate(llm, [[1], [2], [4], prompt], [*others, SEEDED])[3]) == expected

    unseeded = dataclasses.replace(SEEDED, seed=None)
    assert ids(generate(llm, [prompt, prompt], [unseeded, SEEDED])[1]) == expected

    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("preempted", prompt, SEEDED)
    while not (outputs := llm.step()) or len(ids(outputs[0])) < 7:
        pass
    llm._engine.scheduler.preempt_all("weights")
    assert ids(finish(llm)["preempted"]) == expected

    mock_engine.pace(llm, budget=3)
    assert ids(generate(llm, [prompt], SEEDED)[0]) == expected


def test_samples_have_their_own_reproducible_streams(llm: LLM) -> None:
    params = dataclasses.replace(SEEDED, n=3)
    first, again = (generate(llm, [[1, 2, 3]], params)[0] for _ in range(2))
    samples = [sample.token_ids for sample in first.outputs]
    assert samples == [sample.token_ids for sample in again.outputs]
    assert samples == [Oracle([1, 2, 3], params, index=index).generate() for index in range(3)]
    assert len({tuple(sample) for sample in samples}) == 3


def test_unseeded_requests_differ_and_follow_the_engine_seed(llm: LLM) -> None:
    params = dataclasses.replace(SEEDED, seed=None)
    outputs = generate(llm, [[1, 2, 3]] * 4, params)
    assert len({tuple(ids(output)) for output in outputs}) == 4
    llm._maker.num_made -= 4
    assert [ids(output) for output in generate(llm, [[1, 2, 3]] * 4, params)] == [ids(output) for output in outputs]


# Below zero, penalties attract: what was generated decides every draw.
PENALISED = SamplingParams(
    temperature=0.0, max_tokens=14, repetition_penalty=1.1, presence_penalty=-1.3, frequency_penalty=-0.7
)


@pytest.mark.parametrize("preempt_at", [1, 5, 9, 13])
def test_penalties_after_preemption(llm: LLM, preempt_at: int) -> None:
    prompt = [7, 7, 3]
    expected = Oracle(prompt, PENALISED).generate()
    assert expected != Oracle(prompt, dataclasses.replace(GREEDY, max_tokens=14)).generate()
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", prompt, PENALISED)
    while not (outputs := llm.step()) or len(ids(outputs[0])) < preempt_at:
        pass
    llm._engine.scheduler.preempt_all("weights")
    assert ids(finish(llm)["a"]) == expected


def test_more_admissions_than_one_call_takes(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Rows are released once and then filled, however many calls it takes."""
    monkeypatch.setattr("pagedjax.runner.ADMITS", 2)
    monkeypatch.setattr(llm._runner, "_programs", {k: v for k, v in llm._runner._programs.items() if k != "rows"})
    prompts = [[token, 1] for token in range(17)]
    for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
        assert ids(output) == Oracle(prompt, GREEDY).generate()


def test_preemption_by_a_short_pool(llm: LLM) -> None:
    """Two sequences that each need most of the pool: same tokens, and only the later one gives way."""
    params = dataclasses.replace(GREEDY, max_tokens=28)
    before = llm.stats().num_preemptions
    outputs = generate(llm, [[1, 2], [3, 4]], params)
    assert [ids(output) for output in outputs] == [Oracle(prompt, params).generate() for prompt in ([1, 2], [3, 4])]
    assert [output.metrics.num_preemptions for output in outputs] == [0, llm.stats().num_preemptions - before]
    assert outputs[1].metrics.num_preemptions > 0


# Ends


def always(token: int, **options: Any) -> SamplingParams:
    """Draws `token` whenever it is allowed."""
    return SamplingParams(temperature=0.0, logit_bias={token: 50.0}, **options)


def test_end_tokens(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm._maker, "end_ids", frozenset({5, LAST}))
    for token in (5, LAST):
        sample = generate(llm, [[1]], always(token))[0].outputs[0]
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([token], "stop", None)
    sample = generate(llm, [[1]], always(9, stop_token_ids=[9]))[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([9], "stop", 9)


def test_min_tokens_then_stop(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm._maker, "end_ids", frozenset({LAST}))
    sample = generate(llm, [[1]], always(LAST, min_tokens=4))[0].outputs[0]
    assert LAST not in sample.token_ids[:4]
    assert sample.token_ids[4:] == [LAST]
    assert sample.finish_reason == "stop"


def test_min_tokens_up_to_max_tokens(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm._maker, "end_ids", frozenset({LAST}))
    sample = generate(llm, [[1]], always(LAST, min_tokens=6, max_tokens=6))[0].outputs[0]
    assert LAST not in sample.token_ids
    assert (len(sample.token_ids), sample.finish_reason) == (6, "length")


def test_ignore_eos_runs_on(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm._maker, "end_ids", frozenset({5, LAST}))
    sample = generate(llm, [[1]], always(LAST, ignore_eos=True, max_tokens=6))[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason) == ([LAST] * 6, "length")
    sample = generate(llm, [[1]], always(5, ignore_eos=True, max_tokens=6, stop_token_ids=[5]))[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([5], "stop", 5)


def test_a_row_that_ends_sits_the_other_inner_steps_out(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    run, results = llm._runner.run, []

    def keep(plan: StepPlan) -> StepResult:
        results.append(run(plan))
        return results[-1]

    monkeypatch.setattr(llm._runner, "run", keep)
    expected = Oracle([1], GREEDY).generate()
    end = next(place for place, token in enumerate(expected) if place > 1 and token not in expected[:place])
    assert end < 7
    (output,) = generate(llm, [[1]], dataclasses.replace(GREEDY, stop_token_ids=[expected[end]]))
    assert ids(output) == expected[: end + 1]
    (result,) = results
    (row,) = np.flatnonzero(result.seq_lens)
    assert result.seq_lens[row] == 1 + end  # the last token is never computed
    assert result.tokens[:, row].tolist() == [*expected[: end + 1], *[NO_TOKEN] * (7 - end)]


def test_padding_of_the_vocabulary_is_never_drawn(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(temperature=5.0, seed=1, max_tokens=30, logprobs=20)):
        (output,) = generate(llm, [[1]], params)
        assert max(ids(output)) < VOCAB
        Oracle([1], params).check(output.outputs[0])


def test_the_model_length_ends_a_sequence(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(llm._engine.scheduler, "max_model_len", 20)
    params = dataclasses.replace(GREEDY, max_tokens=30)
    sample = generate(llm, [[1] * 15], params)[0].outputs[0]
    assert sample.token_ids == Oracle([1] * 15, params, max_model_len=20).generate()
    assert (len(sample.token_ids), sample.finish_reason) == (5, "length")


def test_leaks_on_odd_endings(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    leaks(monkeypatch, llm)


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 40), (4, 11)])
def test_leaks_on_odd_endings_with_other_blocks(
    monkeypatch: pytest.MonkeyPatch, block_size: int, num_blocks: int
) -> None:
    leaks(monkeypatch, mock_engine.engine(block_size=block_size, num_blocks=num_blocks))


def leaks(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """50 requests of 1 to 17 tokens that end in every way; the caller's audit, and the reference counts."""
    monkeypatch.setattr(llm._maker, "end_ids", frozenset({5, LAST}))
    mock_engine.pace(llm, budget=9)
    rng = random.Random(0)
    for index in range(50):
        prompt = [rng.randrange(VOCAB) for _ in range(1 + index % 17)]
        llm.add_request(str(index), prompt, SamplingParams(temperature=1.0, seed=index, max_tokens=1 + index % 13))
    states = set()
    while llm.has_unfinished_requests():
        llm.step()
        for request in rng.sample(list(llm._engine.requests.values()), min(1, len(llm._engine.requests))):
            (sequence,) = request.sequences
            state = "waiting" if sequence.row is None else "decode" if sequence.output_ids else "chunk"
            if state not in states or rng.random() < 0.1:
                states.add(state)
                llm.abort(request.request_id)
    assert states == {"waiting", "decode", "chunk"}
    llm.audit()
    table = llm._runner.state.table
    assert np.sum(table.ref_counts) == llm.stats().num_cached_blocks
    assert int(table.num_free_blocks) == llm.plan.num_usable_blocks - llm.stats().num_cached_blocks


def test_an_audit_needs_an_idle_engine(llm: LLM) -> None:
    llm.add_request("a", [1])
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        llm.audit()
    finish(llm)


def test_an_audit_finds_a_leak(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    with monkeypatch.context() as patch:
        budget = llm._engine.scheduler.ledger._budget
        patch.setattr(budget, "available", budget.available - 1)
        with pytest.raises(
            RuntimeError, match=r"leak: \d+ blocks free on the device, -?\d+ on the host, \d+ cached .* 19 in all"
        ):
            llm.audit()


# Logprobs


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5, seed=1, top_k=1, logprobs=5),
        SamplingParams(temperature=0.5, seed=1, logprobs=0),
        SamplingParams(temperature=0.5, seed=2, logprobs=5, prompt_logprobs=5),
        SamplingParams(temperature=2.0, seed=3, logprobs=20, n=3),
        SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0),
        SamplingParams(temperature=0.0, logprobs=5, logit_bias={3: 50.0}, min_tokens=2, stop_token_ids=[3]),
    ],
    ids=lambda params: f"{params.logprobs} of n {params.n}, T {params.temperature}",
)
def test_logprobs(llm: LLM, params: SamplingParams) -> None:
    prompt = [5, 5, 9, 1, 30]
    llm.add_request("plain", [3], GREEDY)  # somebody beside it who wants none
    (output,) = generate(llm, [prompt], params)
    for sample in output.outputs:
        Oracle(prompt, params, index=sample.index).check(sample)  # values, order, and k entries, or one more
        assert sample.logprobs is not None
        assert all(np.isfinite(value) for entry in sample.logprobs for value in entry.values())
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        found, expected = output.prompt_logprobs[1:], mock_model.raw_logits(prompt)[:-1]
        mock_model.check_logprobs(found, params.prompt_logprobs, expected, prompt[1:])
    assert finish(llm)["plain"].outputs[0].logprobs is None


@pytest.mark.parametrize("budget", [3, 5, 32])
def test_prompt_logprobs_in_chunks_and_after_preemption(llm: LLM, budget: int) -> None:
    mock_engine.pace(llm, budget=budget)
    prompt = [*range(VOCAB), 7, 9]  # more than the places of a step, so that one is full
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2)
    llm.add_request("a", prompt, params)
    llm.add_request("b", prompt[::-1], params)
    for _ in range(2):
        llm.step()
    llm._engine.scheduler.preempt_all("weights")
    outputs = finish(llm)
    for request_id, tokens in (("a", prompt), ("b", prompt[::-1])):
        found = outputs[request_id].prompt_logprobs
        assert found is not None
        assert found[0] is None
        mock_model.check_logprobs(found[1:], 2, mock_model.raw_logits(tokens)[:-1], tokens[1:])
