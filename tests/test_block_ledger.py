"""pagedjax.block_ledger: what a release gives back, what a shared tail costs, and what the cache keeps."""

from __future__ import annotations

from pagedjax.block_ledger import BlockLedger
from pagedjax.outputs import RequestMetrics
from pagedjax.prefix_cache import PrefixCache
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.text import OutputText

SIZE = 4


def ledger_of(num_blocks: int, *, caching: bool = True, window: int | None = None) -> BlockLedger:
    return BlockLedger(num_blocks, SIZE, PrefixCache() if caching else None, window, 64)


def sequence_of(tokens: list[int], cache_salt: str | None = None) -> Sequence:
    params = SamplingParams(cache_salt=cache_salt)
    return Sequence(Request("0", None, tokens, params, RequestMetrics(0.0)), 0, 0, frozenset(), 99, OutputText(None))


def compute(ledger: BlockLedger, sequence: Sequence, num_tokens: int, ids: list[int], free: int) -> None:
    """A step computes the first `num_tokens` tokens: `ids` have become full, and `free` blocks are left."""
    first = sequence.num_computed // SIZE
    ledger.debit(ledger.growth(sequence, num_tokens - sequence.num_computed))
    ledger.advance(sequence, num_tokens)
    ledger.dispatch()
    land(ledger, sequence, first, ids, free)


def land(ledger: BlockLedger, sequence: Sequence, first: int, ids: list[int], free: int) -> None:
    """The result of a step that filled `ids`."""
    ledger.settle(free)
    ledger.fill(sequence, first, ids)
    ledger.pass_window(sequence)


def counts(ledger: BlockLedger) -> tuple[int, int]:
    return ledger.num_free_blocks, ledger.num_idle_blocks


def test_a_sequence_alone() -> None:
    ledger, sequence = ledger_of(10, caching=False), sequence_of([1] * 9)
    compute(ledger, sequence, 9, [], 7)
    assert (len(sequence.blocks), counts(ledger)) == (3, (7, 0))
    ledger.release(sequence)
    assert (sequence.blocks, sequence.num_computed, counts(ledger)) == ([], 0, (10, 0))
    ledger.release(sequence)  # a second time nothing is left to give
    assert counts(ledger) == (10, 0)


def test_full_blocks_stay_in_the_cache() -> None:
    ledger, sequence = ledger_of(10), sequence_of([1] * 9)
    compute(ledger, sequence, 9, [5, 3], 7)
    assert counts(ledger) == (7, 0)
    ledger.release(sequence)
    assert counts(ledger) == (8, 2)
    assert ledger.num_available_blocks == 10
    assert ledger.cache is not None
    assert ledger.cache.block_ids == [5, 3]
    assert ledger.take_drops() == []


def test_the_same_content_is_kept_once() -> None:
    ledger, sequences = ledger_of(10), [sequence_of([1] * 9) for _ in range(2)]
    compute(ledger, sequences[0], 9, [1, 2], 7)
    compute(ledger, sequences[1], 9, [4, 5], 4)
    assert ledger.take_drops() == [4, 5]
    ledger.release(sequences[1])
    assert counts(ledger) == (7, 0)
    ledger.release(sequences[0])
    assert counts(ledger) == (8, 2)


def test_a_block_is_credited_when_its_last_holder_goes() -> None:
    ledger, parent, child = ledger_of(10, caching=False), sequence_of([1] * 9), sequence_of([1] * 9)
    compute(ledger, parent, 9, [], 7)
    ledger.share(child, parent.blocks, 8)
    assert (len(child.blocks), counts(ledger)) == (2, (7, 0))
    ledger.release(parent)
    assert counts(ledger) == (8, 0)
    ledger.release(child)
    assert counts(ledger) == (10, 0)


def test_a_shared_tail_is_copied_by_the_first_token() -> None:
    ledger, parent, child = ledger_of(10, caching=False), sequence_of([1] * 9), sequence_of([1] * 9)
    compute(ledger, parent, 7, [], 8)
    ledger.share(child, parent.blocks, 6)
    assert child.blocks == parent.blocks[:1]
    assert (child.num_computed, ledger.growth(child, 1), ledger.growth(child, 2)) == (6, 1, 1)
    compute(ledger, child, 7, [], 7)
    assert child.blocks[1] is not parent.blocks[1]
    ledger.release(parent)
    assert counts(ledger) == (8, 0)
    ledger.release(child)
    assert counts(ledger) == (10, 0)


def test_a_hit_wakes_idle_blocks_and_they_are_not_evicted() -> None:
    ledger, first, second, other = ledger_of(4), *(sequence_of([t] * 13) for t in (1, 1, 2))
    compute(ledger, first, 13, [1, 2, 3], 0)
    ledger.release(first)
    assert counts(ledger) == (1, 3)
    assert ledger.cache is not None
    ledger.share(second, ledger.cache.match(ledger.keys(second, 2)), 8)
    assert counts(ledger) == (1, 1)
    assert ledger.num_available_blocks == 2
    ledger.debit(2)
    assert ledger.take_drops() == [3]
    assert len(ledger.cache.match(ledger.keys(other, 3))) == 0
    assert len(ledger.cache.match(ledger.keys(second, 3))) == 2


def test_eviction_only_where_free_blocks_do_not_suffice() -> None:
    ledger, sequence = ledger_of(6), sequence_of([1] * 12)
    compute(ledger, sequence, 12, [1, 2, 3], 3)
    ledger.release(sequence)
    ledger.debit(3)
    assert (ledger.take_drops(), counts(ledger)) == ([], (0, 3))
    ledger.debit(2)
    assert (ledger.take_drops(), counts(ledger)) == ([3, 2], (0, 1))


