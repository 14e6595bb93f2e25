"""What a caller asks of the sampler: one frozen value per request, checked when it is made.

Every field is validated and normalised here (lists become tuples, numbers become plain ints and floats), so nothing
behind this file meets a value it cannot honour. What depends on the model is checked by `check_vocab`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_LOGPROBS = 20  # alternatives per token; the device returns this many columns
MAX_LOGIT_BIAS = 512  # logit_bias entries per request
MAX_STOP_IDS = 32  # stop ids per request, end-of-sequence ids included
SEED_LIMIT = 2**63  # seeds are non-negative 64-bit signed integers


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it stops.

    The processed logits are: logits, plus `logit_bias`, stop ids masked while fewer than `min_tokens` are out, the
    three penalties, division by `temperature`; then `top_k`, `top_p` (on what `top_k` left, renormalised) and `min_p`
    cut the distribution, always leaving at least one token.

    Args:
        n: Completions per prompt; each has its own random stream.
        temperature: Divides the logits; 0 takes the most likely token. Values below 1e-5 count as 0.
        top_p: Keep the shortest run of most likely tokens whose probability reaches this; 1 is off, 0 keeps one token.
        top_k: Keep this many most likely tokens; 0 is off (-1 is taken as 0).
        min_p: Keep tokens with at least this fraction of the most likely token's probability; 0 is off.
        repetition_penalty: Divides positive and multiplies negative logits of the tokens in prompt and output
            (CTRL, Keskar et al. 2019, section 4.1); 1 is off.
        presence_penalty: Subtracted once from the logit of every token in the output; in [-2, 2].
        frequency_penalty: Subtracted from a token's logit for each time it is in the output; in [-2, 2].
        seed: Makes draws reproducible: a function of (seed, sample, position). None lets the engine choose.
        max_tokens: Generated tokens per completion, at most.
        min_tokens: No stop id is drawn, and no stop string ends the completion, before this many tokens.
        stop: Strings that end the completion; a string or a sequence of them.
        stop_token_ids: Token ids that end the completion, besides the end-of-sequence ids.
        include_stop_str_in_output: Whether the text keeps the stop string that ended it.
        ignore_eos: Whether end-of-sequence ids are ordinary tokens.
        skip_special_tokens: Whether special tokens are left out of the text.
        logprobs: Alternatives per generated token whose log-probabilities are returned, 0 for only the token itself,
            None for nothing. The basis is the raw logits, before bias, penalties and temperature.
        prompt_logprobs: The same for the prompt's tokens.
        sampled_logprobs: Whether the log-probability of each generated token under the processed distribution that it
            was drawn from is returned, and how much probability the cuts had kept of it.
        logit_bias: Added to the logits, token id to bias.
        cache_salt: Only requests with the same salt share cached blocks.

    Raises:
        ValueError: A value is outside what is written above; the message names the field, the value and the remedy.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()  # a str is a Sequence[str] too: it becomes a tuple of one
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    sampled_logprobs: bool = False
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1))
        self._set("temperature", _real("temperature", self.temperature, 0.0, math.inf))
        self._set("top_p", _real("top_p", self.top_p, 0.0, 1.0))
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1)))
        self._set("min_p", _real("min_p", self.min_p, 0.0, 1.0))
        self._set("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf))
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty is 0.0; it divides logits: give a number above 0 (1.0 is off)")
        self._set("presence_penalty", _real("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, 0, SEED_LIMIT - 1))
        self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower it or raise max_tokens"
            )
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "sampled_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt is {self.cache_salt!r}; give a string or None")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises

    def check_vocab(self, vocab_size: int) -> None:
        """Refuses token ids the model does not have.

        Args:
            vocab_size: Number of tokens that can be sampled; valid ids are 0 .. vocab_size - 1.

        Raises:
            ValueError: An id in `stop_token_ids` or `logit_bias` is outside the vocabulary.
        """
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias or ()),
        )
        for name, ids in named:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{name} has token id {token}, the vocabulary has {vocab_size} tokens; "
                        f"give ids from 0 to {vocab_size - 1}"
                    )


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    span = f"from {low} to {high}" if high is not None else f"of at least {low}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); give an integer {span}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} is {number}; give an integer {span}")
    return number


def _real(name: str, value: Any, low: float, high: float) -> float:
    span = f"a finite number of at least {low}" if high == math.inf else f"a number from {low} to {high}"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); give {span}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueError(f"{name} is {value}; give {span}")
    return number


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)):
        raise ValueError(f"stop is {stop!r}; give a string or a list of strings, () for none")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop has {string!r}; every stop string needs at least one character")
    return tuple(strings)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"stop_token_ids is {ids!r}; give a list of token ids, () for none")
    unique = tuple(dict.fromkeys(_integer("stop_token_ids", token, 0) for token in ids))
    if len(unique) > MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids has {len(unique)} ids; at most {MAX_STOP_IDS} fit")
    return unique


def _logit_bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {bias!r}; give a dict of token id to bias, or None")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} fit")
    return {
        _integer("logit_bias token id", token, 0): _real(f"logit_bias[{token}]", value, -math.inf, math.inf)
        for token, value in bias.items()
    }
