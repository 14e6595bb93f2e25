"""The TPU kernel that writes new tokens into the pool: read, modify and write of whole tiles, many in flight.

On a TPU one token of one head is less than a tile, so a token can't be copied into the pool alone. An item of work is
a run of consecutive slots in one slab: the slab is copied in (unless the run covers it), the run's tokens are put in
their rows, and the slab is copied out. Items follow the order of the tokens: one a row in a decode step, one a slab of
a prefill chunk. Two cursors walk over them: one starts the copies in, the other waits for them and writes.

T tokens, L layers, N blocks, B tokens a block, R slots a slab, H KV heads, M lines of a token (K heads, then V heads;
or H lines with K and V on lanes), E elements a line, F scales a line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

DROPPED = -1  # in the slots: a token that is not written
AHEAD = 0.75  # share of the buffers whose items are being read; the others are being written


class Plane(NamedTuple):
    """One of the arrays that are written, the values or the scales."""

    tokens: Any  # [T, M, E] or [T, 2, F], in HBM
    pool: Any  # the pool's array, in HBM
    token_buffer: Any  # [buffers, R, M, E] or [buffers, R, 2, F], a token in its row
    slab_buffer: Any  # [buffers, ..., R, E] or [buffers, 2, F], as in the pool


class Memory(NamedTuple):
    """The kernel's memory."""

    layer: Any  # i32[1] in SMEM
    planes: tuple[Plane, ...]  # the values; the scales of a quantised pool
    token_sem: Any  # [buffers] each
    read_sem: Any
    write_sem: Any
    rows: int
    block_size: int

    @property
    def num_buffers(self) -> int:
        return self.planes[0].token_buffer.shape[0]


class Item(NamedTuple):
    """A run of tokens within one slab."""

    token: jax.Array  # its first token
    slot: jax.Array  # that one's slot
    row: jax.Array  # that one's row in the slab
    num_tokens: jax.Array
    buffer: jax.Array


class Cursor(NamedTuple):
    """A walk over the items."""

    token: jax.Array  # the next item's first, T at the end
    number: jax.Array  # how many items lie behind


def kernel(
    layer: Any,  # i32[1] in SMEM
    slot: Any,  # i32[T + 1] in SMEM, as in Runs
    end: Any,
    take_turns: Any,
    *refs: Any,  # tokens of each plane, pools (in), pools (out, the same memory), buffers of each plane, semaphores
    num_planes: int,
    rows: int,
    block_size: int,
) -> None:
    tokens, pools = refs[:num_planes], refs[2 * num_planes : 3 * num_planes]
    buffers = refs[3 * num_planes : 5 * num_planes]
    planes = tuple(Plane(*x) for x in zip(tokens, pools, buffers[::2], buffers[1::2], strict=True))
    token_sem, read_sem, write_sem = refs[5 * num_planes :]
    memory = Memory(layer, planes, token_sem, read_sem, write_sem, rows, block_size)
    num_tokens, num_buffers = tokens[0].shape[0], memory.num_buffers
    in_turn = take_turns[0] == 1
    ahead = jnp.where(in_turn, 0, int(num_buffers * AHEAD))
    unwritten = jnp.where(in_turn, 0, num_buffers - 1)  # how many earlier items need not be written when one is read

    def item_at(cursor: Cursor) -> Item:
        first = slot[cursor.token]
        row = jax.lax.rem(first, rows)
        count = jnp.minimum(end[cursor.token] - cursor.token, rows - row)
        return Item(cursor.token, first, row, count, jax.lax.rem(cursor.number, num_buffers))

    def after(token: jax.Array, number: jax.Array) -> Cursor:
        return Cursor(jnp.where(slot[token] == DROPPED, end[token], token), number)

    def wait_written(number: jax.Array, _: None) -> None:
        _wait(_write_copies(memory, 0, jax.lax.rem(number, num_buffers)))

    def read_one(state: tuple[Cursor, jax.Array]) -> tuple[Cursor, jax.Array]:
        cursor, written = state
        needed = jnp.maximum(written, cursor.number - unwritten)
        jax.lax.fori_loop(written, needed, wait_written, None)
        item = item_at(cursor)
        _start_reading(memory, item)
        return after(item.token + item.num_tokens, cursor.number + 1), needed

    def write_one(state: tuple[Cursor, Cursor, jax.Array]) -> tuple[Cursor, Cursor, jax.Array]:
        reading, writing, written = state
        reading, written = jax.lax.while_loop(
            lambda state: (state[0].token < num_tokens) & (state[0].number <= writing.number + ahead),
            read_one,
            (reading, written),
        )
        item = item_at(writing)
        _finish_reading(memory, item)
        _put_values(memory, item)
        if num_planes > 1:
            _put_scales(memory, item)
        _start(_write_copies(memory, item.slot, item.buffer))
        return reading, after(item.token + item.num_tokens, writing.number + 1), written

    first = after(jnp.int32(0), jnp.int32(0))
    _, last, written = jax.lax.while_loop(
        lambda state: state[1].token < num_tokens, write_one, (first, first, jnp.int32(0))
    )
    jax.lax.fori_loop(written, last.number, wait_written, None)


