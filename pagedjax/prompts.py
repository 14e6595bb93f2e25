"""Prompts as people give them (text or token ids, one or many), made into token ids."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagedjax.sampling_params import SamplingParams
from pagedjax.text import TextTokenizer


class Prompt(NamedTuple):
    """A prompt's text (None where token ids were given) and its token ids."""

    text: str | None
    token_ids: list[int]


def parse_prompt(prompt: Any, tokenizer: TextTokenizer | None) -> Prompt:
    """One prompt.

    Args:
        prompt: text, or a sequence of token ids.
        tokenizer: needed for text.

    Raises:
        ValueError: it is neither, or text without a tokenizer, or has no tokens.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; give the engine one, or give token ids")
        ids = tokenizer.encode(prompt)
        if not ids:
            raise ValueError(f"the prompt {prompt!r} has no tokens; give some text")
        return Prompt(prompt, ids)
    if isinstance(prompt, dict | bytes) or not hasattr(prompt, "__iter__"):
        raise ValueError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}: {prompt!r:.80}")
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"a prompt's token ids must be integers; got {prompt!r:.80}") from None
    if not ids:
        raise ValueError("the prompt is an empty list of token ids; give at least one")
    return Prompt(None, ids)


def parse_prompts(prompts: Any, tokenizer: TextTokenizer | None) -> list[Prompt]:
    """One prompt or a list of prompts; a flat list of integers is one prompt.

    Raises:
        ValueError: as `parse_prompt`, naming the prompt's index.
    """
    if isinstance(prompts, str) or (_is_sequence(prompts) and len(prompts) and not _is_prompt(prompts[0])):
        return [parse_prompt(prompts, tokenizer)]
    if not _is_sequence(prompts):
        raise ValueError(f"prompts are text, token ids, or a list of these, not {type(prompts).__name__}")
    return [at_index(index, parse_prompt, prompt, tokenizer) for index, prompt in enumerate(prompts)]


def parse_continuations(
    continuations: Any, prompt_text: str | None, prompt_ids: list[int], tokenizer: TextTokenizer | None
) -> list[list[int]]:
    """Token ids of continuations of one prompt.

    A text's tokens are those that prompt and continuation have together beyond the prompt's own; the prompt has to be
    text too, so that both can be encoded together.

    Raises:
        ValueError: naming the continuation's index.
    """
    if isinstance(continuations, str) or not _is_sequence(continuations):
        raise ValueError("continuations is a list, of texts or of lists of token ids; put a single one into a list")

    def parse(continuation: Any) -> list[int]:
        if not isinstance(continuation, str):
            return parse_prompt(continuation, tokenizer).token_ids
        if prompt_text is None or tokenizer is None:
            raise ValueError("a text continues a text prompt; give token ids after a prompt of token ids")
        ids = tokenizer.encode(prompt_text + continuation)[len(prompt_ids) :]
        if not ids:
            raise ValueError(f"{continuation!r} adds no tokens to the prompt; give some text")
        return ids

    return [at_index(index, parse, part, what="continuation") for index, part in enumerate(continuations)]


def match_params(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt, from one for all or one each; None is the default."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not _is_sequence(params):
        raise ValueError(f"sampling_params is a {type(params).__name__}; give SamplingParams, or one for each prompt")
    params = list(params)
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts; give one for all, or one each")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise ValueError(f"sampling_params holds a {type(entry).__name__}; give SamplingParams")
    return params


def at_index(index: int, function: Any, *args: Any, what: str = "prompt") -> Any:
    """Calls the function; a ValueError says which prompt, or other thing, it was about."""
    try:
        return function(*args)
    except ValueError as error:
        raise ValueError(f"{what} {index}: {error}") from error


def _is_sequence(value: Any) -> bool:
    return _has_length(value) and hasattr(value, "__getitem__") and not isinstance(value, dict | bytes)


def _is_prompt(value: Any) -> bool:
    """Whether an element of a list is a prompt of its own, rather than a token id."""
    return isinstance(value, str | dict | bytes) or _has_length(value)


def _has_length(value: Any) -> bool:
    """Whether it is made of elements; an array scalar has `__len__` but no length."""
    try:
        len(value)
    except TypeError:
        return False
    return True
