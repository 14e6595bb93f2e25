"""pagedjax.scheduler against a device in plain Python: who runs, who waits, who gives way, and that all of them end."""

from __future__ import annotations

import pytest
from host_device import Device
from host_loop import Loop, alone


def test_one_sequence() -> None:
    loop = Loop()
    sequence = loop.add([1, 2, 3], max_tokens=7)
    loop.run()
    assert sequence.output_ids == alone([1, 2, 3], 7)
    assert (sequence.finish_reason, sequence.row, sequence.epoch) == ("length", None, 1)


def test_livelock_by_preemption() -> None:
    loop = Loop(num_blocks=9)  # 8 blocks for two that end at 5 each
    a, b = loop.add(4, max_tokens=16), loop.add(4, max_tokens=16)
    loop.run(max_steps=40)  # `step` asserts that the oldest always advances
    assert loop.scheduler.num_preemptions == 1
    assert (a.request.metrics.num_preemptions, b.request.metrics.num_preemptions) == (0, 1)
    assert [s.output_ids for s in (a, b)] == [alone([1] * 4, 16), alone([2] * 4, 16)]
    assert loop.ended == [a, b]


def test_prefill_does_not_starve_decode() -> None:
    loop = Loop(max_num_batched_tokens=16)
    a = loop.add(4, max_tokens=100)
    loop.step()
    b = loop.add(160)
    while not b.output_ids:
        before = len(a.output_ids)
        plan = loop.step()
        assert len(a.output_ids) == before + 1
        assert b.row is not None
        assert plan.scheduled[b.row].num_tokens == min(15, 160 - plan.scheduled[b.row].first_position)
    assert len(a.output_ids) == 1 + 11  # 160 tokens, 15 at a time


def test_every_running_sequence_advances_though_the_budget_is_small() -> None:
    loop = Loop(max_num_batched_tokens=3)
    for _ in range(6):
        loop.add(10)
    loop.step()
    assert len(loop.scheduler.running) == 1  # the first takes the whole budget, the next ones start as it allows
    loop.run()
    assert all(len(s.output_ids) == 10 for s in loop.arrivals)


def test_chunks_of_earlier_prompts_come_first() -> None:
    loop = Loop(max_num_batched_tokens=16)
    a, b, c = loop.add(20), loop.add(20), loop.add(3)
    chunks = [
        {int(p.sequence.request.request_id): p.num_tokens for p in loop.step().scheduled.values()} for _ in range(4)
    ]
    assert chunks == [{0: 16}, {0: 4, 1: 12}, {0: 1, 1: 8, 2: 3}, {0: 1, 1: 1, 2: 1}]
    assert [len(s.output_ids) for s in (a, b, c)] == [3, 2, 2]


