"""Long lists of numbers, one behind another in two arrays, so that JSON says only where each begins and ends.

Every value comes back with all its bits, NaN and infinities too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Span = list[int]  # [first, end) of a list in the array of its kind

NO_ENTRY = -1  # as the size of a token's logprobs: it has none


class Numbers:
    """Lists of integers and of floats, each found again by its span.

    Args:
        ints: i64[I], what `arrays` has given.
        floats: f64[F], the same.
    """

    def __init__(self, ints: Sequence[int] | np.ndarray = (), floats: Sequence[float] | np.ndarray = ()) -> None:
        self._ints, self._floats = np.asarray(ints, np.int64).tolist(), np.asarray(floats, np.float64).tolist()

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All lists; never empty arrays, which Orbax does not save: a last element belongs to no list."""
        return {"ints": np.array([*self._ints, 0], np.int64), "floats": np.array([*self._floats, 0.0], np.float64)}

    def put_ints(self, values: Iterable[int]) -> Span:
        first = len(self._ints)
        self._ints.extend(values)
        return [first, len(self._ints)]

    def put_floats(self, values: Iterable[float]) -> Span:
        first = len(self._floats)
        self._floats.extend(values)
        return [first, len(self._floats)]

    def put_logprobs(self, entries: Sequence[dict[int, float] | None]) -> dict[str, Span]:
        known = [entry for entry in entries if entry is not None]
        return {
            "sizes": self.put_ints(NO_ENTRY if entry is None else len(entry) for entry in entries),
            "ids": self.put_ints(token for entry in known for token in entry),
            "values": self.put_floats(value for entry in known for value in entry.values()),
        }

    def ints(self, span: Span) -> list[int]:
        return _part(self._ints, span)

    def floats(self, span: Span) -> list[float]:
        return _part(self._floats, span)

    def logprobs(self, spans: dict[str, Span]) -> list[dict[int, float] | None]:
        pairs = zip(self.ints(spans["ids"]), self.floats(spans["values"]), strict=True)
        return [
            None if size == NO_ENTRY else dict(next(pairs) for _ in range(size)) for size in self.ints(spans["sizes"])
        ]


def _part(values: list, span: Span) -> list:
    first, end = span
    if not 0 <= first <= end <= len(values):
        raise ValueError(f"a list is said to be numbers {first} to {end} of {len(values)}")
    return values[first:end]
