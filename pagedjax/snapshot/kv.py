"""K and V of the running rows, as raw blocks on the host: read from one engine's pool, put into another's.

Only blocks that rows hold are read, and they get new ids 1 .. U in the order in which rows name them. What only the
prefix cache holds is left behind, so in the new pool every reference is a row's. Beam searches start over, so theirs
are left behind too. The rows' other state follows from their sequences, as when they start.

Letters: R rows, P blocks per row at most, N blocks in the pool, U used ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.block import Block
from pagedjax.block_table import NULL_BLOCK, BlockTable
from pagedjax.head_sharding import HeadSharding
from pagedjax.request import Sequence
from pagedjax.row_state import RowState
from pagedjax.runner import Runner
from pagedjax.scheduler import Scheduler
from pagedjax.snapshot.numbers import Numbers
from pagedjax.snapshot.raw_blocks import layout, on_mesh, read_blocks, write_blocks
from pagedjax.step import EngineState

ADVICE = "load the state with include_kv=False, which computes it again"


@dataclasses.dataclass(frozen=True)
class HeldRow:
    """What a sequence holds in the pool.

    Attributes:
        num_tokens: with K/V.
        weights_version: of the weights they were computed with.
        block_ids: of the blocks that hold them, in order; `NULL_BLOCK` behind a sliding window.
    """

    num_tokens: int
    weights_version: int
    block_ids: list[int]


Key = tuple[str, int]  # a sequence: request_id and index


@dataclasses.dataclass(frozen=True)
class HeldKV:
    """The running rows of an engine, and their blocks.

    Attributes:
        rows: by sequence.
        blocks: of block 1, 2 .. U, as `read_blocks` gives them.
        layout: only a pool with the same one can take them.
    """

    rows: dict[Key, HeldRow]
    blocks: list[np.ndarray]
    layout: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        """U."""
        return max((block_id for row in self.rows.values() for block_id in row.block_ids), default=0)

    def describe(self, numbers: Numbers) -> dict[str, Any]:
        """All but the blocks, as JSON."""
        rows = [
            [*key, row.num_tokens, row.weights_version, numbers.put_ints(row.block_ids)]
            for key, row in self.rows.items()
        ]
        return {"layout": self.layout, "rows": rows}

    @classmethod
    def of(cls, record: dict[str, Any], blocks: list[np.ndarray], numbers: Numbers) -> HeldKV:
        """What `describe` has described."""
        rows = {
            (request_id, index): HeldRow(num_tokens, version, numbers.ints(span))
            for request_id, index, num_tokens, version, span in record["rows"]
        }
        return cls(rows, blocks, record["layout"])


def read(runner: Runner, running: Iterable[Sequence]) -> HeldKV:
    """What sequences hold; nothing changes on the device."""
    table, kv_pages, heads = runner.state.table, runner.state.kv_pages, _heads(runner)
    block_tables, seq_lens = jax.device_get((table.block_tables, table.seq_lens))
    new_ids = {NULL_BLOCK: NULL_BLOCK}
    rows: dict[Key, HeldRow] = {}
    for sequence in running:
        if sequence.request.beams is not None:
            continue
        num_tokens = int(seq_lens[sequence.row])
        old_ids = block_tables[sequence.row, : -(-num_tokens // table.block_size)].tolist()
        block_ids = [new_ids.setdefault(block_id, len(new_ids)) for block_id in old_ids]
        rows[sequence.request.request_id, sequence.index] = HeldRow(num_tokens, sequence.weights_version, block_ids)
    return HeldKV(rows, read_blocks(kv_pages, list(new_ids)[1:], heads), layout(kv_pages, heads))


def check(held: HeldKV, runner: Runner, scheduler: Scheduler) -> None:
    """Raises ValueError, with what to change, if an engine's pool or rows can't take it."""
    if any(len(array) != held.num_blocks for array in held.blocks) or (held.num_blocks and not held.blocks):
        raise ValueError(f"the saved K/V lacks some of its {held.num_blocks} blocks; {ADVICE}")
    expected = layout(runner.state.kv_pages, _heads(runner))
    if held.layout != expected:
        raise ValueError(f"the saved K/V is {held.layout}, and the pool of this engine is {expected}; {ADVICE}")
    for name, needed, there, option in (
        ("rows", len(held.rows), scheduler.max_running, "max_num_seqs and max_num_batched_tokens"),
        ("blocks", held.num_blocks, scheduler.num_usable_blocks, "num_blocks or kv_cache_memory_bytes"),
    ):
        if needed > there:
            raise ValueError(f"the saved K/V fills {needed} {name}, and there are {there}; raise {option}, or {ADVICE}")


def place_blocks(held: HeldKV, runner: Runner) -> None:
    """Puts the blocks into the pool of a runner whose state is fresh; it is fresh again if that fails."""
    state = runner.state
    try:
        kv_pages = write_blocks(state.kv_pages, held.blocks, _heads(runner))
        runner.state = EngineState(kv_pages, state.table, state.rows)
    except BaseException:
        runner.reset()
        raise


def resume(held: HeldKV, queue: Iterable[Sequence], runner: Runner, scheduler: Scheduler) -> None:
    """Queues sequences in their order, those that held K/V in a row with it.

    Args:
        held: has passed `check`.
        queue: every unfinished sequence.
        runner: has the blocks in its pool, and is fresh otherwise.
        scheduler: idle, and knows of no block that is held.
    """
    blocks: dict[int, Block | None] = {NULL_BLOCK: None}
    lines: dict[int, tuple[Sequence, HeldRow]] = {}
    for sequence in queue:
        row = held.rows.get((sequence.request.request_id, sequence.index))
        if row is None:
            scheduler.add(sequence)
            continue
        num_full = row.num_tokens // scheduler.block_size
        for place, block_id in enumerate(row.block_ids):  # an id is known to the host once the block is full
            if block_id not in blocks:
                blocks[block_id] = Block(block_id=block_id if place < num_full else None)
        own = [blocks[block_id] for block_id in row.block_ids]
        lines[scheduler.resume(sequence, own, row.num_tokens, row.weights_version)] = (sequence, row)
    state = runner.state
    with on_mesh(_heads(runner)):
        table = _table(state.table, {number: row for number, (_, row) in lines.items()})
        rows = _rows(state.rows, {number: runner.line(sequence) for number, (sequence, _) in lines.items()})
    runner.state = EngineState(state.kv_pages, table, rows)


def _heads(runner: Runner) -> HeadSharding | None:
    parallel = runner._parallel
    return None if parallel is None else parallel.heads


# Table and rows: made on the host, placed as the fresh ones are


def _table(fresh: BlockTable, held: dict[int, HeldRow]) -> BlockTable:
    block_tables, seq_lens = np.array(fresh.block_tables), np.array(fresh.seq_lens)  # i32[R, P], i32[R]
    for number, row in held.items():
        block_tables[number, : len(row.block_ids)] = row.block_ids
        seq_lens[number] = row.num_tokens
    ref_counts = np.bincount(block_tables.ravel(), minlength=fresh.num_blocks).astype(np.int32)  # i32[N]
    ref_counts[NULL_BLOCK] = 0
    table: dict[str, Any] = {
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "ref_counts": ref_counts,
        # A fresh stack has block 1 on top: without the used ones, which are the first, the others are left of it.
        "num_free_blocks": np.int32(fresh.num_blocks - 1 - np.count_nonzero(ref_counts)),
    }
    return _placed(dataclasses.replace(fresh, **table), fresh)


def _rows(fresh: RowState, lines: dict[int, RowState]) -> RowState:
    rows = jax.tree.map(np.array, fresh)
    for number, line in lines.items():
        for leaf, value in zip(jax.tree.leaves(rows), jax.tree.leaves(line), strict=True):
            leaf[number] = value
    return _placed(rows, fresh)


def _placed(values: Any, like: Any) -> Any:
    """Arrays of their own on every device: they are going to be donated."""
    places = jax.tree.map(lambda old: old.sharding, like)
    return jax.jit(lambda values: jax.tree.map(jnp.copy, values), out_shardings=places)(values)
