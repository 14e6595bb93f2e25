"""What the engine asks of a tokenizer, and the less it asks of one that a user brings.

`as_tokenizer` (in `adapter`) turns a `TokenizerLike` into a `TextTokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TokenizerLike(Protocol):
    """The least a user's tokenizer needs. Used as well, where present: `eos_ids` or `eos_token_id`, `bos_id` or
    `bos_token_id`, `apply_chat_template`, `special_ids` or `all_special_ids`, `byte_ids`, `vocab_size`."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Token ids of a text, with the begin token if the model wants one."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of token ids."""


@runtime_checkable
class TextTokenizer(Protocol):
    """What the engine uses: text to ids and back, and which ids mean something."""

    @property
    def vocab_size(self) -> int | None:
        """One more than the highest token id, or None where it is not known."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, whether or not `encode` adds it."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a generation."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode(..., skip_special_tokens=True)` leaves out."""

    @property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that are one byte each and that `decode` turns into text a whole run at a time; often none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation."""
