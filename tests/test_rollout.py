"""pagedjax.rollout: every array against the outputs, which other tests compare with the oracle."""

from __future__ import annotations

import dataclasses

import jax
import mock_engine
import numpy as np
import pytest
from mock_model import raw_logits

from pagedjax import Rollout, SamplingParams

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


def test_outputs_without_logprobs_are_refused() -> None:
    outputs = mock_engine.generate(mock_engine.engine(), PROMPTS, dataclasses.replace(ASKED, logprobs=0))
    with pytest.raises(ValueError, match=r"make it with LLM.rollout"):
        Rollout(outputs).arrays()
    assert Rollout([]).arrays().tokens.shape == (0, 0)
