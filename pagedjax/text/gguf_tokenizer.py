"""The tokenizer inside a GGUF file: byte-level BPE, with the way text is split first chosen by `tokenizer.ggml.pre`.

A GGUF file holds tokens and merges but only the name of the pre-tokenizer, so a table here gives each name its meaning:
the one of the model's own tokenizer.json. A name that the table does not have is an error, because a wrong split gives
plausible ids of worse quality. Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) for the keys,
llama.cpp's src/llama-vocab.cpp for the names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagedjax.text.parts import DEFAULT_TEMPLATE, TokenizerParts, add_ends, as_id_tuple, union

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPECIAL_IDS = {  # key of a token id -> the name that templates and configs give the token
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "seperator_token_id": "sep_token",  # the specification's spelling
    "mask_token_id": "mask_token",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of sequence, of turn, of message

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before BPE merges within the pieces."""

    split: str | None = None  # a regular expression whose matches are the pieces; None: GPT-2's, built into ByteLevel
    digits_apart: bool = False  # each digit its own piece, before the split
    whole_words: bool = False  # a piece that is a token is taken as it is, whatever the merges say
    nfc: bool = False  # canonical composition first
    adds_bos: bool = False  # where the file has no add_bos_token


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(digits_apart=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, whole_words=True, adds_bos=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _PreTokenizer(split=_LLAMA3_SPLIT),
    "qwen2": _PreTokenizer(split=_QWEN2_SPLIT, nfc=True),
    "tekken": _PreTokenizer(split=_TEKKEN_SPLIT, whole_words=True, adds_bos=True),
}


def read(source: str | os.PathLike[str] | gguf.GGUFReader) -> TokenizerParts:
    """Reads the tokenizer of a GGUF file, given as a path or as an open reader."""
    reader = source if isinstance(source, gguf.GGUFReader) else gguf.GGUFReader(os.fspath(source))
    wanted = (name for name in reader.fields if name.startswith(_PREFIX) or name.startswith(_TEMPLATE))
    return from_metadata({name: reader.fields[name].contents() for name in wanted})


def from_metadata(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Builds the tokenizer that GGUF metadata describes.

    Args:
        metadata: key -> value, for every key under "tokenizer.".

    Raises:
        ValueError: the tokenizer's kind or pre-tokenizer has no exact equivalent here, or the metadata is broken.
    """
    values = {name.removeprefix(_PREFIX): value for name, value in metadata.items()}
    model = values.get("model")
    if model != "gpt2":
        raise ValueError(
            f"{_PREFIX}model is {model!r}: only 'gpt2' (byte-level BPE) can be read from GGUF; load the tokenizer from "
            "the model's folder (Tokenizer.from_folder) and pass it as tokenizer="
        )
    pre_tokenizer = _pre_tokenizer(values.get("pre"))
    tokens = values.get("tokens")
    if not tokens:
        raise ValueError(f"{_PREFIX}tokens is missing or empty: the file has no vocabulary; pass tokenizer=")
    types = values.get("token_type") or []
    if len(types) != len(tokens):
        raise ValueError(
            f"{_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens, so which are special is not "
            "known: the file is incomplete; pass tokenizer="
        )
    backend = _byte_level_bpe(_vocabulary(tokens, types), values.get("merges"), pre_tokenizer)
    _add_special_tokens(backend, tokens, types)
    special_tokens = {
        name: _token(tokens, values[key], key) for key, name in _SPECIAL_IDS.items() if values.get(key) is not None
    }
    adds_bos = values.get("add_bos_token", pre_tokenizer.adds_bos)
    add_ends(
        backend,
        special_tokens.get("bos_token") if adds_bos else None,
        special_tokens.get("eos_token") if values.get("add_eos_token", False) else None,
    )
    eos_ids = union(*(as_id_tuple(values.get(key), _PREFIX + key) for key in _END_KEYS))
    return TokenizerParts(backend, special_tokens, eos_ids, _chat_templates(metadata))


def _pre_tokenizer(name: str | None) -> _PreTokenizer:
    known = ", ".join(sorted(_PRE_TOKENIZERS))
    advice = "load the tokenizer from the model's folder (Tokenizer.from_folder) and pass it as tokenizer="
    if name is None:
        raise ValueError(f"{_PREFIX}pre is missing, so how the text is split is not known (one of {known}): {advice}")
    if name not in _PRE_TOKENIZERS:
        raise ValueError(f"{_PREFIX}pre is {name!r}, which is not one of {known}: {advice}")
    return _PRE_TOKENIZERS[name]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Token -> id, without the unused ones that only fill the embedding up to a round size."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise ValueError(f"{_PREFIX}tokens has {twice!r} twice: a token must have one id")
    return {token: token_id for token, token_id in ids.items() if types[token_id] != gguf.TokenType.UNUSED}


def _merge_pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ValueError(f"{_PREFIX}merges has {merge!r}, expected two tokens with one space between them")
    return left, right


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[str] | None, kind: _PreTokenizer) -> tokenizers.Tokenizer:
    if merges is None:
        raise ValueError(f"{_PREFIX}merges is missing: byte-level BPE needs the list of merges")
    pairs = [_merge_pair(merge) for merge in merges]
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=kind.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{_PREFIX}merges does not fit {_PREFIX}tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if kind.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (left out of decoded text); user-defined ones are found whole but are text."""
    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind == gguf.TokenType.CONTROL:
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == gguf.TokenType.USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    backend.add_tokens(added)


def _token(tokens: list[str], token_id: int, key: str) -> str:
    if not 0 <= token_id < len(tokens):
        raise ValueError(f"{_PREFIX}{key} is {token_id}, but the vocabulary has ids 0 .. {len(tokens) - 1}")
    return tokens[token_id]


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    for name, value in metadata.items():
        if name == _TEMPLATE:
            templates[DEFAULT_TEMPLATE] = value
        elif name.startswith(_TEMPLATE + ".") and isinstance(value, str):
            templates[name.removeprefix(_TEMPLATE + ".")] = value
    return templates
