"""Traces: what is asked when. Read from a workload file, or drawn from lognormal lengths whose parameters are stated.

Every request has its prompt's token ids and an exact number of tokens to generate, so every engine that replays a trace
does the same work.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

TEXT = pathlib.Path(__file__).parent.parent / "LICENSE"  # what generated prompts are pieces of


@dataclasses.dataclass(frozen=True)
class TracedRequest:
    """One request."""

    prompt_token_ids: tuple[int, ...]
    output_len: int
    arrival: float = 0.0  # seconds after the start

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def end_len(self) -> int:
        """Tokens when it has ended; the last one never has K/V."""
        return self.prompt_len + self.output_len


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TracedRequest, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V has to be computed at least: all but each request's last."""
        return self.num_prompt_tokens + self.num_output_tokens - len(self.requests)

    @property
    def longest(self) -> int:
        return max(request.end_len for request in self.requests)

    def first(self, count: int) -> Trace:
        return dataclasses.replace(self, requests=self.requests[:count])

    def block_steps(self, block_size: int) -> int:
        """Blocks times inner steps that it needs at least: each output token costs a step in which the request holds
        the blocks of all tokens up to it. Divided by a pool's usable blocks, no fewer steps will do."""
        return sum(
            math.ceil((request.prompt_len + drawn) / block_size)
            for request in self.requests
            for drawn in range(request.output_len)
        )

    def poisson(self, rate: float, seed: int = 0) -> Trace:
        """The same requests, arriving at `rate` a second with exponential gaps, the first at once."""
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(self.requests))
        arrivals = np.cumsum(gaps) - gaps[0]
        requests = zip(self.requests, arrivals.tolist(), strict=True)
        return Trace(
            f"{self.name} at {rate:g}/s", tuple(dataclasses.replace(request, arrival=at) for request, at in requests)
        )


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Lengths drawn from a lognormal distribution and clipped; `mean` is the one before clipping."""

    mean: float
    sigma: float  # of the logarithm
    least: int
    most: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        mu = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.rint(rng.lognormal(mu, self.sigma, count)).astype(int)
        return np.clip(lengths, self.least, self.most).tolist()


# Prompt and output lengths. The means of the first two are those of the datasets in the vLLM paper (arXiv 2309.06180,
# figure 11); their spread is an assumption.
LENGTHS = {
    "sharegpt": (Lognormal(161, 1.1, 4, 1024), Lognormal(338, 0.9, 4, 1024)),
    "alpaca": (Lognormal(19, 0.7, 4, 512), Lognormal(58, 0.9, 4, 512)),
    "sharegpt-short": (Lognormal(185, 1.1, 4, 512), Lognormal(140, 1.0, 4, 512)),
}


def generate(name: str, count: int, text_ids: Sequence[int], seed: int = 0) -> Trace:
    """A trace of `count` requests with the lengths of `LENGTHS[name]`, all at once.

    Args:
        name: a key of LENGTHS.
        count: how many requests.
        text_ids: a text's token ids; prompts are pieces of it, from places drawn at random.
        seed: of the lengths and places.
    """
    rng = np.random.default_rng(seed)
    prompt_lens, output_lens = (lengths.draw(count, rng) for lengths in LENGTHS[name])
    repeats = -(-2 * max(prompt_lens) // len(text_ids))  # a short text is read again
    ids = list(text_ids) * max(repeats, 1)
    requests = []
    for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True):
        start = int(rng.integers(len(ids) - prompt_len + 1))
        requests.append(TracedRequest(tuple(ids[start : start + prompt_len]), output_len))
    return Trace(name, tuple(requests))


def read(path: pathlib.Path) -> Trace:
    """A workload file: JSON with a `name` and `requests` of `prompt_token_ids`, `output_len` and maybe `arrival`.

    Raises:
        ValueError: it is not one.
    """
    data = json.loads(path.read_text())
    try:
        requests = [
            TracedRequest(tuple(entry["prompt_token_ids"]), entry["output_len"], entry.get("arrival", 0.0))
            for entry in data["requests"]
        ]
        return Trace(data["name"], tuple(sorted(requests, key=lambda request: request.arrival)))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no workload: it needs a name and requests with prompt_token_ids and output_len"
        ) from error


def load(source: str, count: int, encode: Callable[[str], list[int]]) -> Trace:
    """A workload file's trace, or one generated by name; at most `count` requests."""
    if source in LENGTHS:
        return generate(source, count, encode(TEXT.read_text()))
    path = pathlib.Path(source)
    if not path.exists():
        raise ValueError(f"trace {source!r} is neither a file nor one of {sorted(LENGTHS)}")
    return read(path).first(count)
