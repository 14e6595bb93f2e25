"""pagedjax.scheduler: who starts from whose blocks, who waits for them, and what leaves the cache.

`Loop.step` checks that shared blocks hold the sequence's own tokens and that the host's account is the device's.
"""

from __future__ import annotations

from typing import Any

import pytest
from host_loop import Loop, alone, assert_alone

from pagedjax import scheduler

PREFIX = [token % 50 for token in range(3, 43)]  # 40 tokens, 10 blocks of 4


def cached(**options: Any) -> Loop:
    return Loop(enable_prefix_caching=True, **options)


def test_requests_added_at_once_compute_their_prefix_once() -> None:
    loop = cached(num_blocks=200, max_num_seqs=16)
    sequences = [loop.add([*PREFIX, token], max_tokens=5) for token in range(16)]
    assert [admission.sequence for admission in loop.step().admits] == sequences[:1]
    plan = loop.step()
    assert [admission.num_tokens for admission in plan.admits] == [40] * 15
    loop.run()
    assert_alone(sequences)
    assert loop.device.num_computed == 40 + 16 * 5
    assert (loop.scheduler.num_cached_tokens, loop.scheduler.num_prompt_tokens) == (15 * 40, 16 * 41)


def test_chunks_of_a_prefix_are_waited_for() -> None:
    loop = cached(max_num_batched_tokens=8)
    sequences = [loop.add([*PREFIX, token], max_tokens=2) for token in range(3)]
    for _ in range(5):
        loop.step()
        assert list(loop.scheduler.waiting) == sequences[1:]
    loop.run()
    assert_alone(sequences)
    assert loop.device.num_computed == 40 + 3 * 2


@pytest.mark.parametrize(("budget", "steps"), [(64, 1), (6, 2)])
def test_a_block_can_be_hit_only_after_the_step_that_filled_it(budget: int, steps: int) -> None:
    loop = cached(max_num_batched_tokens=budget)
    a, b = loop.add(PREFIX[:9]), loop.add(PREFIX[:9])
    for _ in range(steps):
        assert not any(admission.sequence is b for admission in loop.step().admits)
    (admission,) = loop.step().admits
    assert (admission.num_tokens, len(admission.block_ids)) == (8, 2)
    loop.run()
    assert_alone([a, b])


def test_a_full_hit_leaves_one_token_to_run() -> None:
    loop = cached()
    for prompt_len, hit in ((8, 4), (9, 8), (1, 0), (4, 0), (5, 4)):
        first, again = loop.add(PREFIX[:prompt_len]), None
        loop.run()
        again = loop.add(PREFIX[:prompt_len])
        (admission,) = loop.step().admits
        assert admission.num_tokens == again.request.num_cached_tokens == hit
        loop.run()
        assert_alone([first, again])


def test_those_that_do_not_wait_for_the_prefix_pass_those_that_do() -> None:
    loop = cached(max_num_batched_tokens=8)
    writer, held, other = loop.add(PREFIX[:21]), loop.add(PREFIX[:21]), loop.add([1, 2])
    while other.row is None:
        loop.step()
    assert held.row is None
    assert writer.row is not None
    loop.run()
    assert_alone([writer, held, other])


def test_what_was_generated_is_found_too() -> None:
    loop = cached()
    first = loop.add(PREFIX[:9], max_tokens=10)
    loop.run()
    again = loop.add([*first.token_ids, 7])  # 20 tokens, of which 18 have K/V: the last that was drawn has none
    (admission,) = loop.step().admits
    assert admission.num_tokens == 16
    loop.run()
    assert_alone([again])


def test_a_preempted_row_hits_its_own_old_blocks() -> None:
    loop = cached(num_blocks=6)
    sequence = loop.add(4, max_tokens=8)
    loop.step()
    assert (sequence.num_tokens, sequence.num_computed) == (5, 4)
    loop.scheduler.preempt_all("weights")
    (admission,) = loop.step().admits
    assert (admission.num_tokens, len(admission.block_ids)) == (4, 1)
    assert loop.device.rows[sequence.row].blocks[:1] == list(admission.block_ids)  # type: ignore[index]
    loop.run()
    assert_alone([sequence])
    assert loop.device.num_computed == 4 + 7  # nothing twice
    assert sequence.request.num_cached_tokens == 0  # it started with nothing


def test_preemption_by_a_short_pool_recomputes_less_with_a_cache() -> None:
    counts = []
    for caching in (False, True):
        loop = Loop(enable_prefix_caching=caching, num_blocks=11)
        sequences = [loop.add(12, max_tokens=16) for _ in range(2)]  # 7 blocks each, and the pool has 10
        loop.run(max_steps=60)
        assert loop.scheduler.num_preemptions == 1
        assert_alone(sequences)
        counts.append(loop.device.num_computed)
    assert counts[1] < counts[0]


def test_eviction_takes_what_was_used_longest_ago_and_of_a_sequence_the_end() -> None:
    loop = cached(num_blocks=9)  # 8 usable
    ids = {}
    for name, prompt in (("a", [1] * 12), ("b", [2] * 12)):
        loop.add(prompt, max_tokens=1)
        loop.step()
        (row,) = loop.device.rows.values()
        ids[name] = list(row.blocks)
        loop.run()
    loop.add([1] * 5, max_tokens=1)  # uses a's first block again
    loop.run()
    assert loop.ledger.num_free_blocks == 8 - 6
    loop.add([3] * 28, max_tokens=1)  # 7 blocks: 5 have to go
    assert loop.step().drops == [ids["a"][2], ids["a"][1], *reversed(ids["b"])]
    loop.run()


