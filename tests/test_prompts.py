"""pagedjax.prompts: what counts as a prompt, as a list of prompts, and as parameters for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.prompts import Prompt, match_params, parse_prompt, parse_prompts
from pagedjax.sampling_params import SamplingParams
from pagedjax.text import as_tokenizer


class Codes:
    """Characters to their codes, less 96; "~" to nothing."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) - 96 for char in text if char != "~"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(96 + token_id) for token_id in token_ids)


TOKENIZER = as_tokenizer(Codes())


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [Prompt("ab", [1, 2])]),
        (["ab", "c"], [Prompt("ab", [1, 2]), Prompt("c", [3])]),
        ([5, 6], [Prompt(None, [5, 6])]),
        ((5, 6), [Prompt(None, [5, 6])]),
        ([[5, 6]], [Prompt(None, [5, 6])]),
        ([[5], "a", (6, 7)], [Prompt(None, [5]), Prompt("a", [1]), Prompt(None, [6, 7])]),
        (np.array([5, 6]), [Prompt(None, [5, 6])]),
        (np.array([[5, 6], [7, 8]]), [Prompt(None, [5, 6]), Prompt(None, [7, 8])]),
        (jnp.array([5, 6]), [Prompt(None, [5, 6])]),
        ([np.int64(5), np.uint8(6)], [Prompt(None, [5, 6])]),
        (range(2), [Prompt(None, [0, 1])]),
        ([], []),
        ((), []),
    ],
    ids=str,
)
def test_one_prompt_or_many(prompts: Any, expected: list[Prompt]) -> None:
    found = parse_prompts(prompts, TOKENIZER)
    assert found == expected
    assert all(type(token) is int for prompt in found for token in prompt.token_ids)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", r"prompt '' has no tokens"),
        ("~", r"prompt '~' has no tokens"),
        (["a", ""], r"prompt 1: .*'' has no tokens"),
        ([[1], []], r"prompt 1: .*empty list"),
        ([[]], r"prompt 0: .*empty list"),
        ([1.5], r"must be integers"),
        ([1, "a"], r"must be integers"),
        ([None], r"must be integers"),
        (["a", 5], r"prompt 1: .*not int"),
        ([[1], None], r"prompt 1: .*not NoneType"),
        ([[1], [[2]]], r"prompt 1: .*must be integers"),
        (["a", {"prompt": "b"}], r"prompt 1: .*not dict"),
        (None, r"not NoneType"),
        (7, r"not int"),
        (b"ab", r"not bytes"),
        ({"prompt": "a"}, r"not dict"),
        ({1, 2}, r"not set"),
        (np.array(5), r"not ndarray"),
        (np.array([0.5]), r"must be integers"),
    ],
    ids=str,
)
def test_what_is_no_prompt_says_so(prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_prompts(prompts, TOKENIZER)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        parse_prompt("a", None)
    assert parse_prompt([1], None) == Prompt(None, [1])


@pytest.mark.parametrize("prompt", [None, 5, b"ab", {"a": 1}, np.array(5), []], ids=str)
def test_one_prompt_of_another_kind(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        parse_prompt(prompt, TOKENIZER)


def test_a_prompt_is_copied() -> None:
    ids = [1, 2]
    prompt = parse_prompt(ids, None)
    ids.append(3)
    assert prompt.token_ids == [1, 2]


def test_parameters_for_each_prompt() -> None:
    one, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert match_params(None, 2) == [SamplingParams(), SamplingParams()]
    assert match_params(one, 3) == [one, one, one]
    assert match_params([one, other], 2) == [one, other]
    assert match_params((one,), 1) == [one]
    assert match_params([], 0) == []
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        match_params([one], 2)
    with pytest.raises(ValueError, match="holds a NoneType"):
        match_params([one, None], 2)  # type: ignore[list-item]
    for wrong in (5, {"max_tokens": 1}):
        with pytest.raises(ValueError, match=f"is a {type(wrong).__name__}"):
            match_params(wrong, 1)  # type: ignore[arg-type]
