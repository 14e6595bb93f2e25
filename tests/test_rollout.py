"""pagedjax.rollout: every array against the outputs, which other tests compare with the oracle."""

from __future__ import annotations

import dataclasses

import jax
import mock_engine
import numpy as np
import pytest
from mock_model import raw_logits

from pagedjax import RequestOutput, Rollout, SamplingParams
from pagedjax.beam_search import BeamSearchParams

PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3]]
ASKED = SamplingParams(n=2, temperature=0.8, top_k=4, seed=3, max_tokens=7, stop_token_ids=[11, 12, 13])


def test_arrays_are_the_outputs_side_by_side() -> None:
    llm = mock_engine.engine()
    rollout = llm.rollout(PROMPTS, ASKED, use_tqdm=False)
    llm.audit()
    arrays = rollout.arrays(pad_to=20, pad_id=31)
    assert all(leaf.shape[0] == 6 for leaf in jax.tree.leaves(arrays))
    line = 0
    for index, (prompt, output) in enumerate(zip(PROMPTS, rollout.outputs, strict=True)):
        for sample in output.outputs:
            tokens = prompt + sample.token_ids
            assert arrays.tokens[line].tolist() == tokens + [31] * (20 - len(tokens))
            assert np.flatnonzero(arrays.mask[line]).tolist() == list(range(len(prompt), len(tokens)))
            assert arrays.positions[line].tolist() == list(range(20))
            assert (arrays.prompt_lens[line], arrays.lengths[line]) == (len(prompt), len(tokens))
            assert (arrays.prompt_index[line], bool(arrays.complete[line])) == (index, True)
            logits = raw_logits(tokens)
            raw = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            scaled = np.exp(logits / ASKED.temperature)
            four = np.sort(scaled)[:, -4:].sum(axis=-1)  # the mock's logits have no ties among the first
            for place in range(20):
                found = [arrays.logprobs, arrays.sampled_logprobs, arrays.kept_masses]
                expected = [0.0, 0.0, 1.0]
                if len(prompt) <= place < len(tokens):
                    token = tokens[place]
                    drawn = np.log(scaled[place - 1, token] / four[place - 1])
                    expected = [raw[place - 1, token], drawn, four[place - 1] / scaled[place - 1].sum()]
                np.testing.assert_allclose([array[line, place] for array in found], expected, atol=2e-5)
            line += 1
    assert len({len(s.token_ids) for output in rollout.outputs for s in output.outputs}) > 1, "all are equally long"


def test_the_longest_line_gives_the_width() -> None:
    rollout = mock_engine.engine().rollout(PROMPTS, dataclasses.replace(ASKED, stop_token_ids=[]), use_tqdm=False)
    assert rollout.arrays().tokens.shape == (6, 7 + 7)
    with pytest.raises(ValueError, match=r"a line has 14 tokens, and pad_to=13"):
        rollout.arrays(pad_to=13)


def test_each_token_tells_the_weights_that_drew_it() -> None:
    llm = mock_engine.engine()
    mock_engine.pace(llm, decode_steps=1)
    asked = dataclasses.replace(ASKED, n=1, stop_token_ids=[], logprobs=0, sampled_logprobs=True)
    llm.add_request("a", PROMPTS[0], asked)
    first = llm.weights_version
    for _ in range(3):
        (output,) = llm.step()
    llm.update_params(llm.params, running="keep")
    while llm.has_unfinished_requests():
        (output,) = llm.step()
    versions = Rollout([output]).arrays().weights_versions[0]
    assert versions.tolist() == [0, 0, 0] + [first] * 3 + [first + 1] * 4
    mock_engine.pace(llm)


def test_an_aborted_sample_is_partial() -> None:
    llm = mock_engine.engine()
    mock_engine.pace(llm, decode_steps=1)
    asked = dataclasses.replace(ASKED, n=1, stop_token_ids=[], logprobs=0, sampled_logprobs=True)
    llm.add_request("a", PROMPTS[0], asked)
    llm.step()
    llm.step()
    llm.abort("a")
    (output,) = llm.step()
    arrays = Rollout([output]).arrays(pad_to=8)
    assert arrays.mask[0].tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert not arrays.complete[0]
    mock_engine.pace(llm)


def test_a_deadline_leaves_what_was_drawn_by_then() -> None:
    """Some samples have all their tokens, some a part, and some wait for a row and have none."""
    llm = mock_engine.engine()
    mock_engine.pace(llm, decode_steps=1)
    asked = dataclasses.replace(ASKED, n=3, stop_token_ids=[], logprobs=0, sampled_logprobs=True)
    prompts = [*PROMPTS, [2, 2]]  # 12 samples, and 6 rows
    whole = llm.rollout(prompts, asked, use_tqdm=False)
    for index, prompt in enumerate(prompts):
        llm.add_request(str(index), prompt, asked)
    found: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step()}
        if found["0"].finished:
            for name in map(str, range(len(prompts))):
                if name not in found or not found[name].finished:
                    llm.abort(name)
    rollout = Rollout([found[str(index)] for index in range(len(prompts))])
    partial, complete = rollout.arrays(pad_to=20), whole.arrays(pad_to=20)
    num_drawn = partial.mask.sum(axis=1)
    assert 0 in num_drawn[~partial.complete]
    assert num_drawn[~partial.complete].max() > 0
    assert partial.complete.any()
    assert not (partial.mask & ~complete.mask).any()
    for name in ("tokens", "logprobs", "sampled_logprobs", "kept_masses"):
        ours, theirs = getattr(partial, name)[partial.mask], getattr(complete, name)[partial.mask]
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    llm.audit()
    mock_engine.pace(llm)


def test_turns_of_a_conversation_side_by_side() -> None:
    """The earlier answer is part of the later prompt: the lines of both turns add up to one."""
    llm = mock_engine.engine()
    first = llm.rollout(PROMPTS, ASKED, use_tqdm=False)
    turns = [
        output.prompt_token_ids + sample.token_ids + [20, 21] for output in first.outputs for sample in output.outputs
    ]
    second = llm.rollout(turns, dataclasses.replace(ASKED, n=1), use_tqdm=False)
    assert any(output.num_cached_tokens > 0 for output in second.outputs)
    one, two = first.arrays(pad_to=32), second.arrays(pad_to=32)
    assert not (one.mask & two.mask).any()
    assert (one.lengths + 2 == two.prompt_lens).all()
    mask = one.mask | two.mask
    for line, tokens in enumerate(two.tokens):
        logits = raw_logits(tokens[: two.lengths[line]].tolist())
        raw = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        places = np.flatnonzero(mask[line])
        assert places.tolist() == [
            *range(one.prompt_lens[line], one.lengths[line]),
            *range(two.prompt_lens[line], two.lengths[line]),
        ]
        expected = raw[places - 1, tokens[places]]
        np.testing.assert_allclose((one.logprobs + two.logprobs)[line, places], expected, atol=2e-5)


def test_a_beam_search_is_no_rollout() -> None:
    outputs = mock_engine.engine().beam_search(PROMPTS, BeamSearchParams(width=2, max_tokens=4), use_tqdm=False)
    with pytest.raises(ValueError, match=r"those of a beam search are not drawn\); make it with LLM.rollout"):
        Rollout(outputs).arrays()


def test_outputs_without_logprobs_are_refused() -> None:
    outputs = mock_engine.generate(mock_engine.engine(), PROMPTS, dataclasses.replace(ASKED, logprobs=0))
    with pytest.raises(ValueError, match=r"make it with LLM.rollout"):
        Rollout(outputs).arrays()
    assert Rollout([]).arrays().tokens.shape == (0, 0)
