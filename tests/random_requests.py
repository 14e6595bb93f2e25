"""Requests to the mock model with everything that can be asked for, drawn at random."""

from __future__ import annotations

import random
from typing import Any

import mock_model

from pagedjax import BeamSearchParams, SamplingParams

END_IDS = (5, mock_model.VOCAB - 1)


def random_params(rng: random.Random) -> SamplingParams:
    """Every option with some chance, most requests with few of them."""

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    max_tokens = rng.randint(1, 16)
    return SamplingParams(
        n=sometimes(0.15, rng.randint(2, 8), 1),
        temperature=sometimes(0.5, rng.uniform(0.3, 1.5), 0.0),
        top_p=sometimes(0.15, rng.uniform(0.1, 1.0), 1.0),
        top_k=sometimes(0.15, rng.randint(1, 8), 0),
        min_p=sometimes(0.1, rng.uniform(0.0, 0.3), 0.0),
        repetition_penalty=sometimes(0.15, rng.uniform(0.8, 1.5), 1.0),
        presence_penalty=sometimes(0.15, rng.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(0.15, rng.uniform(-1, 1), 0.0),
        seed=sometimes(0.5, rng.randrange(2**63), None),
        max_tokens=max_tokens,
        min_tokens=sometimes(0.3, rng.randint(0, max_tokens), 0),
        stop_token_ids=sometimes(0.3, rng.sample(range(mock_model.VOCAB), rng.randint(1, 4)), ()),
        ignore_eos=rng.random() < 0.2,
        logprobs=sometimes(0.2, rng.choice([0, 1, 5, 20]), None),
        prompt_logprobs=sometimes(0.2, rng.choice([0, 1, 5]), None),
        logit_bias=sometimes(0.1, {rng.randrange(mock_model.VOCAB): rng.uniform(-4, 4)}, None),
        cache_salt=sometimes(0.15, rng.choice(["a", "b"]), None),
    )


def random_search(rng: random.Random) -> BeamSearchParams:
    """A short search; some are too wide for a small batch."""
    return BeamSearchParams(
        width=rng.randint(1, 5),
        max_tokens=rng.randint(1, 8),
        length_penalty=rng.choice([1.0, 0.0, 2.0, -0.5]),
        early_stopping=rng.choice([True, False, "never"]),
    )
