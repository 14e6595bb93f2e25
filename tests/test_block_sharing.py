"""Rows that share blocks, and the prefix cache's own references."""

from small_block_table import BLOCKS, ROWS, adoption, assert_same, entries, grow, ints, mask, new, only, pairs

from pagedjax import block_table as bt


def test_fork_reads_all_parents_before_it_writes() -> None:
    table = grow(new(), 5, 14, 1, 0)
    before = [entries(table, row) for row in range(ROWS)]
    swapped = bt.fork(table, ints(1, 0, -1, 2))
    bt.check(swapped)
    assert [entries(swapped, row) for row in range(ROWS)] == [before[1], before[0], before[2], before[2]]
    assert swapped.seq_lens.tolist() == [14, 5, 1, 1]
    assert_same(bt.fork(table, ints(0, -1, 4, -9)), table)


def test_fork_of_an_empty_row_empties() -> None:
    table = bt.fork(grow(new(), 3, 8, 0, 0), ints(-1, 2, -1, -1))
    bt.check(table)
    assert table.seq_lens.tolist() == [3, 0, 0, 0]


def test_adopt_replaces_what_the_row_held() -> None:
    table = grow(new(), 8, 3, 0, 0)
    cached = entries(table, 0)
    table = bt.adopt(table, ints(1, -1), adoption(cached, []), ints(8, 0))
    bt.check(table)
    assert entries(table, 1) == cached
    assert int(table.num_free_blocks) == 13


def test_a_block_that_only_changes_rows_is_not_freed_between() -> None:
    table = grow(new(), 8, 4, 0, 0)
    first, second = entries(table, 0), entries(table, 1)
    table = bt.adopt(table, ints(0, 1), adoption(second + first[::-1], first), ints(12, 8))
    bt.check(table)
    assert [entries(table, 0), entries(table, 1)] == [second + first[::-1], first]


def test_adoptions_that_make_no_sense_are_left_out() -> None:
    table = grow(new(), 8, 5, 0, 0)
    a, b = entries(table, 0)
    free = int(table.free_blocks[0])
    for chain, length in [([a, free], 8), ([a, 0], 8), ([a, -1], 7), ([a, BLOCKS], 7), ([a, b], 33), ([a, b], -1)]:
        assert_same(bt.adopt(table, ints(1, -1), adoption(chain, []), ints(length, 0)), table)
    assert_same(bt.adopt(table, ints(ROWS, -1), adoption([a], []), ints(4, 0)), table)
    twice = bt.adopt(table, ints(2, 2), adoption([a], [b]), ints(4, 1))
    bt.check(twice)
    assert entries(twice, 2) == [b]


def test_retain_and_drop_count_and_ignore_what_is_not_there() -> None:
    table = grow(new(), 8, 0, 0, 0)
    a, b = entries(table, 0)
    free = int(table.free_blocks[0])
    table = bt.retain(table, ints(a, a, b, free))
    bt.check(table, [a, a, b])
    assert_same(bt.retain(table, ints(0, -1, BLOCKS, free)), table)
    table = bt.release(table, mask(0))
    bt.check(table, [a, a, b])
    assert int(table.num_free_blocks) == 13
    table = bt.drop(table, ints(b, b, b, a))
    bt.check(table, [a])
    assert int(table.num_free_blocks) == 14
    assert_same(bt.drop(table, ints(0, -1, BLOCKS, b)), table)


def test_a_drop_never_takes_a_rows_block() -> None:
    table = grow(new(), 8, 0, 0, 0)
    assert_same(bt.drop(table, ints(*entries(table, 0), 0, 0)), table)


def test_full_hit_copies_the_shared_block() -> None:
    """Page 4, a prompt of 8 tokens twice: the second run computes its last token again, in a block of its own."""
    table = grow(new(), 8, 0, 0, 0)
    cached = entries(table, 0)
    table = bt.release(bt.retain(table, ints(*cached, 0, 0)), mask(0))
    table = bt.adopt(table, ints(1, -1), adoption(cached, []), ints(7, 0))
    table, copies, _ = bt.append(table, only(1, 1))
    assert pairs(copies) == {(cached[1], entries(table, 1)[1])}
    assert entries(table, 1)[0] == cached[0]
    table = bt.release(table, mask(1))
    bt.check(table, cached)
    assert int(table.num_free_blocks) == 13


def test_a_preempted_row_hits_its_own_old_blocks() -> None:
    """Page 4, preempted at 5 tokens: 4 are cached; the next token goes into a new block, with nothing to copy."""
    table = grow(new(), 5, 0, 0, 0)
    cached = entries(table, 0)[0]
    table = bt.release(bt.retain(table, ints(cached, 0, 0, 0)), mask(0))
    table = grow(bt.adopt(table, ints(0, -1), adoption([cached], []), ints(4, 0)), 1, 0, 0, 0)
    bt.check(table, [cached])
    assert entries(table, 0)[0] == cached
    assert len(set(entries(table, 0))) == 2