def test_a_block_whose_tokens_are_not_known_here_is_dropped() -> None:
    ledger, sequence = ledger_of(10), sequence_of([1] * 7)  # the device has gone on to 12 tokens
    compute(ledger, sequence, 12, [1, 2, 3], 7)
    assert ledger.take_drops() == [2, 3]
    ledger.release(sequence)
    assert counts(ledger) == (9, 1)


def test_a_row_given_up_in_flight_is_credited_once() -> None:
    ledger, sequence = ledger_of(10), sequence_of([1] * 9)
    compute(ledger, sequence, 5, [1], 8)
    ledger.debit(1)
    ledger.advance(sequence, 9)
    ledger.dispatch()
    ledger.release(sequence)  # its second block may become full, or not
    assert counts(ledger) == (7, 1)
    ledger.settle(7)
    ledger.discard([2])
    assert ledger.take_drops() == [2]
    assert counts(ledger) == (8, 1)  # the last block is known to be free by the next result
    ledger.settle_idle()
    assert counts(ledger) == (9, 1)


def test_inner_steps_in_flight_may_fill_a_block_that_was_not_full() -> None:
    ledger, sequence = ledger_of(10), sequence_of([1] * 6)
    compute(ledger, sequence, 5, [1], 8)
    ledger.advance(sequence, 6)
    ledger.dispatch()  # of three inner steps, say
    ledger.release(sequence)
    ledger.settle(8)
    ledger.discard([2])
    assert counts(ledger) == (9, 1)


def test_what_is_idle_is_not_settled_while_a_result_is_on_its_way() -> None:
    ledger, sequence = ledger_of(10, caching=False), sequence_of([1] * 6)
    ledger.debit(2)
    ledger.advance(sequence, 6)
    ledger.dispatch()
    ledger.settle_idle()
    assert counts(ledger) == (8, 0)


def test_the_window_passes_blocks_that_the_result_counts() -> None:
    ledger, sequence = ledger_of(10, caching=False, window=5), sequence_of([1] * 13)
    compute(ledger, sequence, 12, [], 8)  # keys from 7 on are kept
    assert [block is None for block in sequence.blocks] == [True, False, False]
    compute(ledger, sequence, 13, [], 8)
    assert [block is None for block in sequence.blocks] == [True, True, False, False]
    ledger.release(sequence)
    assert counts(ledger) == (10, 0)


def test_the_window_leaves_published_blocks_to_the_cache() -> None:
    ledger, sequence = ledger_of(10, window=5), sequence_of([1] * 13)
    compute(ledger, sequence, 12, [1, 2, 3], 7)
    assert counts(ledger) == (7, 1)
    ledger.release(sequence)
    assert counts(ledger) == (7, 3)


def test_the_window_passes_a_block_that_is_not_published() -> None:
    """The result counts it as the cache's, and it is free with the drop."""
    ledger, first, second = ledger_of(10, window=5), sequence_of([1] * 13), sequence_of([1] * 13)
    compute(ledger, first, 12, [1, 2, 3], 7)
    compute(ledger, second, 12, [4, 5, 6], 4)
    assert ledger.drops == [4, 5, 6]
    assert counts(ledger) == (5, 1)
    ledger.release(second)
    assert counts(ledger) == (7, 1)


def test_what_can_be_forked_behind_a_window() -> None:
    ledger, sequence = ledger_of(10, caching=False, window=5), sequence_of([1] * 13)
    compute(ledger, sequence, 13, [], 8)  # blocks from token 8 on
    assert ledger.reaches_back(sequence, 12)  # sees 8 .. 12
    assert not ledger.reaches_back(sequence, 11)  # sees 7


def test_keys_follow_tokens_and_weights() -> None:
    ledger, sequence = ledger_of(10), sequence_of([1] * 9)
    keys = ledger.keys(sequence, 5)
    assert [key.token_ids for key in keys] == [(1,) * 4] * 2
    assert ledger.keys(sequence, 1) == keys[:1]
    sequence.output_ids += [1, 1, 1]
    assert ledger.keys(sequence, 3)[:2] == keys
    assert len(ledger.keys(sequence, 3)) == 3
    assert ledger.keys(sequence_of([1] * 9), 2) == keys
    assert ledger.keys(sequence_of([1] * 9, cache_salt="a"), 2)[0] not in keys
    ledger.change_weights()
    assert ledger.keys(sequence, 2)[0] not in keys


def test_new_weights_empty_the_cache_and_rows_keep_their_blocks() -> None:
    ledger, idle, running = ledger_of(10), sequence_of([1] * 9), sequence_of([2] * 14)
    compute(ledger, idle, 9, [1, 2], 7)
    ledger.release(idle)
    compute(ledger, running, 9, [3, 4], 5)
    assert counts(ledger) == (5, 2)
    ledger.change_weights()
    assert sorted(ledger.take_drops()) == [1, 2, 3, 4]
    assert counts(ledger) == (7, 0)
    compute(ledger, running, 13, [5], 6)
    assert ledger.take_drops() == [5]  # computed with K/V of older weights, it is never published
    ledger.release(running)
    assert counts(ledger) == (10, 0)


def test_reset() -> None:
    ledger, sequence = ledger_of(10), sequence_of([1] * 9)
    compute(ledger, sequence, 9, [1, 2], 7)
    ledger.release(sequence)
    ledger.debit(9)
    ledger.dispatch()
    ledger.reset()
    assert (counts(ledger), ledger.drops) == ((10, 0), [])
    compute(ledger, sequence, 9, [3, 4], 7)
    assert counts(ledger) == (7, 0)
