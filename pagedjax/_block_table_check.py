"""Verifies a block table from its contents alone, on the host: what every transition has to keep true.

Letters: R rows, P blocks per row at most, N blocks in the pool.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from pagedjax._block_state import NULL_BLOCK, BlockTable


class BlockTableError(ValueError):
    """A block table that contradicts itself, or the references its owner believes to have retained."""


def check(table: BlockTable, retained: Iterable[int] = ()) -> None:
    """Verifies that counts, free stack, entries and lengths agree. Eager: it reads the arrays.

    Args:
        table: the table.
        retained: the block ids the caller holds through `retain`, an id twice if it was retained twice.

    Raises:
        BlockTableError: saying everything that is wrong.
    """
    problems = [*_rows(table), *_free_stack(table), *_counts(table, list(retained))]
    if problems:
        raise BlockTableError("the block table is inconsistent:\n- " + "\n- ".join(problems))


def _rows(table: BlockTable) -> Iterator[str]:
    entries, seq_lens = np.asarray(table.block_tables), np.asarray(table.seq_lens)
    room = table.max_blocks_per_seq * table.block_size
    for row in np.flatnonzero((seq_lens < 0) | (seq_lens > room)):
        yield f"row {row} has {seq_lens[row]} tokens; it can have 0 to {room}"
    for row, column in np.argwhere((entries < 0) | (entries >= table.num_blocks)):
        yield f"row {row}, entry {column}, is block {entries[row, column]}; the pool has {table.num_blocks}"
    held = -(-seq_lens // table.block_size)
    columns = np.arange(table.max_blocks_per_seq)
    for row, column in np.argwhere((entries != NULL_BLOCK) & (columns >= held[:, None])):
        yield (
            f"row {row}, entry {column}, is block {entries[row, column]}, but {seq_lens[row]} tokens need only "
            f"{held[row]} blocks of {table.block_size}"
        )
    passed = np.maximum.accumulate(entries != NULL_BLOCK, axis=1)
    for row, column in np.argwhere(passed & (entries == NULL_BLOCK) & (columns < held[:, None])):
        yield f"row {row}, entry {column}, is the null block between others; only leading entries may be"


def _free_stack(table: BlockTable) -> Iterator[str]:
    ref_counts, num_free = np.asarray(table.ref_counts), int(table.num_free_blocks)
    if not 0 <= num_free < table.num_blocks:
        yield f"num_free_blocks is {num_free}; of {table.num_blocks} blocks 0 to {table.num_blocks - 1} can be free"
    free = np.asarray(table.free_blocks)[: max(num_free, 0)]
    for block in free[(free <= NULL_BLOCK) | (free >= table.num_blocks)]:
        yield f"block {block} is on the free stack; only 1 to {table.num_blocks - 1} can be"
    times = _tally(free, table.num_blocks)
    for block in np.flatnonzero(times > 1):
        yield f"block {block} is on the free stack {times[block]} times"
    for block in np.flatnonzero((times > 0) & (ref_counts != 0)):
        yield f"block {block} is on the free stack with ref count {ref_counts[block]}"
    for block in np.flatnonzero((times == 0) & (ref_counts == 0)):
        if block != NULL_BLOCK:
            yield f"block {block} has ref count 0 and is not on the free stack: it is lost"


def _counts(table: BlockTable, retained: list[int]) -> Iterator[str]:
    ref_counts, retain_counts = np.asarray(table.ref_counts), np.asarray(table.retain_counts)
    for wrong in (block for block in retained if not NULL_BLOCK < block < table.num_blocks):
        yield f"retained names block {wrong}; only 1 to {table.num_blocks - 1} can be retained"
    expected = _tally(np.asarray(retained, np.int64), table.num_blocks)
    for block in np.flatnonzero(retain_counts != expected):
        yield (
            f"block {block} is retained {retain_counts[block]} times in the table, "
            f"but {expected[block]} times by the caller"
        )
    entries = _tally(np.asarray(table.block_tables).ravel(), table.num_blocks)
    for block in np.flatnonzero(ref_counts != entries + retain_counts):
        yield (
            f"block {block} has ref count {ref_counts[block]}, but {entries[block]} table entries and "
            f"{retain_counts[block]} retained references hold it"
        )


def _tally(block_ids: np.ndarray, num_blocks: int) -> np.ndarray:
    """How often each block of the pool is named, the null block and ids outside the pool apart."""
    named = (block_ids > NULL_BLOCK) & (block_ids < num_blocks)
    return np.bincount(block_ids[named], minlength=num_blocks)
