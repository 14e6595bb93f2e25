"""What an evaluation asks of a model, made into what the engine takes; no harness is known here.

Pairs of a context and a continuation are cut to the context's length and brought together, so that each context is
computed once; arguments of a generation become `SamplingParams`. `pagedjax.lm_eval` is the adapter to a harness.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pagedjax.outputs import Score
from pagedjax.sampling_params import SamplingParams
from pagedjax.text import TextTokenizer

logger = logging.getLogger(__name__)

# The first of these that is given says how many tokens are generated.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING_NAMES = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
)
GENERATION_NAMES = ("until", "do_sample", "temperature", *LENGTH_NAMES, *SAMPLING_NAMES)

_FINAL_MARK = "\N{SYMBOL FOR END OF TEXT}"  # no text of an evaluation has it


class Pair(NamedTuple):
    """Token ids whose likelihood after a context is asked for."""

    context: list[int]
    continuation: list[int]

    def cut(self, max_length: int) -> Pair:
        """The pair without as much of the context's beginning as the model can't see.

        Args:
            max_length: the most tokens the model is given; the last of the continuation is only predicted.

        Raises:
            ValueError: the continuation is empty, or alone too long.
        """
        if not self.continuation:
            raise ValueError("a continuation has no tokens of its own; give it some text")
        if len(self.continuation) > max_length:
            raise ValueError(
                f"a continuation of {len(self.continuation)} tokens is longer than max_length={max_length}; "
                "raise max_length"
            )
        num_kept = max_length + 1 - len(self.continuation)
        return Pair(self.context[-num_kept:], self.continuation)


def by_context(pairs: Sequence[Pair], most: int) -> Iterator[list[int]]:
    """Indices of pairs that have their context in common, so that it is computed once.

    Contexts come in the order of their tokens: those that begin alike are neighbours, as a prefix cache likes it.

    Args:
        pairs: in any order.
        most: in a group; a larger one is divided.
    """
    groups = collections.defaultdict(list)
    for index, pair in enumerate(pairs):
        groups[tuple(pair.context)].append(index)
    for _, indices in sorted(groups.items()):
        for start in range(0, len(indices), most):
            yield indices[start : start + most]


def score_pairs(
    score_many: Callable[[list[list[int]], list[list[list[int]]]], Iterable[tuple[int, list[Score]]]],
    pairs: Sequence[Pair],
    *,
    most: int,
    on_score: Callable[[int, Score], None],
) -> list[Score]:
    """Scores pairs, those with one context together.

    Args:
        score_many: `LLM.score_many`.
        pairs: cut to what the model can take.
        most: continuations of a context at a time.
        on_score: told the index and the score of each pair, as soon as it is known.

    Returns:
        The scores in the order of the pairs.
    """
    found: dict[int, Score] = {}
    groups = list(by_context(pairs, most))
    contexts = [pairs[indices[0]].context for indices in groups]
    continuations = [[pairs[index].continuation for index in indices] for indices in groups]
    for group, scores in score_many(contexts, continuations):
        for index, entry in zip(groups[group], scores, strict=True):
            found[index] = entry
            on_score(index, entry)
    return [found[index] for index in range(len(pairs))]


def generation_params(arguments: Mapping[str, Any], tokenizer: TextTokenizer, *, default_length: int) -> SamplingParams:
    """A harness's arguments of a generation as SamplingParams.

    Without `do_sample`, a temperature above 0 samples; without either the most likely token is taken. A stop string
    that is one special token ends a generation as the token does: it leaves no text in which it could be found.

    Args:
        arguments: `GENERATION_NAMES`; None counts as not given.
        tokenizer: of the stop strings.
        default_length: tokens to generate where nothing is said.

    Raises:
        ValueError: an argument is unknown or wrong.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if unknown := sorted(set(given) - set(GENERATION_NAMES)):
        raise ValueError(f"unknown gen_kwargs {unknown}; the known ones are {sorted(GENERATION_NAMES)}")
    do_sample = given.get("do_sample", given.get("temperature", 0) != 0)
    if not isinstance(do_sample, bool):
        raise ValueError(f"do_sample is {do_sample!r}; give True or False")
    stop, stop_token_ids = _stops(given.get("until", ()), tokenizer)
    return SamplingParams(
        temperature=given.get("temperature", 1.0) if do_sample else 0.0,
        max_tokens=next((given[name] for name in LENGTH_NAMES if name in given), default_length),
        stop=stop,
        stop_token_ids=stop_token_ids,
        **{name: given[name] for name in SAMPLING_NAMES if name in given},
    )


def cut_prompt(token_ids: list[int], max_length: int, max_tokens: int) -> list[int]:
    """A prompt without as much of its beginning as has no room beside `max_tokens` generated tokens.

    Raises:
        ValueError: there is room for no prompt at all.
    """
    room = max_length - max_tokens
    if room < 1:
        raise ValueError(
            f"max_gen_toks={max_tokens} leaves no room for a context in max_length={max_length}; lower the one or "
            "raise the other"
        )
    return token_ids[-room:]


def chat_text(render: Callable[..., str], messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
    """The prompt of a conversation: up to where the answer begins, or to where its final message is to go on.

    Args:
        render: `pagedjax.text.Tokenizer.render_chat`, with what the template reads.
        messages: oldest first, with text as their content. Where the template refuses them, those of the system are
            left out.
        add_generation_prompt: False leaves the final message open, whatever the template puts after one.

    Raises:
        ValueError: the template refuses the messages, or drops the one that is to go on.
    """
    try:
        return _chat_text(render, messages, add_generation_prompt)
    except ValueError as error:
        without = [message for message in messages if message.get("role") != "system"]
        if len(without) in (0, len(messages)):
            raise
        logger.warning("the system's messages are left out: %s", error)
        return _chat_text(render, without, add_generation_prompt)


def _chat_text(render: Callable[..., str], messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    if add_generation_prompt:
        return render(messages, add_generation_prompt=True)
    *earlier, final = messages
    # The space after the mark is gone where the template strips messages: then the final one is stripped too.
    marked = {**final, "content": f"{final['content']}{_FINAL_MARK} "}
    text, mark, rest = render([*earlier, marked], add_generation_prompt=False).rpartition(_FINAL_MARK)
    if not mark:
        raise ValueError(f"the chat template leaves out the final message, which is to go on: {final!r:.80}")
    return text if rest.startswith(" ") else text.rstrip()


def _stops(until: Any, tokenizer: TextTokenizer) -> tuple[list[str], list[int]]:
    """Stop strings, without the empty ones that some tasks have, and the ids of those that are special tokens."""
    strings = [until] if isinstance(until, str) else until
    if not isinstance(strings, list | tuple) or not all(isinstance(entry, str) for entry in strings):
        raise ValueError(f"until is {until!r}; give a string or a list of strings")
    special = {entry: _special_id(entry, tokenizer) for entry in strings if entry}
    return (
        [entry for entry, token in special.items() if token is None],
        [token for token in special.values() if token is not None],
    )


def _special_id(text: str, tokenizer: TextTokenizer) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None
