"""Faults of the block table: each transition as it might be wrong, made of the right one.

Every fault is planted outside of jit, in place of one name of `pagedjax.block_table`, so that nothing is compiled anew.
Most leave a table that agrees with itself: only somebody who knows what should have happened can tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import block_table as bt

append, truncate, release, fork = bt.append, bt.truncate, bt.release, bt.fork
adopt, retain, drop = bt.adopt, bt.retain, bt.drop
free_outside_window, defragment = bt.free_outside_window, bt.defragment


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong version of one transition.

    Attributes:
        transition: the name it takes in `pagedjax.block_table`.
        wrong: what is planted there.
    """

    transition: str
    wrong: Callable[..., Any]

    def __str__(self) -> str:
        return self.wrong.__name__


class Draft:
    """A table's arrays, to be scribbled on."""

    def __init__(self, table: bt.BlockTable) -> None:
        self.table = table
        self.block_tables, self.seq_lens = np.array(table.block_tables), np.array(table.seq_lens)
        self.ref_counts, self.retain_counts = np.array(table.ref_counts), np.array(table.retain_counts)
        self.free_blocks, self.num_free_blocks = np.array(table.free_blocks), int(table.num_free_blocks)

    def push(self, block_id: int) -> None:
        """Puts a block on the free stack, whether or not it belongs there."""
        if self.num_free_blocks < len(self.free_blocks):
            self.free_blocks[self.num_free_blocks] = block_id
            self.num_free_blocks += 1

    def done(self) -> bt.BlockTable:
        return dataclasses.replace(
            self.table,
            block_tables=jnp.array(self.block_tables),
            seq_lens=jnp.array(self.seq_lens),
            ref_counts=jnp.array(self.ref_counts),
            retain_counts=jnp.array(self.retain_counts),
            free_blocks=jnp.array(self.free_blocks),
            num_free_blocks=jnp.array(self.num_free_blocks, jnp.int32),
        )


def pairs(copies: bt.BlockCopies) -> list[tuple[int, int]]:
    count = int(copies.count)
    return list(zip(copies.src[:count].tolist(), copies.dst[:count].tolist(), strict=True))


def without_last(copies: bt.BlockCopies) -> bt.BlockCopies:
    """One copy less, if there is one."""
    kept = jnp.arange(len(copies.src)) < copies.count - 1
    src, dst = jnp.where(kept, copies.src, bt.NULL_BLOCK), jnp.where(kept, copies.dst, bt.NULL_BLOCK)
    return bt.BlockCopies(src, dst, jnp.maximum(copies.count - 1, 0))


# Append, and the copy on write


def append_makes_one_copy_less(
    table: bt.BlockTable, num_new_tokens: jax.Array
) -> tuple[bt.BlockTable, bt.BlockCopies, jax.Array]:
    """The row has a block of its own, with nothing in it."""
    table, copies, ok = append(table, num_new_tokens)
    return table, without_last(copies), ok


def append_writes_to_a_shared_tail(
    table: bt.BlockTable, num_new_tokens: jax.Array
) -> tuple[bt.BlockTable, bt.BlockCopies, jax.Array]:
    """No copy is made, and the table agrees: everybody keeps the tail."""
    table, copies, ok = append(table, num_new_tokens)
    draft = Draft(table)
    for src, dst in pairs(copies):
        if src != bt.NULL_BLOCK:
            draft.block_tables[draft.block_tables == dst] = src
            draft.ref_counts[src] += 1
            draft.ref_counts[dst] = 0
            draft.push(dst)
            copies = without_last(copies)
    return draft.done(), copies, ok


def append_that_fails_leaves_its_mark(
    table: bt.BlockTable, num_new_tokens: jax.Array
) -> tuple[bt.BlockTable, bt.BlockCopies, jax.Array]:
    """Where it takes more than there is, the first row that fits grows all the same."""
    after, copies, ok = append(table, num_new_tokens)
    row = int(np.flatnonzero(np.asarray(num_new_tokens))[0]) if np.any(num_new_tokens) else 0
    if not ok:
        alone, _, fits = append(table, jnp.zeros_like(num_new_tokens).at[row].set(num_new_tokens[row]))
        after = alone if fits else after
    return after, copies, ok


# Truncate, release, the window