def _put_values(memory: Memory, item: Item) -> None:
    """Puts the item's tokens in their rows of the slab."""
    plane = memory.planes[0]
    wide = jnp.float32 if jnp.issubdtype(plane.pool.dtype, jnp.floating) else jnp.int32  # what every chip selects
    old = plane.slab_buffer[item.buffer].astype(wide)  # [..., R, E]
    new = jnp.swapaxes(plane.token_buffer[item.buffer].astype(wide), 0, 1).reshape(old.shape)
    row = jax.lax.broadcasted_iota(jnp.int32, old.shape, old.ndim - 2)
    own = (row >= item.row) & (row < item.row + item.num_tokens)
    plane.slab_buffer[item.buffer] = jnp.where(own, new, old).astype(plane.pool.dtype)


def _put_scales(memory: Memory, item: Item) -> None:
    """Puts the item's scales in the lanes of their slots."""
    plane = memory.planes[1]
    old = plane.slab_buffer[item.buffer]  # [2, F]
    slot = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) & (memory.block_size - 1)

    def put(row: jax.Array, line: jax.Array) -> jax.Array:
        return jnp.where(slot == row, plane.token_buffer[item.buffer, row], line)

    plane.slab_buffer[item.buffer] = jax.lax.fori_loop(item.row, item.row + item.num_tokens, put, old)


def _start_reading(memory: Memory, item: Item) -> None:
    whole = item.num_tokens == memory.rows

    @pl.when(whole)
    def _() -> None:
        _start(_token_copies(memory, item, 0, memory.rows))

    @pl.when(~whole)
    def _() -> None:
        _start(_read_copies(memory, item))
        jax.lax.fori_loop(0, item.num_tokens, lambda i, _: _start(_token_copies(memory, item, i, 1)), None)


def _finish_reading(memory: Memory, item: Item) -> None:
    whole = item.num_tokens == memory.rows

    @pl.when(whole)
    def _() -> None:
        _wait(_token_copies(memory, item, 0, memory.rows))

    @pl.when(~whole)
    def _() -> None:
        _wait(_read_copies(memory, item))
        jax.lax.fori_loop(0, item.num_tokens, lambda i, _: _wait(_token_copies(memory, item, i, 1)), None)


def _token_copies(memory: Memory, item: Item, first: Any, count: int) -> list[Any]:
    """Tokens first .. first + count - 1 of the item, to their rows of its buffer."""
    source, target = pl.ds(item.token + first, count), pl.ds(item.row + first, count)
    return [
        pltpu.make_async_copy(
            plane.tokens.at[source], plane.token_buffer.at[item.buffer, target], memory.token_sem.at[item.buffer]
        )
        for plane in memory.planes
    ]


def _read_copies(memory: Memory, item: Item) -> list[Any]:
    """The slab as it is, to the item's buffer."""
    slabs = zip(memory.planes, _slabs(memory, item.slot), strict=True)
    sem = memory.read_sem.at[item.buffer]
    return [pltpu.make_async_copy(slab, plane.slab_buffer.at[item.buffer], sem) for plane, slab in slabs]


def _write_copies(memory: Memory, slot: Any, buffer: jax.Array) -> list[Any]:
    """A buffer, to the slab of a slot."""
    slabs = zip(memory.planes, _slabs(memory, slot), strict=True)
    sem = memory.write_sem.at[buffer]
    return [pltpu.make_async_copy(plane.slab_buffer.at[buffer], slab, sem) for plane, slab in slabs]


def _slabs(memory: Memory, slot: Any) -> list[Any]:
    """The slab of a slot: [..., R, E] of the values, [2, F] of the scales."""
    layer, block = memory.layer[0], jax.lax.div(slot, memory.block_size)
    start = jax.lax.div(jax.lax.rem(slot, memory.block_size), memory.rows) * memory.rows
    values, *scales = (plane.pool for plane in memory.planes)
    heads = (slice(None),) * (len(values.shape) - 4)
    slab = values.at[(layer, block, *heads, pl.ds(pl.multiple_of(start, memory.rows), memory.rows))]
    return [slab, *(x.at[layer, block] for x in scales)]


def _start(copies: list[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()
