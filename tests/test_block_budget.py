"""pagedjax.block_budget: never above the truth, equal to it when nothing is in flight."""

from __future__ import annotations

import collections
import random

import pytest

from pagedjax.block_budget import BlockBudget


def test_debits_and_credits_count_at_once() -> None:
    budget = BlockBudget(10)
    budget.debit(4)
    assert budget.available == 6
    budget.credit(1)
    assert budget.available == 7


def test_more_than_there_is_cannot_be_planned() -> None:
    budget = BlockBudget(3)
    with pytest.raises(RuntimeError, match="planned 4 blocks with 3 available"):
        budget.debit(4)
    assert budget.available == 3


def test_a_result_replaces_the_bound() -> None:
    budget = BlockBudget(10)
    budget.debit(4)
    budget.dispatch()
    budget.settle(8)  # the step used two of the four
    assert budget.available == 8


def test_plans_that_the_result_does_not_reflect_stay_counted() -> None:
    budget = BlockBudget(10)
    budget.debit(4)
    budget.dispatch()
    budget.debit(2)
    budget.dispatch()
    budget.debit(1)
    budget.credit(3)
    budget.settle(7)  # of the first plan: one block more than was planned for
    assert budget.available == 7 - 2 - 1 + 3
    budget.dispatch()
    budget.settle(5)
    assert budget.available == 5 - 1 + 3
    budget.settle(7)
    assert budget.available == 7


def test_reset_forgets_what_is_in_flight() -> None:
    budget = BlockBudget(10)
    budget.debit(4)
    budget.dispatch()
    budget.debit(1)
    budget.reset(10)
    assert budget.available == 10
    budget.dispatch()
    budget.settle(10)
    assert budget.available == 10


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_bound_against_a_device(depth: int) -> None:
    """A device that uses at most what was planned, `depth` plans behind; what is credited is given back."""
    rng = random.Random(depth)
    total = 50
    budget, truth, held = BlockBudget(total), total, 0
    in_flight: collections.deque[tuple[int, int]] = collections.deque()  # blocks taken, blocks given back

    def land() -> None:
        nonlocal truth, held
        taken, given = in_flight.popleft()
        truth += given - taken
        held += taken
        assert truth >= 0
        budget.settle(truth)

    for _ in range(500):
        planned = rng.randint(0, min(5, budget.available))
        budget.debit(planned)
        given = rng.randint(0, held)  # of what results have shown, hence exclusive and known
        held -= given
        budget.credit(given)
        taken = rng.randint(0, planned)
        in_flight.append((taken, given))
        budget.dispatch()
        while len(in_flight) > rng.randint(0, depth):
            land()
        pending_given = sum(given for _, given in in_flight)
        assert 0 <= budget.available <= truth + pending_given
        if not in_flight:
            assert budget.available == truth
