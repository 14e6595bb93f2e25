"""pagedjax.scheduler where a request has several samples: they compute the prompt once, and none waits for ever.

`Loop.step` checks that shared blocks hold the sequence's own tokens and that the host's account is the device's.
"""

from __future__ import annotations

import pytest
from host_loop import Loop, assert_alone

PREFIX = [token % 50 for token in range(3, 43)]  # 40 tokens, 10 blocks of 4


@pytest.mark.parametrize("caching", [False, True])
def test_samples_fork_one_prefill(caching: bool) -> None:
    loop = Loop(enable_prefix_caching=caching)
    samples = loop.add_samples([*PREFIX, 1], 8, max_tokens=6)
    loop.step()
    assert [s.row is None for s in samples] == [False] + [True] * 7
    plan = loop.step()
    # With a cache the first 40 tokens are in full blocks already; without, the rows are forked there.
    assert [admission.num_tokens for admission in plan.admits] == [40] * 7
    assert [admission.parent is None for admission in plan.admits] == [caching] * 7
    assert loop.device.num_usable_blocks - len(loop.device.free) == 10 + 8
    loop.run()
    assert_alone(samples)
    assert len({tuple(s.output_ids) for s in samples}) == 8
    assert loop.device.num_computed == 40 + 8 * 6


@pytest.mark.parametrize("caching", [False, True])
def test_a_fork_in_the_middle_of_a_block_copies_it(caching: bool) -> None:
    loop = Loop(enable_prefix_caching=caching, num_blocks=20)
    samples = loop.add_samples([*PREFIX, 1, 2, 3], 4, max_tokens=6)
    loop.step()
    plan = loop.step()
    assert [(a.num_tokens, a.parent) for a in plan.admits] == [(42, samples[0].row)] * 3
    # Ten shared blocks; the first sample's tail, full by now, and one it has grown into; a copy for each other.
    assert loop.device.num_usable_blocks - len(loop.device.free) == 10 + 1 + 3
    loop.run()
    assert_alone(samples)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_more_samples_than_rows_run_in_waves(caching: bool, rows: int) -> None:
    loop = Loop(enable_prefix_caching=caching, max_num_seqs=rows)
    samples = loop.add_samples([*PREFIX, 1], 8, max_tokens=6)
    loop.run()
    assert_alone(samples)
    prefills = 8 if rows == 1 and not caching else 1  # in one row, nobody is there to fork when the next one starts
    assert loop.device.num_computed == prefills * 40 + 8 * 6


@pytest.mark.parametrize("caching", [False, True])
def test_samples_in_a_pool_for_one_do_not_wait_for_each_other_for_ever(caching: bool) -> None:
    loop = Loop(enable_prefix_caching=caching, num_blocks=8, max_num_batched_tokens=3)
    samples = loop.add_samples(PREFIX[:20], 5, max_tokens=8)
    loop.run(max_steps=5 * 28)
    assert_alone(samples)
    assert loop.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("steps", "forks"), [(0, True), (1, False), (9, False)])
def test_a_sample_does_not_fork_where_the_window_has_passed(steps: int, forks: bool) -> None:
    loop = Loop(max_num_seqs=2, window=7)
    first, second, third = loop.add_samples(PREFIX[:21], 3, max_tokens=20)
    for _ in range(2 + steps):
        loop.step()
    loop.abort(second)
    (admission,) = loop.step().admits
    # The third one starts at token 20, which sees 14 and what follows: the block of 12. The first sample has given it
    # back when it has computed 23 tokens.
    assert (admission.sequence, admission.parent) == (third, first.row if forks else None)
    assert admission.num_tokens == (20 if forks else 0)
    loop.run()
    assert_alone([first, third])


def test_the_first_sample_is_aborted_while_its_siblings_are_held() -> None:
    loop = Loop(max_num_batched_tokens=8)
    first, *others = loop.add_samples(PREFIX, 3)
    loop.step(), loop.step()
    loop.abort(first)
    loop.run()
    assert_alone(others)
    assert loop.device.num_computed == 16 + 39 + 2 * 10


@pytest.mark.parametrize("caching", [False, True])
def test_a_sample_does_not_fork_what_older_weights_have_computed(caching: bool) -> None:
    loop = Loop(enable_prefix_caching=caching, max_num_seqs=2)
    first, second, third = loop.add_samples([*PREFIX, 1], 3, max_tokens=20)
    for _ in range(3):
        loop.step()
    loop.change_weights(recompute=False)
    loop.abort(second)
    (admission,) = loop.step().admits
    assert (admission.sequence, admission.parent, admission.num_tokens) == (third, None, 0)
    loop.run()
    assert_alone([first, third])
