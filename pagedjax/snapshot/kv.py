"""K and V of the running rows, as raw blocks on the host: read from one engine's pool, put into another's.

Only blocks that rows hold are read, and they get new ids 1 .. U in the order in which rows name them. What only the
prefix cache holds is left behind, so in the new pool every reference is a row's. Beam searches start over, so theirs
are left behind too. The rows' other state follows from their sequences, as when they start.

Letters: R rows, P blocks per row at most, N blocks in the pool, U used ones, L layers, C blocks a call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.block import Block
from pagedjax.block_table import NULL_BLOCK, BlockTable
from pagedjax.request import Sequence
from pagedjax.row_state import RowState
from pagedjax.runner import Runner
from pagedjax.scheduler import Scheduler
from pagedjax.snapshot.numbers import Numbers
from pagedjax.step import EngineState
from pallas_kernels import KVPages

CHUNK = 64  # C: blocks that one call reads or writes

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
        blocks: u8[U, ...] for each array of the pool, the bytes of block 1, 2 .. U in all layers; empty if U is 0.
        layout: how the pool keeps a block; only a pool with the same layout can take it.
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
    """What sequences hold; nothing changes on the device. Raises ValueError on a mesh."""
    _refuse_mesh(runner)
    table = runner.state.table
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
    blocks = _read_blocks(runner.state.kv_pages, list(new_ids)[1:])
    return HeldKV(rows, blocks, _layout(runner.state.kv_pages))


def check(held: HeldKV, runner: Runner, scheduler: Scheduler) -> None:
    """Raises ValueError, with what to change, if an engine's pool or rows can't take it."""
    _refuse_mesh(runner)
    if any(len(array) != held.num_blocks for array in held.blocks) or (held.num_blocks and not held.blocks):
        raise ValueError(f"the saved K/V lacks some of its {held.num_blocks} blocks; {ADVICE}")
    layout = _layout(runner.state.kv_pages)
    if held.layout != layout:
        raise ValueError(f"the saved K/V is {held.layout}, and the pool of this engine is {layout}; {ADVICE}")
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
        runner.state = EngineState(_write_blocks(state.kv_pages, held.blocks), state.table, state.rows)
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
    table = _table(state.table, {number: row for number, (_, row) in lines.items()})
    rows = _rows(state.rows, {number: runner.line(sequence) for number, (sequence, _) in lines.items()})
    runner.state = EngineState(state.kv_pages, table, rows)


def _refuse_mesh(runner: Runner) -> None:
    if runner.config.mesh is not None:
        raise ValueError(f"K/V of an engine on a mesh can't be saved or loaded; save without it, or {ADVICE}")


def _layout(kv_pages: KVPages) -> dict[str, Any]:
    arrays = jax.tree.leaves(kv_pages)
    return {
        "num_layers": kv_pages.num_layers,
        "block_size": kv_pages.block_size,
        "num_kv_heads": kv_pages.num_kv_heads,
        "head_dim": kv_pages.head_dim,
        "dtype": kv_pages.dtype.name,
        "shapes": [[leaf.shape[0], *leaf.shape[2:]] for leaf in arrays],  # of one block, in all layers
    }


# Blocks: every array of a pool has the layers first and then the blocks.


def _read_blocks(kv_pages: KVPages, block_ids: list[int]) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in jax.tree.leaves(kv_pages)]
    for first in range(0, len(block_ids), CHUNK):
        ids = block_ids[first : first + CHUNK]
        padded = np.array(ids + [NULL_BLOCK] * (CHUNK - len(ids)), np.int32)
        for part, leaf in zip(parts, jax.device_get(_gather(kv_pages, padded)), strict=True):
            part.append(_bytes(leaf[: len(ids)]))
    return [np.concatenate(part) for part in parts] if block_ids else []


def _write_blocks(kv_pages: KVPages, blocks: list[np.ndarray]) -> KVPages:
    """Block i of `blocks` gets the id i + 1."""
    leaves, num_blocks = jax.tree.leaves(kv_pages), len(blocks[0]) if blocks else 0
    places = jax.tree.map(lambda leaf: leaf.sharding, kv_pages)
    for first in range(0, num_blocks, CHUNK):
        count = min(CHUNK, num_blocks - first)
        chunk = [np.zeros((CHUNK, leaf.shape[0], *leaf.shape[2:]), leaf.dtype) for leaf in leaves]
        for values, part in zip(chunk, blocks, strict=True):
            _bytes(values)[:count] = part[first : first + count]
        kv_pages = _scatter(kv_pages, chunk, np.int32(first + 1), np.int32(count))
    return jax.tree.map(jax.device_put, kv_pages, places)


def _bytes(values: np.ndarray) -> np.ndarray:
    """The same memory as u8: Orbax need not know the dtype."""
    return values.view(np.uint8)


@jax.jit
def _gather(kv_pages: KVPages, block_ids: jax.Array) -> list[jax.Array]:
    """[C, L, ...] of each array. Slice by slice: a gather might have the pool in another order, as a copy."""

    def block(block_id: jax.Array) -> list[jax.Array]:
        leaves = jax.tree.leaves(kv_pages)
        return [lax.dynamic_index_in_dim(leaf, block_id, axis=1, keepdims=False) for leaf in leaves]

    return lax.map(block, block_ids)


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(kv_pages: KVPages, values: list[jax.Array], first: jax.Array, count: jax.Array) -> KVPages:
    """Puts the first `count` of [C, L, ...] at the blocks from `first` on."""

    def put(index: jax.Array, kv_pages: KVPages) -> KVPages:
        leaves, structure = jax.tree.flatten(kv_pages)
        leaves = [
            lax.dynamic_update_index_in_dim(leaf, value[index], first + index, axis=1)
            for leaf, value in zip(leaves, values, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    return lax.fori_loop(0, count, put, kv_pages)


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
    """Arrays of their own on the devices: they are going to be donated."""
    return jax.tree.map(lambda value, old: jax.device_put(jnp.array(value), old.sharding), values, like)
