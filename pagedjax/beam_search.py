"""Beam search over one prompt, on the host: which continuations live on, which have ended, and when to stop.

The rules are those of transformers' `generate(num_beams=..., length_penalty=..., early_stopping=...)`: of the best
`max(2, 1 + number of end tokens) * width` continuations of all beams those that end within the first `width` become
hypotheses, ranked by logprob / length ** length_penalty, and the best `width` others go on.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Literal

from pagedjax.sampling_params import MAX_LOGPROBS

EarlyStopping = bool | Literal["never"]

LARGEST_LOG = 690.0  # exp of it is a float


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        width: beams, and completions returned; at least 1.
        max_tokens: generated tokens of a completion, at most; at least 1.
        length_penalty: completions are ranked by logprob / length ** length_penalty, so above 0 long ones are favoured;
            any finite number.
        early_stopping: True stops once `width` completions have ended; False when no beam of the present length could
            enter them; "never" when none could at any length.

    Raises:
        ValueError: a value is outside what is written above.
    """

    width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        for name in ("width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; give an integer of at least 1")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping is {self.early_stopping!r}; give True, False or 'never'")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise ValueError(f"length_penalty is {self.length_penalty!r}; give a finite number")

    def num_candidates(self, num_end_ids: int) -> int:
        """How many of each beam's most likely tokens a step looks at.

        Raises:
            ValueError: more than a step returns.
        """
        factor = max(2, 1 + num_end_ids)
        if factor * self.width > MAX_LOGPROBS:
            raise ValueError(
                f"width {self.width} with {num_end_ids} end tokens looks at {factor * self.width} candidates a beam, "
                f"and a step returns {MAX_LOGPROBS}; use a width of at most {MAX_LOGPROBS // factor}"
            )
        return factor * self.width


@dataclasses.dataclass(frozen=True)
class Beam:
    """One continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    logprob: float = 0.0  # the sum

    def extended(self, token: int, logprob: float) -> Beam:
        return Beam((*self.token_ids, token), (*self.token_logprobs, logprob), self.logprob + logprob)


class BeamSearch:
    """The state of one search.

    Args:
        params: how to search; `max_tokens` already cut to what the model's context leaves.
        end_ids: tokens that end a completion.
    """

    def __init__(self, params: BeamSearchParams, end_ids: frozenset[int]) -> None:
        self.params, self.end_ids = params, end_ids
        self.num_candidates = params.num_candidates(len(end_ids))
        if abs(params.length_penalty) * math.log(params.max_tokens) > LARGEST_LOG:
            raise ValueError(
                f"length_penalty {params.length_penalty} is too large for {params.max_tokens} tokens: scores overflow; "
                "use one nearer 0"
            )
        self.reset()

    def reset(self) -> None:
        """Starts anew from the prompt."""
        self.beams = [Beam()]  # the live ones, most likely first
        self._ended: list[tuple[float, Beam]] = []  # score, completion; the best first, at most `width`

    @property
    def completions(self) -> list[tuple[float, Beam]]:
        """Score and tokens of what has ended, the best first; while nothing has, of the live beams."""
        return self._ended or [(self._score(beam.logprob, len(beam.token_ids)), beam) for beam in self.beams]

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Takes one step.

        Args:
            candidates: of each live beam the `num_candidates` most likely next tokens with their logprobs.

        Returns:
            For each live beam from now on, which beam it continues. Empty when the search is done.
        """
        pairs = (
            (beam.logprob + logprob, parent, token, logprob)
            for parent, beam in enumerate(self.beams)
            for token, logprob in candidates[parent]
        )
        # Of equal ones the first counts, as in a list of all beams' vocabularies one after another.
        best = heapq.nsmallest(self.num_candidates, pairs, key=lambda pair: (-pair[0], pair[1], pair[2]))
        extended = [(parent, self.beams[parent].extended(token, logprob)) for _, parent, token, logprob in best]
        length = len(self.beams[0].token_ids) + 1
        at_length = length >= self.params.max_tokens
        live = [(parent, beam) for parent, beam in extended if not (at_length or beam.token_ids[-1] in self.end_ids)]
        for place, (_, beam) in enumerate(extended):
            if place < self.params.width and (at_length or beam.token_ids[-1] in self.end_ids):
                self._ended.append((self._score(beam.logprob, length), beam))
        self._ended = sorted(self._ended, key=lambda ended: -ended[0])[: self.params.width]
        live = live[: self.params.width]
        if not live or not self._can_improve(live[0][1].logprob, length):
            return []
        self.beams = [beam for _, beam in live]
        return [parent for parent, _ in live]

    def _can_improve(self, logprob: float, length: int) -> bool:
        """Whether the best live beam may still lead to one of the best completions."""
        if len(self._ended) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        hopeful = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._score(logprob, self.params.max_tokens if hopeful else length) > self._ended[-1][0]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / max(length, 1) ** self.params.length_penalty
