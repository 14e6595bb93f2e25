"""A step's result, by the sequences that took part: lists, because of single numbers numpy makes an object each.

Letters: P sequences that took part, R rows, L tokens that one may have drawn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pagedjax import row_sampling
from pagedjax.plan import NO_TOKEN, RUNNING, StepPlan, StepResult

Candidates = dict[int, list[tuple[int, float]]]  # of each beam of a search, the next tokens and their logprobs


class PartResults(NamedTuple):
    """Columns beside those of `StepPlan.parts`.

    Attributes:
        missing: [P] tokens computed less than the plan counted on, because the sequence stopped; below 0: more, because
            proposals came true.
        tokens: [P][L] in order, with NO_TOKEN where none was drawn.
        finishes: [P][L] RUNNING, STOPPED or AT_LENGTH with that token.
        starts: [P] where the packed tokens of each begin.
        block_ids: [P] of the blocks that became full, of each in order.
        goes_on: [P] whether all went as planned: every token was drawn, none ended the sequence, no block became full.
    """

    missing: list[int]
    tokens: list[list[int]]
    finishes: list[list[int]]
    starts: list[int]
    block_ids: list[list[int]]
    goes_on: list[bool]

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult, block_size: int) -> PartResults:
        """Of a plan that has run; `result.filled` is empty or has every block that became full.

        Raises:
            RuntimeError: a row has not computed what the plan gave it, and not because it had stopped before.
        """
        parts, rows = plan.parts, plan.parts.rows
        seq_lens = result.seq_lens[rows]
        ran = seq_lens >= parts.first_positions + parts.num_tokens  # else nothing at all
        for place in np.flatnonzero(~ran):
            if parts.sequences[place].epoch == parts.epochs[place]:
                raise RuntimeError(f"row {rows[place]} did not advance: the device holds its sequence for ended")
        tokens, finishes = result.tokens[:, rows], result.finish[:, rows]
        missing = plan.expected_lens - seq_lens
        goes_on = ((tokens != NO_TOKEN) & (finishes == RUNNING)).all(axis=0) & (missing == 0)
        block_ids: list[list[int]] = [[]] * len(parts)
        if result.filled.size:
            filled = result.filled.tolist()
            num_filled = np.where(ran, seq_lens // block_size - parts.first_positions // block_size, 0)
            ends = _ends(plan, num_filled)
            for place in np.flatnonzero(num_filled):
                block_ids[place] = filled[ends[place] - num_filled[place] : ends[place]]
            goes_on &= num_filled == 0
        return cls(
            missing.tolist(),
            tokens.T.tolist(),
            finishes.T.tolist(),
            (_ends(plan, np.where(ran, parts.num_tokens, 0)) - parts.num_tokens).tolist(),
            block_ids,
            goes_on.tolist(),
        )


def _ends(plan: StepPlan, counts: np.ndarray) -> np.ndarray:
    """[P] where the things of each sequence end, of which it has `counts`, when they lie in order of rows."""
    by_row = np.zeros(plan.num_rows, np.int64)
    by_row[plan.parts.rows] = counts
    return np.cumsum(by_row)[plan.parts.rows]


def next_candidates(result: StepResult, row: int) -> list[tuple[int, float]]:
    """The most likely next tokens of a row, with their logprobs."""
    ids, values = result.logprobs.top_ids[0, row].tolist(), result.logprobs.top[0, row].tolist()
    return [(token, value) for token, value in zip(ids, values, strict=True) if token != row_sampling.NO_TOKEN]


def logprob_entry(logprobs: Any, index: tuple[int, ...], token: int, num_top: int) -> dict[int, float]:
    """The top `num_top` tokens and `token` itself, most likely first."""
    ids, values = logprobs.top_ids[index][:num_top].tolist(), logprobs.top[index][:num_top].tolist()
    entry = {i: value for i, value in zip(ids, values, strict=True) if i != row_sampling.NO_TOKEN}
    entry.setdefault(token, float(logprobs.token[index]))
    return entry
