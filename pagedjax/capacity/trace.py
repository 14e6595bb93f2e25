"""The lengths of requests: given as pairs, or read from a JSON file."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Lengths = tuple[tuple[int, int], ...]  # prompt and output tokens of each request


def check_trace(trace: Iterable[tuple[int, int]] | str | os.PathLike[str], max_model_len: int) -> Lengths:
    """Prompt and output tokens of each request, cut at `max_model_len` as the engine does.

    Args:
        trace: pairs (prompt_len, output_len) in order of arrival, or the path of a file that `read_trace` reads.
        max_model_len: tokens a sequence.

    Raises:
        ValueError: no requests, lengths that make no sense, or a prompt that leaves no room to generate.
    """
    pairs = read_trace(trace) if isinstance(trace, (str, os.PathLike)) else list(trace)
    lengths = []
    for number, pair in enumerate(pairs):
        try:
            prompt_len, output_len = (_whole(value) for value in pair)
        except (TypeError, ValueError):
            raise ValueError(
                f"request {number} of the trace is {pair!r}; give prompt and output tokens, two positive integers"
            ) from None
        if prompt_len >= max_model_len:
            raise ValueError(
                f"request {number} of the trace has {prompt_len} prompt tokens, which leaves no room to generate "
                f"within max_model_len={max_model_len}; raise it, or drop the request"
            )
        lengths.append((prompt_len, min(output_len, max_model_len - prompt_len)))
    if not lengths:
        raise ValueError("the trace has no requests")
    return tuple(lengths)


def check_arrivals(arrivals: Sequence[float], lengths: Lengths) -> None:
    """Raises ValueError unless there is one arrival a request, and none before the one before it."""
    if len(arrivals) != len(lengths):
        raise ValueError(f"there are {len(arrivals)} arrivals for {len(lengths)} requests; give one each")
    if any(later < earlier for earlier, later in pairwise(arrivals)):
        raise ValueError("arrivals must be ascending; sort them, and the trace with them")


def read_trace(path: str | os.PathLike[str]) -> list[Any]:
    """Requests from a JSON file: a list, or an object with a list `requests`. Each is a pair [prompt_len, output_len],
    or an object with `prompt_len` or `prompt_token_ids`, and `output_len`."""
    path = pathlib.Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    requests = content.get("requests") if isinstance(content, dict) else content
    if not isinstance(requests, list):
        raise ValueError(f"{path} holds no list of requests; write [[prompt_len, output_len], ...]")
    return [_lengths_of(request) if isinstance(request, Mapping) else request for request in requests]


def _lengths_of(request: Mapping[str, Any]) -> tuple[Any, Any]:
    prompt_len = request.get("prompt_len")
    if prompt_len is None and isinstance(request.get("prompt_token_ids"), list):
        prompt_len = len(request["prompt_token_ids"])
    return prompt_len, request.get("output_len")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError
    return int(value)
