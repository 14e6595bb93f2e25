"""Scoring continuations, against the mock model's exact logits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import mock_engine
import mock_model
import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.plan import StepPlan


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


def expected(prompt: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """From the definitions: each token's logprob, and whether all are the most likely ones."""
    logits = mock_model.raw_logits(prompt + continuation)[len(prompt) - 1 : -1]
    found = mock_model.logprobs(logits)[range(len(continuation)), continuation]
    return list(found), bool(np.all(np.argmax(logits, axis=-1) == continuation))


def greedy(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(np.argmax(mock_model.raw_logits(tokens)[-1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("budget", [3, 32])
@pytest.mark.parametrize("length", [1, 2, 9, 20])
def test_scores(llm: LLM, length: int, budget: int) -> None:
    """More continuations than rows, of all lengths up to the end of the context, and longer than the token budget."""
    mock_engine.pace(llm, budget=budget)
    rng = random.Random(length)
    prompt = [rng.randrange(mock_model.VOCAB) for _ in range(length)]
    lengths = [1, 2, 3, 8, mock_model.MAX_MODEL_LEN - length - 12, 1, 5, 7]
    continuations = [[rng.randrange(mock_model.VOCAB) for _ in range(size)] for size in lengths]
    continuations += [greedy(prompt, 4), [*greedy(prompt, 4), 0, 1], greedy(prompt, 1)]
    for score, continuation in zip(llm.score(prompt, continuations), continuations, strict=True):
        logprobs, is_greedy = expected(prompt, continuation)
        assert score.token_ids == continuation
        assert score.is_greedy == is_greedy
        assert score.token_logprobs == pytest.approx(logprobs, abs=2e-5)
        assert score.logprob == pytest.approx(sum(logprobs), abs=1e-4)
    assert llm.score(prompt, continuations[8:])[0].is_greedy


def test_a_sequence_as_long_as_the_model_allows(llm: LLM) -> None:
    prompt, continuation = [1] * 20, [2] * 17  # 37 tokens fill the pool but for the last, which needs no slot
    (score,) = llm.score(prompt, [continuation])
    assert score.token_logprobs == pytest.approx(expected(prompt, continuation)[0], abs=2e-5)
    with pytest.raises(ValueError, match=r"20 prompt tokens .* 29 of continuation 1 .* max_model_len=48"):
        llm.score(prompt, [[1], [2] * 29])
    with pytest.raises(ValueError, match="usable"):
        llm.score(prompt, [[2] * 25])


def test_the_prompt_is_computed_once(llm: LLM) -> None:
    """A continuation adds its own tokens, and the prompt's last."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    steps, tokens = 0, 0
    run = llm._engine.runner.run
    with pytest.MonkeyPatch.context() as patch:

        def counted(plan):  # type: ignore[no-untyped-def]
            nonlocal steps, tokens
            steps, tokens = steps + 1, tokens + plan.total_new_tokens
            return run(plan)

        patch.setattr(llm._engine.runner, "run", counted)
        llm.score(prompt, [[1, 2], [2], [3, 3, 3, 3]])
    assert (steps, tokens) == (2, len(prompt) + 1 + 1 + 4)


def test_bad_input(llm: LLM) -> None:
    assert llm.score([1], []) == []
    for continuations, message in (
        ([[1], []], "continuation 1: .* empty list"),
        ("abc", "continuations is a list"),
        ([[1], "a"], "continuation 1: a text continues a text prompt"),
        ([[1], [mock_model.VOCAB]], "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.score([1, 2], continuations)
    assert not llm.has_unfinished_requests()


def test_text_is_encoded_together(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    mock_engine.use_tokenizer(monkeypatch, llm, mock_engine.Pieces())
    by_text = llm.score("abc", ["de", "f"])
    assert [score.token_ids for score in by_text] == [[3, 4], [5]]
    assert by_text == llm.score([0, 1, 2], [[3, 4], [5]])
    with pytest.raises(ValueError, match="continuation 0: '' adds no tokens"):
        llm.score("abc", [""])


def test_many_prompts_share_the_steps(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    rng = random.Random(0)
    mock_engine.pace(llm, budget=32)
    prompts = [[rng.randrange(mock_model.VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(9)]
    continuations = [[[index], [index, 1, 2]] if index else [] for index in range(9)]
    in_turn = [llm.score(*pair) for pair in zip(prompts, continuations, strict=True)]
    most_running = 0
    schedule = llm._engine.scheduler.schedule

    def watched() -> StepPlan:
        nonlocal most_running
        plan = schedule()
        most_running = max(most_running, len({sequence.request for sequence in llm._engine.scheduler.running}))
        return plan

    monkeypatch.setattr(llm._engine.scheduler, "schedule", watched)
    found = dict(llm.score_many(prompts, continuations))
    assert most_running > 1
    assert found.keys() == set(range(9))
    for index, scores in enumerate(in_turn):
        assert [score.token_ids for score in found[index]] == continuations[index]
        for score, alone in zip(found[index], scores, strict=True):
            assert score.token_logprobs == pytest.approx(alone.token_logprobs, abs=2e-5)

    some = llm.score_many(prompts, continuations)
    next(some), next(some)  # the first has nothing to score
    assert llm.has_unfinished_requests()
    some.close()
    mock_engine.finish(llm)
    with pytest.raises(ValueError, match=r"prompt 1: continuation 0: .* empty list"):
        llm.score_many([[1], [2]], [[[1]], [[]]])
    with pytest.raises(ValueError, match="2 prompts and 1 lists"):
        llm.score_many([[1], [2]], [[[1]]])
    assert not llm.has_unfinished_requests()