def truncate_keeps_a_block(table: bt.BlockTable, seq_lens: jax.Array) -> bt.BlockTable:
    """The first one that a row no longer reaches, with its count."""
    entries, draft = np.asarray(table.block_tables), Draft(truncate(table, seq_lens))
    for row, length in enumerate(draft.seq_lens):
        column = -(-length // table.block_size)
        if length < table.seq_lens[row] and column < table.max_blocks_per_seq and entries[row, column]:
            block_id = entries[row, column]
            if draft.ref_counts[block_id] > 0:  # else it would have to come off the free stack
                draft.block_tables[row, column] = block_id
                draft.ref_counts[block_id] += 1
    return draft.done()


def truncate_rounds_down(table: bt.BlockTable, seq_lens: jax.Array) -> bt.BlockTable:
    """A last block that is kept in part is given back, and the length is right."""
    whole = jnp.where(seq_lens < table.seq_lens, seq_lens // table.block_size * table.block_size, table.seq_lens)
    shorter = truncate(table, whole)
    return dataclasses.replace(shorter, seq_lens=truncate(table, seq_lens).seq_lens)


def release_does_not_free(table: bt.BlockTable, rows: jax.Array) -> bt.BlockTable:
    """The rows are empty; their blocks have no holder and are not free."""
    after = release(table, rows)
    return dataclasses.replace(after, free_blocks=table.free_blocks, num_free_blocks=table.num_free_blocks)


def release_frees_what_others_hold(table: bt.BlockTable, rows: jax.Array) -> bt.BlockTable:
    """The last block of each row goes on the free stack, whoever else has it."""
    draft = Draft(release(table, rows))
    for row in np.flatnonzero(np.asarray(rows) & (np.asarray(table.seq_lens) > 0)):
        block_id = int(table.block_tables[row, (int(table.seq_lens[row]) - 1) // table.block_size])
        if draft.ref_counts[block_id] > 0:
            draft.push(block_id)
    return draft.done()


def window_is_one_key_too_short(table: bt.BlockTable, window: jax.Array) -> bt.BlockTable:
    return free_outside_window(table, jnp.where(window > 1, window - 1, window))


def window_does_not_count_down(table: bt.BlockTable, window: jax.Array) -> bt.BlockTable:
    """The entries are gone, and their blocks still count them."""
    after = free_outside_window(table, window)
    return dataclasses.replace(table, block_tables=after.block_tables)


# Holders


def fork_forgets_the_last_block(table: bt.BlockTable, parents: jax.Array) -> bt.BlockTable:
    """A child shares all of its parent's blocks, and is counted for all but the last."""
    draft = Draft(fork(table, parents))
    for row, parent in enumerate(parents.tolist()):
        if 0 <= parent < table.max_num_seqs and parent != row and draft.seq_lens[row]:
            draft.ref_counts[draft.block_tables[row, (draft.seq_lens[row] - 1) // table.block_size]] -= 1
    return draft.done()


def fork_reads_rows_it_has_replaced(table: bt.BlockTable, parents: jax.Array) -> bt.BlockTable:
    """Child after child: a parent that is a child too is taken as it has become."""
    for row in range(table.max_num_seqs):
        table = fork(table, jnp.full_like(parents, -1).at[row].set(parents[row]))
    return table


def adopt_does_not_count(
    table: bt.BlockTable, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array
) -> bt.BlockTable:
    """What a row has taken over is the others' alone."""
    draft = Draft(adopt(table, rows, block_ids, num_tokens))
    changed = (draft.block_tables != np.asarray(table.block_tables)) & (draft.block_tables != bt.NULL_BLOCK)
    np.subtract.at(draft.ref_counts, draft.block_tables[changed], 1)
    return draft.done()


def adopt_releases_too_early(
    table: bt.BlockTable, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array
) -> bt.BlockTable:
    """A row's own blocks are free before it can take them over again."""
    starts = (
        jnp.zeros(table.max_num_seqs, bool)
        .at[jnp.where(rows < 0, table.max_num_seqs, rows)]
        .set(num_tokens >= 0, mode="drop")
    )
    return adopt(release(table, starts), rows, block_ids, num_tokens)


def adopt_takes_a_free_block(
    table: bt.BlockTable, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array
) -> bt.BlockTable:
    """An adoption that names blocks nobody holds, and so nobody has written, takes them off the free stack."""
    draft = Draft(table)
    for lane, row in enumerate(rows.tolist()):
        count = -(-int(num_tokens[lane]) // table.block_size)
        if 0 <= row < table.max_num_seqs and 0 < count <= table.max_blocks_per_seq:
            for block_id in block_ids[lane, :count].tolist():
                free = draft.free_blocks[: draft.num_free_blocks].tolist()
                if block_id in free:
                    free.remove(block_id)
                    draft.free_blocks[: len(free)] = free
                    draft.num_free_blocks -= 1
                    draft.ref_counts[block_id] = draft.retain_counts[block_id] = 1
    before = draft.done()
    newly = np.flatnonzero(np.asarray(before.retain_counts) > np.asarray(table.retain_counts))
    return drop(adopt(before, rows, block_ids, num_tokens), jnp.array(newly, jnp.int32))


def adopt_lets_the_first_count(
    table: bt.BlockTable, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array
) -> bt.BlockTable:
    """Of several adoptions by one row."""
    return adopt(table, rows[::-1], block_ids[::-1], num_tokens[::-1])


def retain_counts_an_id_twice(table: bt.BlockTable, block_ids: jax.Array) -> bt.BlockTable:
    """The first of them, in both counts."""
    return retain(retain(table, block_ids), jnp.zeros_like(block_ids).at[0].set(block_ids[0]))


def retain_counts_a_repeated_id_once(table: bt.BlockTable, block_ids: jax.Array) -> bt.BlockTable:
    ids = list(dict.fromkeys(block_ids.tolist()))
    return retain(table, jnp.array(ids + [bt.NULL_BLOCK] * (len(block_ids) - len(ids)), jnp.int32))


def drop_never_frees(table: bt.BlockTable, block_ids: jax.Array) -> bt.BlockTable:
    """A block that loses its last holder does not go on the free stack."""
    after = drop(table, block_ids)
    return dataclasses.replace(after, free_blocks=table.free_blocks, num_free_blocks=table.num_free_blocks)


def drop_takes_what_was_not_retained(table: bt.BlockTable, block_ids: jax.Array) -> bt.BlockTable:
    """A row's reference, if there is no other."""
    draft = Draft(drop(table, block_ids))
    for block_id in block_ids.tolist():
        if bt.NULL_BLOCK < block_id < table.num_blocks and not table.retain_counts[block_id]:
            draft.ref_counts[block_id] = max(draft.ref_counts[block_id] - 1, 0)
    return draft.done()


# Defragment


def defragment_makes_one_copy_less(table: bt.BlockTable) -> tuple[bt.BlockTable, bt.BlockCopies]:
    table, copies = defragment(table)
    return table, without_last(copies)


def defragment_swaps_two_entries(table: bt.BlockTable) -> tuple[bt.BlockTable, bt.BlockCopies]:
    """The first and the last of all."""
    table, copies = defragment(table)
    draft = Draft(table)
    entries = draft.block_tables.ravel()
    used = np.flatnonzero(entries)
    if len(used):
        entries[used[[0, -1]]] = entries[used[[-1, 0]]]
    return draft.done(), copies


def defragment_keeps_the_free_stack(table: bt.BlockTable) -> tuple[bt.BlockTable, bt.BlockCopies]:
    after, copies = defragment(table)
    return dataclasses.replace(after, free_blocks=table.free_blocks), copies


def defragment_moves_no_retained_count(table: bt.BlockTable) -> tuple[bt.BlockTable, bt.BlockCopies]:
    after, copies = defragment(table)
    return dataclasses.replace(after, retain_counts=table.retain_counts), copies


FAULTS = [
    Fault("append", append_makes_one_copy_less),
    Fault("append", append_writes_to_a_shared_tail),
    Fault("truncate", truncate_keeps_a_block),
    Fault("release", release_does_not_free),
    Fault("free_outside_window", window_is_one_key_too_short),
    Fault("fork", fork_reads_rows_it_has_replaced),
    Fault("adopt", adopt_does_not_count),
    Fault("adopt", adopt_takes_a_free_block),
    Fault("retain", retain_counts_an_id_twice),
    Fault("drop", drop_never_frees),
    Fault("defragment", defragment_swaps_two_entries),
]

FURTHER_FAULTS = [
    Fault("free_outside_window", window_does_not_count_down),
    Fault("drop", drop_takes_what_was_not_retained),
    Fault("defragment", defragment_makes_one_copy_less),
    Fault("fork", fork_forgets_the_last_block),
    Fault("append", append_that_fails_leaves_its_mark),
    Fault("truncate", truncate_rounds_down),
    Fault("release", release_frees_what_others_hold),
    Fault("adopt", adopt_releases_too_early),
    Fault("adopt", adopt_lets_the_first_count),
    Fault("retain", retain_counts_a_repeated_id_once),
    Fault("defragment", defragment_keeps_the_free_stack),
    Fault("defragment", defragment_moves_no_retained_count),
]