@pytest.mark.parametrize(("prompt", "max_tokens"), [(29, 16), (32, 16), (29, 1 + 1), (20, 20), (28, 2), (1, 29)])
def test_a_sequence_that_can_never_fit_is_refused(prompt: int, max_tokens: int) -> None:
    loop = Loop(num_blocks=8, max_model_len=64)  # 7 usable blocks of 4 tokens
    needed = -(-(prompt + max_tokens - 1) // 4)
    message = (
        rf"{prompt} prompt tokens \+ {max_tokens} to generate need {needed} blocks of 4 .* 7 usable ones \(28 tokens\)"
    )
    with pytest.raises(ValueError, match=message):
        loop.add(prompt, max_tokens)
    assert not loop.scheduler.waiting
    sequence = loop.add(3, max_tokens=3)
    loop.run()
    assert len(sequence.output_ids) == 3


@pytest.mark.parametrize(("prompt", "max_tokens"), [(28, 1), (1, 28), (20, 9)])
def test_a_sequence_that_just_fits_runs(prompt: int, max_tokens: int) -> None:
    loop = Loop(num_blocks=8, max_model_len=64, watermark=0.5)
    sequence = loop.add(prompt, max_tokens)
    loop.run()
    assert len(sequence.output_ids) == max_tokens  # the last token needs no slot


def test_the_model_length() -> None:
    loop = Loop(max_model_len=16)
    for prompt in (16, 17):
        with pytest.raises(ValueError, match=rf"the prompt has {prompt} tokens.*max_model_len=16"):
            loop.add(prompt)
    sequence = loop.add(15, max_tokens=10)
    loop.run()
    assert len(sequence.output_ids) == 1


def test_admission_leaves_the_watermark() -> None:
    loop = Loop(num_blocks=11, watermark=0.2)  # 2 of 10 blocks
    loop.add(15, max_tokens=2)  # 4 blocks
    waits = loop.add(20, max_tokens=2)  # 5, and only 4 + 2 are left
    loop.step()
    assert waits.row is None
    loop.run()
    loop = Loop(num_blocks=11, watermark=0.2)
    loop.add(15, max_tokens=2)
    starts = loop.add(16, max_tokens=2)
    loop.step()
    assert starts.row is not None
    loop.run()


def test_the_watermark_never_stops_the_only_one() -> None:
    loop = Loop(num_blocks=11, watermark=0.9)
    sequence = loop.add(40, max_tokens=1)
    loop.run()
    assert len(sequence.output_ids) == 1


def test_nobody_overtakes() -> None:
    loop = Loop(num_blocks=11)
    loop.add(28)
    big, small = loop.add(20), loop.add(1, max_tokens=1)
    loop.step()
    assert big.row is None
    assert small.row is None
    loop.run()
    assert loop.ended.index(big) > 0


def test_rows_limit_who_runs() -> None:
    loop = Loop(max_num_seqs=2)
    for _ in range(5):
        loop.add(3, max_tokens=4)
    loop.step()
    assert (len(loop.scheduler.running), len(loop.scheduler.waiting)) == (2, 3)
    loop.run()
    assert set(loop.ended[:2]) == set(loop.arrivals[:2])
    assert loop.ended[4] is loop.arrivals[4]


def test_no_more_rows_than_tokens_in_a_step() -> None:
    loop = Loop(max_num_batched_tokens=2)
    for _ in range(4):
        loop.add(1, max_tokens=5)
    loop.run()
    assert all(len(s.output_ids) == 5 for s in loop.arrivals)


def test_blocks_that_earlier_chunks_still_need_are_not_given_away() -> None:
    loop = Loop(num_blocks=10, max_num_batched_tokens=8)
    a = loop.add(20, max_tokens=1)  # 5 of 9 blocks, 2 in the first step
    b = loop.add(20, max_tokens=1)
    while not a.finished:
        loop.step()
        assert b.row is None or a.finished
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_several_inner_steps() -> None:
    loop = Loop(decode_steps=8)
    a = loop.add(3, max_tokens=22)
    assert loop.step().num_steps == 1  # the prompt
    assert loop.step().num_steps == 8
    b = loop.add(3, max_tokens=4)
    assert loop.step().num_steps == 1  # b's prompt
    assert loop.step().num_steps == 3  # what b has left
    assert b.finished
    assert loop.step().num_steps == 8
    assert not a.finished
    loop.run()
    assert a.output_ids == alone([1] * 3, 22)


def test_a_stop_id_ends_a_row_in_the_middle_of_the_inner_steps() -> None:
    prompt = [4, 5]
    tokens = alone(prompt, 6)
    loop = Loop(decode_steps=8)
    sequence = loop.add(prompt, max_tokens=20, stop_ids=(tokens[4],))
    loop.run()
    assert sequence.output_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert sequence.finish_reason == "stop"


def test_fewer_inner_steps_where_blocks_are_short() -> None:
    loop = Loop(num_blocks=4, decode_steps=8)  # 3 blocks
    loop.add(4, max_tokens=9)
    loop.step()
    assert loop.step().num_steps == 8
    loop.run()
    loop = Loop(num_blocks=4, decode_steps=8)
    loop.add(3, max_tokens=7), loop.add(1, max_tokens=5)  # 3 blocks and 2
    loop.step()
    # Five slots, and each step takes two: the first row grows into the third block after one.
    assert loop.step().num_steps == 3
    loop.run()


def test_abort_while_waiting() -> None:
    loop = Loop(max_num_seqs=1)
    a, b, c = loop.add(3), loop.add(3), loop.add(3)
    loop.abort(c)
    loop.step()
    loop.abort(b)
    loop.run()
    assert (a.finish_reason, b.output_ids, c.output_ids) == ("length", [], [])


def test_abort_in_the_middle_of_a_prompt() -> None:
    loop = Loop(max_num_batched_tokens=4)
    a = loop.add(20)
    loop.step()
    assert 0 < a.num_computed < 20
    loop.abort(a)
    b = loop.add(5)
    loop.run()
    assert a.output_ids == []
    assert b.output_ids == alone([2] * 5, 10)


def test_abort_in_the_middle_of_decoding() -> None:
    loop = Loop()
    a, b = loop.add(5), loop.add(6)
    loop.step(), loop.step()
    loop.abort(a)
    loop.run()
    assert len(a.output_ids) == 2
    assert b.output_ids == alone([2] * 6, 10)


def test_abort_after_preemption() -> None:
    loop = Loop(num_blocks=9)
    a, b = loop.add(4, max_tokens=16), loop.add(4, max_tokens=16)
    while not loop.scheduler.num_preemptions:
        loop.step()
    loop.abort(b)
    loop.run()
    assert a.output_ids == alone([1] * 4, 16)


def test_a_released_row_can_start_another_in_the_same_plan() -> None:
    loop = Loop(num_blocks=4, max_num_seqs=1)
    a = loop.add(10, max_tokens=2)
    b = loop.add(12, max_tokens=1)
    loop.step(), loop.step()
    assert a.finished
    plan = loop.step()
    assert plan.releases == [0]
    assert [admission.sequence for admission in plan.admits] == [b]
    loop.run()


def test_a_late_result_of_a_row_given_up_is_dropped() -> None:
    """Abort between dispatch and result: released once, no token is taken, and the next in the row is not touched."""
    loop = Loop(num_blocks=6, max_num_seqs=1)
    a = loop.add(9, max_tokens=10)
    loop.step()
    loop.during = lambda: loop.abort(a)
    loop.step()
    loop.during = lambda: None
    assert len(a.output_ids) == 1
    b = loop.add(9, max_tokens=10)
    plan = loop.step()
    assert plan.releases == [0]
    assert b.output_ids == alone([2] * 9, 1)
    loop.run()
    assert b.output_ids == alone([2] * 9, 10)


def test_preempt_all_keeps_order_and_tokens() -> None:
    loop = Loop(max_num_seqs=2)
    for _ in range(3):
        loop.add(5)
    loop.step(), loop.step()
    loop.scheduler.preempt_all("weights")
    assert [s.request.request_id for s in loop.scheduler.waiting] == ["0", "1", "2"]
    loop.run()
    assert [s.output_ids for s in loop.arrivals] == [alone([i] * 5, 10) for i in (1, 2, 3)]


def test_reset_after_the_device_lost_everything() -> None:
    loop = Loop(num_blocks=12)
    a, b = loop.add(5), loop.add(6)
    loop.step(), loop.step()
    loop.abort(a)
    loop.scheduler.schedule()  # dispatched, and its result never comes
    loop.scheduler.reset()
    loop.device = Device(11, 4)
    loop.run()
    assert b.output_ids == alone([2] * 6, 10)
