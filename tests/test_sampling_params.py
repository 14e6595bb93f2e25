"""pagedjax.sampling_params: defaults, normalisation, and a refusal that names field and value for everything else."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from pagedjax.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams

DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "logprobs": None,
    "prompt_logprobs": None,
    "sampled_logprobs": False,
    "logit_bias": None,
    "cache_salt": None,
}

ACCEPTED = [
    ("n", 3),
    ("temperature", 0),
    ("temperature", 1e9),
    ("top_p", 0),
    ("top_p", 1),
    ("top_k", 2**40),
    ("min_p", 0.0),
    ("min_p", 1),
    ("repetition_penalty", 1e-3),
    ("presence_penalty", -2),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("max_tokens", 1),
    ("min_tokens", 16),
    ("logprobs", 0),
    ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", MAX_LOGPROBS),
    ("logit_bias", {0: -100.0, 7: 1e9}),
    ("cache_salt", ""),
]

REFUSED: list[tuple[str, Any]] = [
    *[
        (name, value)
        for name in ("temperature", "top_p", "min_p")
        for value in (-0.1, math.nan, math.inf, None, "1", True)
    ],
    *[("repetition_penalty", value) for value in (0, 0.0, -1.0, math.nan, math.inf, None, True)],
    *[
        (name, value)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.01, 2.01, math.nan, -math.inf, None, False)
    ],
    ("temperature", 10**400),
    ("top_p", 1.0001),
    ("min_p", 1.0001),
    *[("n", value) for value in (0, -1, 1.0, True, None, "2")],
    *[("top_k", value) for value in (-2, 1.0, True, None, math.nan)],
    *[("seed", value) for value in (-1, 2**63, 1.0, False, "7")],
    *[("max_tokens", value) for value in (0, -1, 2.0, None, True)],
    *[("min_tokens", value) for value in (-1, 17, 1.5, None, False)],
    *[("stop", value) for value in ("", [""], ["a", ""], [1], None, 5, {"a"})],
    *[("stop_token_ids", value) for value in ([-1], [1.0], [True], ["1"], None, 5, list(range(MAX_STOP_IDS + 1)))],
    *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, MAX_LOGPROBS + 1, 1.0, True)],
    *[
        ("logit_bias", value)
        for value in ([(1, 2.0)], {-1: 1.0}, {1.0: 1.0}, {True: 1.0}, {1: math.nan}, {1: math.inf})
    ],
    *[("logit_bias", value) for value in ({1: True}, {1: "x"}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))],
    ("cache_salt", 5),
    *[
        (name, value)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
        for value in (1, 0, None, "yes")
    ],
]


def test_fields_and_defaults() -> None:
    params = SamplingParams()
    assert {field.name: getattr(params, field.name) for field in dataclasses.fields(params)} == DEFAULTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}") as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert any(word in message for word in ("give", "at most", "needs", "lower it"))  # what to change
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        assert str(value) in message


def test_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=-1,
        n=np.int64(2),
        stop="END",
        stop_token_ids=[np.int32(5), 3, 5],
        logit_bias={np.int64(4): 1},
    )
    assert (params.temperature, params.top_k, params.n) == (0.5, 0, 2)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (5, 3), {4: 1.0})
    plain = [params.temperature, params.n, *params.stop_token_ids, *params.logit_bias, *params.logit_bias.values()]
    assert [type(value) for value in plain] == [float, int, int, int, int, float]
    assert SamplingParams(stop=["a", "b"]).stop == SamplingParams(stop=("a", "b")).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS))).stop_token_ids == tuple(range(MAX_STOP_IDS))


def test_a_value_of_its_own() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias, stop=["x"], seed=7)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    same = SamplingParams(logit_bias={3: 1.0}, stop="x", seed=7)
    assert params == same == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params)
    assert hash(params) == hash(same)
    assert params != SamplingParams(logit_bias={3: 2.0}, stop="x", seed=7)


def test_check_vocab() -> None:
    SamplingParams(stop_token_ids=[0, 9], logit_bias={0: 1.0, 9: 1.0}).check_vocab(10)
    with pytest.raises(ValueError, match=r"stop_token_ids has token id 10, the vocabulary has 10 tokens; .* 0 to 9"):
        SamplingParams(stop_token_ids=[1, 10]).check_vocab(10)
    with pytest.raises(ValueError, match=r"logit_bias has token id 10, the vocabulary has 10"):
        SamplingParams(logit_bias={10: 5.0}).check_vocab(10)
