"""Token ids to text, a few at a time: the pieces, joined, are exactly the decoded whole.

A token is not a piece of text by itself: it may hold part of a character, and decoders treat the first token of a
text specially. So the last few tokens are kept as a window that is decoded anew with each step, and what is already
given out is skipped by its length. Three things make that exact:

- **Unfinished characters wait.** Up to `_MAX_UNFINISHED` U+FFFD at the end of the text may still become a character.
- **Byte runs wait.** Where a decoder turns consecutive byte tokens ("<0xE4>") into text as one run, with U+FFFD for
  all of it if any is wrong, nothing of a run is final before it ends.
- **The window shrinks only where it proves harmless.** The shorter window must decode to the same end, with at least
  `_MIN_CONTEXT` characters that are already given out: these absorb whatever the decoder does to a beginning, such as
  removing a space or misreading the rest of a cut character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedjax.text.protocol import TextTokenizer

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED = 3  # a UTF-8 character has at most 4 bytes, so at most 3 of an unfinished one
_MIN_CONTEXT = 4  # more characters than a cut inside one can produce
_SHORT_WINDOWS = (6, 12, 24)  # tokens to shrink a window to, the first that will do
_GROWTH = 10  # tokens that a window grows by before it is shrunk; a step decodes one window, seldom two


class IncrementalDetokenizer:
    """Decodes a growing sequence of token ids. The cost of a token does not grow with the length of the sequence.

    Args:
        tokenizer: decodes; see `TextTokenizer`.
        skip_special_tokens: whether special tokens leave no text.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_ids = tokenizer.byte_ids
        self._vocab_size = tokenizer.vocab_size or 2**32
        self._window: list[int] = []
        self._num_decoded = 0  # tokens of the window whose text is known; a byte run behind them is still open
        self._num_given = 0  # characters of the window's text that are given out
        self._next_shrink = _SHORT_WINDOWS[0] + _GROWTH  # window length at which to try

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next token ids; returns the text that is final because of them, often "" or several characters.

        If the tokenizer raises, the ids are not taken.
        """
        window = self._window + [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        num_final = len(window)
        while num_final > self._num_decoded and self._is_open(window[num_final - 1]):
            num_final -= 1
        if num_final == self._num_decoded:
            self._window = window
            return ""
        text = self._decode(window[:num_final])
        self._window, self._num_decoded = window, num_final
        delta = self._give(text, len(text) - _num_unfinished(text))
        if num_final == len(window) and num_final >= self._next_shrink:
            self._shrink(text)
        return delta

    def finish(self) -> str:
        """The sequence ends here: returns the text that was held back, with U+FFFD for what stays unfinished."""
        text = self._decode(self._window)
        self._num_decoded = len(self._window)
        return self._give(text, len(text))

    def _is_open(self, token_id: int) -> bool:
        """Whether a byte run goes on after this token; ids outside the vocabulary leave no text and do not end it."""
        return token_id in self._byte_ids or (bool(self._byte_ids) and token_id >= self._vocab_size)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _give(self, text: str, num_final: int) -> str:
        delta = text[self._num_given : num_final]
        self._num_given = max(self._num_given, num_final)
        return delta

    def _shrink(self, text: str) -> None:
        num_open = len(text) - self._num_given
        for num_kept in _SHORT_WINDOWS:
            window = self._window[-num_kept:]
            short_text = self._decode(window)
            if text.endswith(short_text) and len(short_text) - num_open >= _MIN_CONTEXT:
                self._window = window
                self._num_decoded = len(window)
                self._num_given = len(short_text) - num_open
                self._next_shrink = num_kept + _GROWTH
                return
        self._next_shrink = 2 * len(self._window)


def _num_unfinished(text: str) -> int:
    num_unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
    return min(num_unfinished, _MAX_UNFINISHED)
