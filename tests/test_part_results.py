"""pagedjax.plan's columns and pagedjax.part_results: what a step gives each sequence, whatever rows they have."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.outputs import RequestMetrics
from pagedjax.part_results import PartResults
from pagedjax.plan import AT_LENGTH, NO_TOKEN, Parts, Scheduled, StepPlan, StepResult
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.text import OutputText

NUM_ROWS, BLOCK_SIZE = 5, 4


def sequence(row: int, num_computed: int, epoch: int = 0) -> Sequence:
    request = Request(str(row), None, [1] * 20, SamplingParams(), RequestMetrics(0.0))
    made = Sequence(request, 0, 0, frozenset(), 30 + row, OutputText(None))
    made.row, made.num_computed, made.epoch = row, num_computed, epoch
    return made


@pytest.fixture
def tokens() -> dict[Sequence, int]:
    """In rows 3, 0 and 4, from positions 7, 0 and 2 on."""
    return {sequence(3, 8, epoch=2): 1, sequence(0, 9): 9, sequence(4, 5): 3}


@pytest.fixture
def plan(tokens: dict[Sequence, int]) -> StepPlan:
    return StepPlan(NUM_ROWS, parts=Parts.of(tokens), num_steps=2)


def result(seq_lens: list[int], filled: list[int]) -> StepResult:
    drawn = np.array([[10, 11, 12, 13, 14], [20, 21, 22, 23, NO_TOKEN]], np.int32)
    finish = np.where(drawn == 20, AT_LENGTH, 0)
    return StepResult(drawn, finish, np.array(seq_lens, np.int32), 7, np.array(filled, np.int32), True)


def test_a_plan_counts_by_row(plan: StepPlan) -> None:
    assert plan.num_new_tokens.tolist() == [9, 0, 0, 1, 3]
    assert plan.total_new_tokens == 13
    assert StepPlan(NUM_ROWS).total_new_tokens == 0
    plan.num_proposals = 2
    assert plan.total_new_tokens == 13 + 3 * 2


def test_a_plan_knows_its_parts_one_by_one(plan: StepPlan, tokens: dict[Sequence, int]) -> None:
    first, second, third = tokens
    assert plan.scheduled == {
        3: Scheduled(first, 3, 2, 7, 1),
        0: Scheduled(second, 0, 0, 0, 9),
        4: Scheduled(third, 4, 0, 2, 3),
    }


def test_columns_do_not_follow_what_happens_later(plan: StepPlan, tokens: dict[Sequence, int]) -> None:
    for each in tokens:
        each.row, each.num_computed, each.epoch = None, 0, each.epoch + 1
    assert (plan.parts.rows.tolist(), plan.parts.epochs) == ([3, 0, 4], [2, 0, 0])
    assert plan.parts.first_positions.tolist() == [7, 0, 2]


def test_the_same_sequences_keep_their_rows(plan: StepPlan, tokens: dict[Sequence, int]) -> None:
    for each in tokens:
        each.num_computed += 1
    again = Parts.of(dict.fromkeys(tokens, 1), plan.parts)
    assert again.rows is plan.parts.rows
    assert again.first_positions.tolist() == [8, 9, 5]


def test_another_row_of_the_same_sequence_is_noticed(plan: StepPlan, tokens: dict[Sequence, int]) -> None:
    last = list(tokens)[-1]
    last.row, last.epoch = 1, last.epoch + 1
    assert Parts.of(tokens, plan.parts).rows.tolist() == [3, 0, 1]


def test_each_gets_what_its_row_brought(plan: StepPlan) -> None:
    # Row 0 fills two blocks, row 3 one with its second inner step, row 4 one.
    of_parts = PartResults.of(plan, result([9, 99, 99, 9, 6], [31, 32, 33, 34]), BLOCK_SIZE)
    assert of_parts.missing == [0, 1, 0]  # the second has ended with the first of two tokens
    assert of_parts.tokens == [[13, 23], [10, 20], [14, NO_TOKEN]]
    assert of_parts.finishes == [[0, 0], [0, AT_LENGTH], [0, 0]]
    assert of_parts.starts == [9, 0, 10]
    assert of_parts.block_ids == [[33], [31, 32], [34]]
    assert of_parts.goes_on == [False, False, False]


def test_without_a_cache_nobody_fills_anything(plan: StepPlan) -> None:
    of_parts = PartResults.of(plan, result([9, 0, 0, 9, 6], []), BLOCK_SIZE)
    assert of_parts.block_ids == [[], [], []]
    assert of_parts.goes_on == [True, False, False]  # the second has ended, the third drew one token of two


def test_a_row_that_stood_still_is_an_error(plan: StepPlan) -> None:
    with pytest.raises(RuntimeError, match="row 4 did not advance"):
        PartResults.of(plan, result([9, 0, 0, 8, 4], []), BLOCK_SIZE)


@pytest.mark.parametrize("continuation", [[], [5, 6, 7]])
def test_some_tokens_are_those_of_all(continuation: list[int]) -> None:
    made = sequence(0, 0)
    made.request.prompt_ids, made.continuation, made.output_ids = [1, 2, 3, 4, 5], continuation, [8, 9, 10, 11]
    places = range(made.num_tokens + 1)
    assert all(made.ids_between(i, j) == made.token_ids[i:j] for i in places for j in places[i:])
