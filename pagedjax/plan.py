"""What goes down to the device for a step and what comes back: one value each way, host side.

The plan says how many tokens each row gets, never which blocks: the device owns those. Plain Python and numpy, so the
scheduler runs without jax.

Letters: P sequences that take part in a step, R rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pagedjax.request import Sequence

NO_TOKEN = -1  # in StepResult.tokens: the row sampled nothing in this inner step

# StepResult.finish: why the device stopped the row with this token.
RUNNING, STOPPED, AT_LENGTH = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A sequence's part of a plan, as `Parts` has it in columns."""

    sequence: Sequence
    row: int
    epoch: int
    first_position: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """Who takes part in a step, in columns: with hundreds of rows, objects for each would take most of the host's time.

    Attributes:
        sequences: P of them.
        epochs: of each; tells a result for a row that was given up meanwhile from a current one.
        rows: i32[P].
        first_positions: i32[P] of the first token computed.
        num_tokens: i32[P] in the first inner step.
    """

    sequences: list[Sequence]
    epochs: list[int]
    rows: np.ndarray
    first_positions: np.ndarray
    num_tokens: np.ndarray

    @classmethod
    def of(cls, num_tokens: dict[Sequence, int], last: Parts | None = None) -> Parts:
        """Of sequences whose `num_computed` includes these tokens.

        Args:
            num_tokens: by sequence.
            last: of the plan before: where it has the same sequences, their rows are taken from it.
        """
        sequences, counts = list(num_tokens), np.array(list(num_tokens.values()), np.int32)
        epochs = [sequence.epoch for sequence in sequences]
        if last is not None and (sequences, epochs) == (last.sequences, last.epochs):  # an epoch has one row
            rows = last.rows
        else:
            rows = np.array([sequence.row for sequence in sequences], np.int32)
        computed = np.array([sequence.num_computed for sequence in sequences], np.int32)
        return cls(sequences, epochs, rows, computed - counts, counts)

    def __len__(self) -> int:
        return len(self.sequences)

    def part(self, place: int) -> Scheduled:
        columns = (self.rows, self.first_positions, self.num_tokens)
        row, first, count = (int(column[place]) for column in columns)
        return Scheduled(self.sequences[place], row, self.epochs[place], first, count)


@dataclasses.dataclass(frozen=True)
class Admission:
    """A sequence that starts in its row: with nothing, with cached blocks, or as a fork of another row.

    Attributes:
        sequence: what starts.
        num_tokens: tokens whose K/V is there already.
        block_ids: of the full cached blocks that hold them, `NULL_BLOCK` for those behind the window; empty for a fork.
        parent: the row to fork, as it was before the plan, cut to `num_tokens`; it may be the sequence's own, which
            then only gets other tokens. None for no fork.
    """

    sequence: Sequence
    num_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    parent: int | None = None


@dataclasses.dataclass
class StepPlan:
    """One step: rows released first, then cached blocks dropped, sequences admitted to rows, and tokens computed.

    `num_steps` inner steps run in one program: the first computes `num_new_tokens`, each further one the token that the
    row has just sampled, as long as the row goes on. With `num_proposals`, where every row has one token, each inner
    step verifies up to that many proposals a row as well.
    """

    num_rows: int
    releases: list[int] = dataclasses.field(default_factory=list)
    drops: list[int] = dataclasses.field(default_factory=list)  # ids of blocks that leave the prefix cache
    admits: list[Admission] = dataclasses.field(default_factory=list)
    parts: Parts = dataclasses.field(default_factory=lambda: Parts.of({}))
    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    num_steps: int = 1
    num_proposals: int = 0
    weights_version: int = 0  # of the weights that are to compute it

    @property
    def scheduled(self) -> dict[int, Scheduled]:
        """The parts one by one, by row."""
        parts = [self.parts.part(place) for place in range(len(self.parts))]
        return {part.row: part for part in parts}

    @property
    def num_new_tokens(self) -> np.ndarray:  # i32[R]
        counts = np.zeros(self.num_rows, np.int32)
        counts[self.parts.rows] = self.parts.num_tokens
        return counts

    @property
    def num_later_tokens(self) -> int:
        """That each sequence computes after the first inner step; 0 where proposals decide: only the result tells."""
        return 0 if self.num_proposals else self.num_steps - 1

    @property
    def expected_lens(self) -> np.ndarray:  # i32[P]
        """Tokens with K/V that each sequence will have, unless it stops or proposals come true."""
        return self.parts.first_positions + self.parts.num_tokens + self.num_later_tokens

    @property
    def total_new_tokens(self) -> int:
        """Token places that an inner step needs."""
        return int(self.parts.num_tokens.sum()) + self.num_proposals * len(self.parts)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step produced, on the host. The logprobs are `pagedjax.logprobs.TokenLogprobs` with numpy leaves.

    Attributes:
        tokens: i32[L, R] sampled tokens of each row in order, and NO_TOKEN: a line an inner step, or as many as tokens
            can come of one, so that with proposals NO_TOKEN also stands between tokens.
        finish: i32[L, R] RUNNING, STOPPED or AT_LENGTH with that token.
        seq_lens: i32[R] tokens of the row with K/V in the pool.
        num_free_blocks: blocks free on the device after the step.
        filled: ids of the blocks that became full, row after row, each row's in order. The prefix cache has a reference
            to every one. Empty without a cache.
        ok: False if the pool or a row's table ran out, which the scheduler's reservation rules out.
        logprobs: [L, R], of the sampled tokens; None where no row asked.
        drawn: `pagedjax.sampled_logprobs.SampledLogprobs` [L, R] of them; None where no row asked.
        prompt_logprobs: [T], of the token that follows each packed token of the step; None where no row asked.
        num_proposed_tokens: proposals that were verified.
        num_accepted_tokens: tokens beyond the one that an inner step gives a row without proposals.
    """

    tokens: np.ndarray
    finish: np.ndarray
    seq_lens: np.ndarray
    num_free_blocks: int
    filled: np.ndarray
    ok: bool
    logprobs: Any = None
    drawn: Any = None
    prompt_logprobs: Any = None
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
