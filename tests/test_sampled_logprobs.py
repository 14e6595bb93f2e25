"""pagedjax.sampled_logprobs against float64 distributions found by sorting, and through the engine."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import mock_engine
import numpy as np
import numpy_sampler
import pytest
from mock_model import raw_logits

from pagedjax import SamplingParams
from pagedjax.row_sampling import row_values
from pagedjax.sampled_logprobs import SampledLogprobs, sampled_logprobs

V, WIDTH = 8400, 8500  # columns from V on are padding
PROMPT, OUTPUT = [3, 5, 5], [7, 9, 7]
FOUND = jax.jit(sampled_logprobs, static_argnames="num_vocab_tokens")
WANTED = SamplingParams(sampled_logprobs=True)


def requests() -> list[SamplingParams]:
    changes = [
        {},
        {"temperature": 0.6},
        {"top_p": 0.5},
        {"top_k": 40},
        {"min_p": 0.2},
        {"top_k": 2000, "top_p": 0.7},  # beyond the narrow candidates, all of these
        {"top_k": 700},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 1e-4, "temperature": 2.0},
        {"top_k": 3000, "top_p": 0.9, "min_p": 1e-3, "temperature": 1.7},
        {"top_p": 0.0},
        {"temperature": 0.0},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3, "top_p": 0.8},
        {"logit_bias": {7: 9.0, 8: -4.0}, "min_tokens": 5, "top_p": 0.9},
        {"sampled_logprobs": False, "top_p": 0.4},
    ]
    return [dataclasses.replace(WANTED, **change) for change in changes]


def device(logits: np.ndarray, params: list[SamplingParams], token_ids: list[int], stop_ids: list[int]) -> tuple:
    lines = [row_values(p, seed=0, sample_index=0, stop_ids=stop_ids) for p in params]
    rows = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *lines)
    padded = np.full((len(params), WIDTH), np.inf, np.float32)
    padded[:, :V] = logits
    count = len(params)
    history = np.tile(np.array([*PROMPT, *OUTPUT, 99, 99], np.int32), (count, 1))
    found: SampledLogprobs = FOUND(
        padded,
        rows,
        np.full(count, len(PROMPT) + len(OUTPUT), np.int32),
        history,
        np.full(count, len(PROMPT), np.int32),
        np.array(token_ids, np.int32),
        num_vocab_tokens=V,
        token_rows=np.arange(count, dtype=np.int32),
    )
    return np.asarray(found.token), np.asarray(found.kept_mass)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_every_kind_of_cut_equals_the_sorted_distribution(scale: float) -> None:
    rng = np.random.default_rng(int(scale))
    params, stop_ids = requests(), [11, 12]
    logits = rng.normal(0.0, scale, (len(params), V)).astype(np.float32)
    processed = [
        numpy_sampler.processed_logits(x, p, PROMPT, OUTPUT, stop_ids) for x, p in zip(logits, params, strict=True)
    ]
    token_ids = []
    for x, p in zip(processed, params, strict=True):
        order = np.argsort(-x, kind="stable")
        kept = numpy_sampler.kept(x, p if p.temperature else dataclasses.replace(p, temperature=1.0, top_k=1))
        token_ids.append(int(rng.choice(order[: kept.sum()])))
    tokens, masses = device(logits, params, token_ids, stop_ids)
    for x, p, token_id, token, mass in zip(processed, params, token_ids, tokens, masses, strict=True):
        if p.temperature == 0.0:
            assert (token, mass) == (0.0, 1.0)
            continue
        p = p if p.sampled_logprobs else dataclasses.replace(p, top_p=1.0)  # computed without its cut, and thrown away
        weights = np.exp((x - x.max()) / p.temperature)
        assert mass == pytest.approx(weights[numpy_sampler.kept(x, p)].sum() / weights.sum(), rel=2e-4), p
        assert token == pytest.approx(math.log(numpy_sampler.distribution(x, p)[token_id]), abs=3e-4), p


def test_equal_probabilities_are_kept_by_id() -> None:
    params = [dataclasses.replace(WANTED, top_p=top_p) for top_p in (0.25, 0.5001, 0.75)]
    logits = np.full((3, V), 1.0, np.float32)
    tokens, masses = device(logits, params, [0, 0, 0], [])
    np.testing.assert_allclose(masses, [0.25, 0.5001, 0.75], atol=2 / V)
    np.testing.assert_allclose(np.exp(tokens), 1 / (masses * V), rtol=1e-3)


def test_without_a_taker_nothing_is_computed() -> None:
    params = [SamplingParams(), SamplingParams(top_p=0.4)]
    tokens, masses = device(np.full((2, V), np.nan, np.float32), params, [0, 0], [])
    assert (tokens.tolist(), masses.tolist()) == ([0, 0], [1, 1])


def test_the_engine_returns_them_beside_the_raw_ones() -> None:
    llm = mock_engine.engine()
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, n=2, seed=4, max_tokens=6, logprobs=0, sampled_logprobs=True
    )
    prompt = [4, 5, 6]
    (output,) = mock_engine.generate(llm, [prompt], params)
    for sample in output.outputs:
        tokens = list(prompt)
        for token, logprob, mass in zip(sample.token_ids, sample.sampled_logprobs, sample.kept_masses, strict=True):
            logits = raw_logits(tokens)[-1]
            weights = np.exp((logits - logits.max()) / params.temperature)
            share = weights[numpy_sampler.kept(logits, params)].sum() / weights.sum()
            assert mass == pytest.approx(share, rel=1e-4)
            assert logprob == pytest.approx(math.log(numpy_sampler.distribution(logits, params)[token]), abs=1e-4)
            tokens.append(token)
    (plain,) = mock_engine.generate(llm, [prompt], dataclasses.replace(params, sampled_logprobs=False))
    assert plain.outputs[0].sampled_logprobs is None
    assert plain.outputs[0].kept_masses is None
    assert [s.token_ids for s in plain.outputs] == [s.token_ids for s in output.outputs]