def test_blocks_in_use_are_never_evicted() -> None:
    loop = cached(num_blocks=8)  # 7 usable
    loop.add(PREFIX[:8], max_tokens=1)
    loop.run()
    user = loop.add([*PREFIX[:8], 1], max_tokens=9)  # holds the two cached blocks, and one to three of its own
    loop.step()
    loop.add([9] * 20, max_tokens=1)  # five more: it has to wait
    for _ in range(7):
        assert not loop.step().drops
    loop.run()
    assert_alone([user])


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_make_everything_cached_unreachable(recompute: bool) -> None:
    loop = cached()
    loop.add(PREFIX, max_tokens=1)
    loop.run()
    running = loop.add([*PREFIX[:20], 1, 2, 3], max_tokens=20)
    for _ in range(3):
        loop.step()
    num_cached = len(loop.device.retained)
    assert num_cached > 10
    loop.change_weights(recompute=recompute)
    assert loop.scheduler.has_changes
    plan = loop.step()
    assert len(plan.drops) == num_cached
    assert [admission.num_tokens for admission in plan.admits] == [0] * recompute
    again = loop.add(PREFIX, max_tokens=1)
    (admission,) = loop.step().admits
    assert admission.num_tokens == (20 if recompute else 0)
    loop.run()
    assert_alone([running, again])
    # Of the row that went on with K/V of older weights nothing has been published.
    of_running = 0 if not recompute else (23 + 19) // 4 - 5
    assert len(loop.device.retained) == 10 + of_running


def test_new_weights_on_an_idle_engine_free_all_blocks() -> None:
    loop = cached()
    loop.add(PREFIX, max_tokens=1)
    loop.run()
    loop.change_weights(recompute=True)
    loop.run()
    assert len(loop.device.free) == loop.device.num_usable_blocks


def test_salts_do_not_share() -> None:
    loop = cached()
    hits = []
    for salt in (None, "a", "b", "", "a", None):
        (sequence,) = loop.add_samples(PREFIX, 1, cache_salt=salt)
        loop.run()
        assert_alone([sequence])
        hits.append(sequence.request.num_cached_tokens)
    assert hits == [0, 0, 0, 0, 36, 36]
    at_once = [loop.add_samples([9] * 9, 1, cache_salt=salt)[0] for salt in ("a", "b")]
    assert len(loop.step().admits) == 2  # nor do they wait for each other
    loop.run()
    assert_alone(at_once)


@pytest.mark.parametrize("late", [False, True], ids=["between steps", "in flight"])
def test_the_writer_is_aborted_while_others_are_held(late: bool) -> None:
    loop = cached(max_num_batched_tokens=8)
    writer, *held = [loop.add([*PREFIX, token]) for token in range(3)]
    loop.step(), loop.step()
    if late:
        loop.during = lambda: loop.abort(writer)
        loop.step()
        loop.during = lambda: None
    else:
        loop.abort(writer)
    assert list(loop.scheduler.waiting) == held
    (admission,) = loop.step().admits
    assert (admission.sequence, admission.num_tokens) == (held[0], 16)  # what is there, but not the step given up
    loop.run()
    assert_alone(held)
    assert loop.device.num_computed == 16 + 8 * late + 24 + 2 * 10


def test_scores_are_computed_though_the_prompt_is_cached() -> None:
    loop = cached(max_num_batched_tokens=8)
    loop.add(PREFIX)
    loop.run()
    scored, plain = loop.add_samples(PREFIX, 2, scores=True)
    (admission,) = loop.step().admits
    assert (admission.sequence, admission.num_tokens) == (scored, 0)
    loop.step()
    assert len(scored.scores) == 16
    loop.scheduler.preempt_all("weights")
    (admission, *_) = loop.step().admits
    assert (admission.sequence, admission.num_tokens) == (scored, 16)  # the 17th score follows the 17th token
    while len(scored.scores) < 39:
        loop.step()
    loop.scheduler.preempt_all("weights")
    loop.run()
    assert len(scored.scores) == 39
    assert_alone([scored, plain])


def test_a_row_ended_by_the_host_publishes_only_what_the_host_knows() -> None:
    prompt, expected = PREFIX[:5], alone(PREFIX[:5], 12)
    loop = cached(decode_steps=8)
    sequence = loop.add(prompt, max_tokens=12)
    loop.host_stops[sequence] = (expected[3],)
    loop.run()
    assert sequence.output_ids == expected[: expected.index(expected[3]) + 1]
    assert len(loop.device.retained) == sequence.num_tokens // 4 < 3


def test_a_cached_prefix_behind_the_window_need_not_be_woken() -> None:
    """Woken as well, the prefix and what the prompt still needs would be more than the pool."""
    loop = Loop(
        num_blocks=14, block_size=1, window=2, max_num_batched_tokens=9, max_model_len=37, enable_prefix_caching=True
    )
    for prompt in ([1, 2, 3, 4, 5, 6], [9] * 7):
        loop.add(prompt, max_tokens=1)
        loop.run()
    assert (loop.ledger.num_free_blocks, loop.ledger.num_idle_blocks) == (0, 13)
    sequence = loop.add([1, 2, 3, 4, 5, *range(7, 17)], max_tokens=1)
    loop.step()
    assert sequence.request.num_cached_tokens == 5
    loop.run()


def test_an_interrupt_while_sequences_are_held_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(enable_prefix_caching=True)
    sequences = [loop.add([1] * 12 + [name]) for name in (2, 3, 4)]
    real, calls = scheduler.find_start, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "find_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.scheduler.schedule()
    assert [*loop.scheduler.running, *loop.scheduler.waiting] == sequences
