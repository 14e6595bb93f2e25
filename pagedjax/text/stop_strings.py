"""Stop strings in streamed text: finds the first one, and holds back any text that may turn out to be part of one.

The text is treated as if its characters came one at a time, so how it is cut into pieces changes nothing. The stop
string whose last character comes first wins; of several that end at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Text that may be shown, and the stop string that ended it (None: none yet)."""

    text: str
    stop: str | None


def check_stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, as a tuple without repetitions.

    Raises:
        ValueError: an entry is not text, or is empty (it would match before the first character).
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for entry in stops:
        if not isinstance(entry, str):
            raise ValueError(f"stop has {entry!r} of type {type(entry).__name__}: give text, or use stop_token_ids")
        if not entry:
            raise ValueError(f"stop has '' in {stops!r}: an empty stop string matches at once; leave it out")
    return tuple(dict.fromkeys(stops))


class _Prefix:
    """How much of one stop string the text now ends with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # fallback[n]: the longest proper prefix of stop that its first n characters end with.
        self.fallback = [0, 0]
        for char in stop[1:]:
            self.fallback.append(self._next(self.fallback[-1], char))

    def _next(self, matched: int, char: str) -> int:
        while matched and (matched == len(self.stop) or self.stop[matched] != char):
            matched = self.fallback[matched]
        return matched + 1 if self.stop[matched] == char else 0

    def push(self, char: str) -> bool:
        self.matched = self._next(self.matched, char)
        return self.matched == len(self.stop)


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces.

    Args:
        stop: one stop string or several; none is legal and lets everything through.
        include_stop: whether the text that is let through ends with the stop string or before it.

    Attributes:
        stops: what it looks for.
        stopped_by: the stop string that was found, or None.
    """

    def __init__(self, stop: str | Sequence[str] = (), *, include_stop: bool = False) -> None:
        self.stops = check_stop_strings(stop)
        self._prefixes = [_Prefix(entry) for entry in self.stops]
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> StopMatch:
        """Takes the next piece; returns what can be shown now. After a match nothing comes any more.

        Args:
            text: the next piece, of any length.
            may_stop: False lets a stop string that ends in this piece pass as text (`min_tokens` is not reached).
        """
        if self.stopped_by is not None:
            return StopMatch("", self.stopped_by)
        if not self._prefixes:
            return StopMatch(text, None)
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            ended = [prefix.stop for prefix in self._prefixes if prefix.push(char)]
            if ended and may_stop:
                self.stopped_by = max(ended, key=len)
                self._held = ""
                end = position if self._include_stop else position - len(self.stopped_by)
                return StopMatch(pending[:end], self.stopped_by)
        # A stop string that was let pass counts as its longest proper prefix, which may still become another match.
        num_held = max(
            prefix.fallback[prefix.matched] if prefix.matched == len(prefix.stop) else prefix.matched
            for prefix in self._prefixes
        )
        shown = len(pending) - num_held
        self._held = pending[shown:]
        return StopMatch(pending[:shown], None)

    def finish(self) -> str:
        """The text ends here: what was held back is no stop string after all, and is returned."""
        held, self._held = self._held, ""
        return held
