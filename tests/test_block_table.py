"""What append, truncate, release, the window and defragment promise, and inputs that broke allocators elsewhere.

Random sequences of all transitions are in test_block_table_machine.py.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_block_table import BLOCKS, PAGE, ROWS, assert_same, entries, grow, ints, mask, new, only, pairs

from pagedjax import block_table as bt


def test_create_frees_all_but_the_null_block() -> None:
    table = new()
    bt.check(table)
    assert (table.num_blocks, table.block_size, table.max_num_seqs, table.max_blocks_per_seq) == (16, 4, 4, 8)
    assert int(table.num_free_blocks) == 15
    assert sorted(np.asarray(table.free_blocks)) == list(range(1, 16))
    assert not np.asarray(table.block_tables).any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 2, 4, 6), "num_blocks is 1;.*at least 2"),
        ((8, 0, 4, 6), "block_size is 0; pass at least 1"),
        ((8, 2, 0, 6), "max_num_seqs is 0; pass at least 1"),
        ((8, 2, 4, 0), "max_blocks_per_seq is 0; pass at least 1"),
        ((2**27, 16, 4, 6), "num_blocks 134217728 x block_size 16 is 2147483648.*at most 134217726 blocks"),
        ((8, 16, 4, 2**27), "max_blocks_per_seq 134217728 x block_size 16"),
    ],
)
def test_create_refuses_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bt.create(*sizes)


def test_inputs_of_the_wrong_shape_or_type_name_both() -> None:
    table = new()
    with pytest.raises(ValueError, match=re.escape("num_new_tokens is int32[3]; for this table pass int32[4]")):
        bt.append(table, ints(1, 2, 3))
    with pytest.raises(ValueError, match=re.escape("seq_lens is float32[4]; for this table pass int32[4]")):
        bt.truncate(table, jnp.ones(4))
    with pytest.raises(ValueError, match=re.escape("rows is int32[4]; pass a mask of the rows, bool[4]")):
        bt.release(table, ints(1, 0, 0, 0))
    with pytest.raises(ValueError, match=re.escape("block_ids is int32[2, 3]; for this table pass int32[2, 8]")):
        bt.adopt(table, ints(0, 1), jnp.zeros((2, 3), jnp.int32), ints(0, 0))
    with pytest.raises(ValueError, match=re.escape("window is int32[4]; for this table pass int32[]")):
        bt.free_outside_window(table, ints(1, 1, 1, 1))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 31, 32])
def test_append_takes_a_block_at_each_edge(tokens: int) -> None:
    once = grow(new(), 0, tokens, 0, 0)
    stepwise = new()
    for _ in range(tokens):
        stepwise = grow(stepwise, 0, 1, 0, 0)
    for table in (once, stepwise):
        bt.check(table)
        assert len(set(entries(table, 1)) - {bt.NULL_BLOCK}) == -(-tokens // PAGE)
        assert int(table.num_free_blocks) == 15 - -(-tokens // PAGE)
        assert table.seq_lens.tolist() == [0, tokens, 0, 0]


def test_append_of_nothing_changes_nothing() -> None:
    table = grow(new(), 3, 0, 2, 5)
    after, copies, ok = bt.append(table, ints(0, 0, 0, 0))
    assert bool(ok)
    assert int(copies.count) == 0
    assert_same(after, table)


@pytest.mark.parametrize(
    "news",
    [(29, 32, 5, 0), (3, 33, 0, 0), (1, 2**31 - 1, 0, 0), (1, 0, -1, 0)],
    ids=["blocks", "width", "overflow", "negative"],
)
def test_append_that_fails_gives_the_same_table(news: tuple[int, ...]) -> None:
    table = bt.fork(grow(new(), 5, 0, 0, 0), ints(-1, -1, -1, 0))
    after, copies, ok = bt.append(table, ints(*news[:3], 1))
    assert not bool(ok)
    assert pairs(copies) == set()
    assert_same(after, table)


def test_the_last_free_block_can_be_taken() -> None:
    table, _, ok = bt.append(new(), ints(32, 28, 0, 0))
    assert bool(ok)
    assert int(table.num_free_blocks) == 0
    bt.check(table)


def test_all_but_one_holder_copy_when_all_append() -> None:
    table = bt.fork(grow(new(), 5, 0, 0, 0), ints(-1, 0, 0, -1))
    (tail,) = {entries(table, row)[-1] for row in range(3)}
    after, copies, ok = bt.append(table, ints(1, 1, 1, 0))
    assert bool(ok)
    bt.check(after)
    tails = [entries(after, row)[-1] for row in range(3)]
    assert len(set(tails)) == 3
    assert tail in tails
    assert pairs(copies) == {(tail, block) for block in tails if block != tail}
    assert int(after.ref_counts[entries(after, 0)[0]]) == 3


def test_every_appender_copies_when_a_holder_stays() -> None:
    table = bt.fork(grow(new(), 5, 0, 0, 0), ints(-1, 0, 0, -1))
    tail = entries(table, 1)[-1]
    after, copies, _ = bt.append(table, ints(1, 0, 1, 0))
    bt.check(after)
    assert entries(after, 1)[-1] == tail
    assert pairs(copies) == {(tail, entries(after, 0)[-1]), (tail, entries(after, 2)[-1])}
    assert int(after.ref_counts[tail]) == 1


def test_a_retained_reference_never_appends() -> None:
    table = grow(new(), 5, 0, 0, 0)
    tail = entries(table, 0)[-1]
    table = bt.retain(table, ints(tail, 0, 0, 0))
    after, copies, _ = bt.append(table, ints(1, 0, 0, 0))
    assert pairs(copies) == {(tail, entries(after, 0)[-1])}
    bt.check(after, [tail])


def test_a_full_tail_is_never_copied() -> None:
    table = bt.fork(grow(new(), 8, 0, 0, 0), ints(-1, 0, -1, -1))
    after = grow(table, 1, 1, 0, 0)
    bt.check(after)
    assert entries(after, 0)[:2] == entries(after, 1)[:2]
    assert entries(after, 0)[2] != entries(after, 1)[2]


def test_truncate_gives_back_whole_blocks_only() -> None:
    table = grow(new(), 9, 12, 1, 0)
    kept = entries(table, 0)[:2]
    after = bt.truncate(table, ints(6, 99, -7, 4))
    bt.check(after)
    assert after.seq_lens.tolist() == [6, 12, 0, 0]
    assert entries(after, 0) == kept
    assert int(after.num_free_blocks) == int(table.num_free_blocks) + 2


def test_double_free_is_a_no_op() -> None:
    """Window 4, page 2, 10 tokens; fork, append to both, free both, free again."""
    table = grow(new(page=2), 10, 0, 0, 0)
    table = bt.free_outside_window(table, 4)
    assert entries(table, 0)[:3] == [bt.NULL_BLOCK] * 3
    table = bt.fork(table, ints(-1, 0, -1, -1))
    bt.check(table)
    assert int(table.num_free_blocks) == 13
    table = grow(table, 1, 1, 0, 0)
    bt.check(table)
    freed = bt.release(table, mask(0, 1))
    bt.check(freed)
    assert int(freed.num_free_blocks) == 15
    assert int(freed.ref_counts[bt.NULL_BLOCK]) == 0
    assert_same(bt.release(freed, mask(0, 1)), freed)


def test_two_rows_that_share_blocks_are_released_at_once() -> None:
    table = bt.fork(grow(new(), 7, 2, 0, 0), ints(-1, -1, 0, 0))
    after = bt.release(table, mask(0, 2, 3))
    bt.check(after)
    assert int(after.num_free_blocks) == 14


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 17, 32])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 2**31 - 1, 0, -1])
def test_window_keeps_what_later_queries_see(window: int, length: int) -> None:
    table = grow(new(), length, 0, 0, 0)
    chain = entries(table, 0)
    after = bt.free_outside_window(table, window)
    bt.check(after)
    # The queries at length - 1 and later see the keys from length - window on.
    seen = range(max(length - window, 0) if window > 0 else 0, length)
    assert entries(after, 0) == [block if at in {key // PAGE for key in seen} else 0 for at, block in enumerate(chain)]
    assert_same(bt.free_outside_window(after, window), after)


def test_a_tail_the_window_gave_back_is_copied_from_the_null_block() -> None:
    table = bt.truncate(bt.free_outside_window(grow(new(), 20, 0, 0, 0), 2), ints(6, 0, 0, 0))
    bt.check(table)
    assert entries(table, 0) == [0, 0]
    after, copies, ok = bt.append(table, ints(3, 0, 0, 0))
    assert bool(ok)
    bt.check(after)
    assert pairs(copies) == {(bt.NULL_BLOCK, entries(after, 0)[1])}
    assert int(after.num_free_blocks) == int(table.num_free_blocks) - 2


def test_defragment_moves_used_blocks_to_the_front() -> None:
    table = bt.fork(grow(new(), 12, 12, 12, 0), ints(-1, -1, -1, 2))
    held = entries(table, 1)[1]
    table = bt.release(bt.retain(table, ints(held, held, 0, 0)), mask(0, 1))
    chain = entries(table, 2)
    after, copies = bt.defragment(table)
    moves = dict(pairs(copies))
    assert not moves.keys() & set(moves.values())
    bt.check(after, [moves.get(held, held)] * 2)
    assert entries(after, 2) == entries(after, 3) == [moves.get(block, block) for block in chain]
    assert set(entries(after, 2)) | {moves.get(held, held)} == {1, 2, 3, 4}
    assert int(after.num_free_blocks) == 11
    again, none = bt.defragment(after)
    assert_same(again, after)
    assert int(none.count) == 0


def test_a_request_that_can_never_fit_fails_and_leaves_the_pool() -> None:
    """8 blocks of 4 are 28 usable slots."""
    table = new(blocks=8)
    for tokens, fits in [(29, False), (32, False), (28, True), (3, True)]:
        after, _, ok = bt.append(table, only(0, tokens))
        assert bool(ok) == fits
        bt.check(after)


@pytest.mark.parametrize("page", [PAGE, pytest.param(1, marks=pytest.mark.slow)])
def test_no_leaks_on_odd_endings(page: int) -> None:
    """50 requests of 1 to 17 tokens that end anywhere: released, cut, or forked over."""
    rng = np.random.default_rng(0)
    table = new(page)
    for _ in range(50):
        row, tokens = int(rng.integers(ROWS)), int(rng.integers(1, 18))
        table = bt.release(table, mask(row))
        after, _, ok = bt.append(table, only(row, tokens))
        table = after if ok else bt.truncate(table, ints(*rng.integers(0, 3, ROWS)))
        if rng.random() < 0.3:
            table = bt.fork(table, ints(*rng.integers(-1, ROWS, ROWS)))
        bt.check(table)
    table = bt.release(table, mask(*range(ROWS)))
    bt.check(table)
    assert int(table.num_free_blocks) == BLOCKS - 1
    assert not np.asarray(table.block_tables).any()


@pytest.mark.slow
def test_loops_turn_as_often_as_needed() -> None:
    """More blocks at once than one turn of the loops visits, very unevenly over the rows."""
    table = bt.create(1000, 1, 3, 400)
    table, _, ok = bt.append(table, ints(400, 1, 300))
    assert bool(ok)
    bt.check(table)
    blocks = entries(table, 0) + entries(table, 1) + entries(table, 2)
    assert len(set(blocks)) == 701
    forked = bt.fork(table, ints(2, -1, 0))
    bt.check(forked)
    assert [entries(forked, row) for row in range(3)] == [entries(table, row) for row in (2, 1, 0)]
    cut = bt.truncate(bt.fork(table, ints(-1, 0, -1)), ints(250, 399, 400))
    bt.check(cut)
    assert int(cut.num_free_blocks) == 999 - 399 - 300
    slid = bt.free_outside_window(cut, 10)
    bt.check(slid)
    assert int(slid.num_free_blocks) == 999 - 10 - 10 - 10
