"""The text of one generated sequence, as its tokens arrive: detokenized, and ended by stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagedjax.text.detokenizer import IncrementalDetokenizer
from pagedjax.text.protocol import TextTokenizer
from pagedjax.text.stop_strings import StopStrings, check_stop_strings


class TextDelta(NamedTuple):
    """New text, and the stop string that ended the sequence (None: it goes on)."""

    text: str
    stopped_by: str | None


class OutputText:
    """Turns the token ids of one sequence into text that never has to be taken back.

    Args:
        tokenizer: None leaves the text empty (then `stop` must be empty too).
        skip_special_tokens: whether special tokens leave no text.
        stop: stop strings; the first one to be complete ends the text, see `stop_strings`.
        include_stop: whether the text ends with the stop string or before it.
        min_tokens: a stop string that is complete with fewer tokens passes as text.

    Attributes:
        text: everything given out so far.
        stopped_by: the stop string that was found, or None.
        num_tokens: tokens taken; after a stop string, those up to and with the one that completed it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        skip_special_tokens: bool = True,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if tokenizer is None and check_stop_strings(stop):
            raise ValueError(f"stop={stop!r} needs a tokenizer: give the engine one, or use stop_token_ids")
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        )
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self.num_tokens = 0

    @property
    def makes_text(self) -> bool:
        """Whether there is a tokenizer; without one tokens need not be pushed."""
        return self._detokenizer is not None

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def stopped_by(self) -> str | None:
        return self._stops.stopped_by

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Takes the next token ids; what follows a stop string is ignored, and `num_tokens` does not count it.

        If the tokenizer raises, `num_tokens` says how many were taken before.
        """
        start = len(self._pieces)
        # One token at a time where a stop string has to be put down to a token, else all at once.
        groups = ((token_id,) for token_id in token_ids) if self._stops.stops else (tuple(token_ids),)
        for group in groups:
            if self.stopped_by is not None:
                break
            text = "" if self._detokenizer is None else self._detokenizer.push(group)
            self.num_tokens += len(group)
            self._take(text)
        return TextDelta("".join(self._pieces[start:]), self.stopped_by)

    def finish(self) -> str:
        """The sequence ends here (end token, length, abort): returns the text that was held back.

        That text may still complete a stop string, so look at `stopped_by` afterwards.
        """
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        start = len(self._pieces)
        self._take(self._detokenizer.finish())
        self._pieces.append(self._stops.finish())
        return "".join(self._pieces[start:])

    def _take(self, text: str) -> None:
        if text:
            shown, _ = self._stops.push(text, may_stop=self.num_tokens >= self._min_tokens)
            self._pieces.append(shown)
