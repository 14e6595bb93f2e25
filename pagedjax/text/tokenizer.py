"""A checkpoint's tokenizer: text to ids and back, its end tokens, and its chat template.

Whether a begin token is added is the checkpoint's decision, and it is never added twice: a chat template writes its
own, and a text that already starts with the begin token keeps one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from pagedjax.text import chat_template, gguf_tokenizer, hf_folder
from pagedjax.text.parts import DEFAULT_TEMPLATE, TokenizerParts, as_id_tuple, union

if TYPE_CHECKING:
    import gguf


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` with what generation needs to know beside it.

    Args:
        backend: encodes and decodes; its post-processor adds begin and end tokens.
        special_tokens: named special tokens, such as {"bos_token": "<s>", "eos_token": "</s>"}; templates read them.
        eos_ids: tokens that end a generation, beside the one named `eos_token`.
        chat_templates: jinja sources by name; the one named "default" is used unless another is asked for.

    Raises:
        ValueError: `eos_token` is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        eos_token = self.special_tokens.get("eos_token")
        eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        if eos_token is not None and eos_id is None:
            raise ValueError(
                f"eos_token {eos_token!r} is not in the vocabulary, so nothing would end a generation: correct it"
            )
        self._eos_ids = union(() if eos_id is None else (eos_id,), as_id_tuple(list(eos_ids), "eos_ids"))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Reads a Hugging Face folder: tokenizer.json, and what the other files say about it.

        End tokens are united from the tokenizer's `eos_token`, config.json and generation_config.json.

        Raises:
            ValueError: tokenizer.json is missing or the files contradict each other; the message says what to provide.
        """
        return cls._from_parts(hf_folder.read(Path(folder)))

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | gguf.GGUFReader) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes.

        Args:
            source: the file's path, or a reader that has it open, which saves seconds with a large vocabulary:
                `pagedjax.loaders.gguf_file.GGUFFile(path).reader` is a quick one.

        Raises:
            ValueError: the kind of tokenizer is not one that can be reproduced exactly; the message names it.
        """
        return cls._from_parts(gguf_tokenizer.read(source))

    @classmethod
    def _from_parts(cls, parts: TokenizerParts) -> Tokenizer:
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            eos_ids=parts.eos_ids,
            chat_templates=parts.chat_templates,
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files from which `from_folder` makes the same tokenizer; an existing config.json still counts."""
        hf_folder.write(
            Path(folder), TokenizerParts(self.backend, self.special_tokens, self.eos_ids, self.chat_templates)
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens among them."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_id(self) -> int | None:
        """The begin token, whether or not `encode` adds it."""
        return self._special_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a generation, the tokenizer's own first."""
        return self._eos_ids

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode(..., skip_special_tokens=True)` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens "<0x00>" to "<0xFF>" where the decoder turns runs of them into text, else none."""
        decoder = self.backend.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():  # the decoder as JSON
            return frozenset()
        ids = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    @property
    def chat_template(self) -> str | None:
        """The default chat template's jinja source, or None."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text become their ids.

        Args:
            text: any text, "" too.
            add_special_tokens: adds the begin and end tokens that the checkpoint asks for (many ask for none).

        Raises:
            ValueError: `text` is not text, or holds half of a surrogate pair, which has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode takes text, not {type(text).__name__}: {text!r:.80}")
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"text that is not valid Unicode cannot be encoded: {text!r:.80}") from error
        begins_twice = add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_id]
        return ids[1:] if begins_twice else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary leave no text.

        Raises:
            ValueError: an id is negative or does not fit 32 bits.
        """
        ids = [int(token_id) for token_id in token_ids]
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            wrong = next(i for i in ids if not 0 <= i < 2**32)
            raise ValueError(f"{wrong} is no token id: ids are 0 .. {self.vocab_size - 1}") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; see `apply_chat_template`."""
        source = self._template_source(template, has_tools=bool(variables.get("tools")))
        names = {**self.special_tokens, "tools": None, "documents": None, **variables}
        return chat_template.render(source, messages, add_generation_prompt=add_generation_prompt, **names)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: the template's text, to which no begin or end token is added.

        Args:
            messages: oldest first, such as [{"role": "user", "content": "Hello"}].
            add_generation_prompt: ends with what opens the assistant's turn.
            template: the name of one of `chat_templates`, or jinja source; None takes the checkpoint's default.
            **variables: what else the template reads, such as `tools` or `enable_thinking`.

        Raises:
            ValueError: there is no template, or it or the messages are wrong.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, template=template, **variables)
        return self.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _adds_bos(self) -> bool:
        plain, with_ends = (self.backend.encode("a", add_special_tokens=add).ids for add in (False, True))
        return self.bos_id is not None and with_ends[: len(plain) + 1] == [self.bos_id, *plain]

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _template_source(self, template: str | None, has_tools: bool) -> str:
        if template is not None:
            return self.chat_templates.get(template, template)
        if has_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        source = self.chat_template
        if source is None:
            known = sorted(self.chat_templates)
            raise ValueError(f"no default chat template (the tokenizer has {known}): pass template=, or a text prompt")
        return source
