"""What a tokenizer is made of: the backend and the facts around it that a checkpoint keeps in other files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

DEFAULT_TEMPLATE = "default"


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """The result of reading a tokenizer from a folder or a GGUF file; `Tokenizer` is built from it.

    `backend` is complete: its post-processor adds the begin and end tokens that the checkpoint asks for, its added
    tokens carry the right `special` flag, and nothing in it truncates or pads.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)  # "bos_token" -> "<s>", ...
    eos_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> jinja source


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `backend` put exactly these tokens around a text it encodes (None: nothing at that end).

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    for token, token_id in ids.items():
        if token_id is None:
            raise ValueError(f"{token!r} is to be added to every text, but is not in the vocabulary: correct its name")
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(ids.items())
    )


def as_id_tuple(value: Any, where: str) -> tuple[int, ...]:
    """End token ids as checkpoints write them (nothing, one id, or a list) as a tuple.

    Raises:
        ValueError: an entry is not a token id; the message has `where` it came from.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{where}: {value!r} is no end token id: use an id >= 0 or a list of ids")
    return tuple(ids)


def union(*groups: Iterable[int]) -> tuple[int, ...]:
    """All ids once, in the order of first appearance."""
    return tuple(dict.fromkeys(token_id for group in groups for token_id in group))
