"""A tokenizer that the user brings, made into what the engine uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import tokenizers

from pagedjax.text.parts import as_id_tuple
from pagedjax.text.protocol import TextTokenizer, TokenizerLike
from pagedjax.text.tokenizer import Tokenizer


def as_tokenizer(tokenizer: TokenizerLike | tokenizers.Tokenizer | None) -> TextTokenizer | None:
    """Whatever can encode and decode, as a `TextTokenizer`.

    Args:
        tokenizer: this package's `Tokenizer`, a `tokenizers.Tokenizer`, a transformers tokenizer, or any object with
            `encode(text) -> ids` and `decode(ids) -> text`; its end tokens are `eos_ids` or `eos_token_id`, if it has
            them. None (token ids in, token ids out) stays None.

    Raises:
        ValueError: it has no `encode` or no `decode`.
    """
    if tokenizer is None or isinstance(tokenizer, Tokenizer | AdaptedTokenizer):
        return tokenizer
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return Tokenizer(tokenizer)
    missing = [name for name in ("encode", "decode") if not callable(getattr(tokenizer, name, None))]
    if missing:
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__} without {' and '.join(missing)}: pass an object with "
            "encode(text) -> ids and decode(ids) -> text, or None to work with token ids only"
        )
    return AdaptedTokenizer(tokenizer)


class AdaptedTokenizer:
    """A `TextTokenizer` around any object with `encode` and `decode`."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self._encode_options = _accepted(tokenizer.encode, ("add_special_tokens",))
        self._decode_options = _accepted(tokenizer.decode, ("skip_special_tokens", "clean_up_tokenization_spaces"))
        self.eos_ids = as_id_tuple(self._first("eos_ids", "eos_token_id"), "the tokenizer's eos_ids or eos_token_id")
        self.bos_id: int | None = self._first("bos_id", "bos_token_id")
        wrapped = _of_backend(tokenizer)
        self.special_ids = frozenset(self._first("special_ids", "all_special_ids") or ())
        self.special_ids |= wrapped.special_ids if wrapped else frozenset()
        self.byte_ids = frozenset(self._first("byte_ids") or (wrapped.byte_ids if wrapped else ()))
        self.vocab_size = self._find_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with one begin token at most.

        Raises:
            ValueError: the user's tokenizer returns something else.
        """
        options = {"add_special_tokens": add_special_tokens} if self._encode_options else {}
        ids = _as_ids(self.tokenizer.encode(text, **options), self.tokenizer)
        return ids[1:] if self.bos_id is not None and ids[:2] == [self.bos_id] * 2 else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. A tokenizer that cannot skip special tokens itself has them taken out first."""
        ids = [int(token_id) for token_id in token_ids]
        # Cleaning up spaces would change text that is already streamed.
        wanted = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        options = {name: wanted[name] for name in self._decode_options}
        if skip_special_tokens and "skip_special_tokens" not in options:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        return self.tokenizer.decode(ids, **options)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, by the user's tokenizer."""
        template = getattr(self.tokenizer, "apply_chat_template", None)
        if not callable(template):
            name = type(self.tokenizer).__name__
            raise ValueError(f"{name} has no apply_chat_template: pass the conversation as a text prompt or token ids")
        if _accepted(template, ("tokenize",)):
            variables = {"tokenize": True, "return_dict": False, **variables}
        result = template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(result, add_special_tokens=False) if isinstance(result, str) else _as_ids(result, template)

    def _first(self, *names: str) -> Any:
        values = (getattr(self.tokenizer, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    def _find_vocab_size(self) -> int | None:
        # The highest id, where it can be had: a count is less if ids are left out, and a transformers tokenizer's
        # vocab_size does not count added tokens.
        get_vocab = getattr(self.tokenizer, "get_vocab", None)
        if callable(get_vocab):
            return max(get_vocab().values(), default=-1) + 1
        size = len(self.tokenizer) if isinstance(self.tokenizer, Sized) else self._first("vocab_size")
        return None if size is None else int(size)


def _of_backend(tokenizer: TokenizerLike) -> Tokenizer | None:
    """What a transformers tokenizer wraps, which knows more about its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Tokenizer(backend) if isinstance(backend, tokenizers.Tokenizer) else None


def _accepted(function: Callable[..., Any], names: Sequence[str]) -> tuple[str, ...]:
    """Which keyword arguments a function has."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return ()
    return tuple(name for name in names if name in parameters)


def _as_ids(value: Any, source: Any) -> list[int]:
    ids = value.ids if hasattr(value, "ids") else value
    try:
        return [int(token_id) for token_id in ids]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{type(source).__name__} returned {value!r:.80}, expected a list of token ids") from error
