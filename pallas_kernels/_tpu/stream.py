"""What the TPU kernels share: a stream of KV tiles that runs ahead of the arithmetic.

The stream inside a kernel numbers the tiles of all its items in one sequence, and three stages walk it at a distance:
fetch the table's block ids of tile n + LOOKAHEAD + FETCH_AHEAD (HBM to SMEM), start the block copies of tile
n + LOOKAHEAD (HBM to VMEM, a contiguous copy a block: K and V of all heads), compute with tile n. So a row's first
tile is on its way while the row before it is computed. Only blocks of the item's range are ever touched; the rest of
the last tile is stale memory. How a kernel walks it:

    state = stream.start()
    for each tile of each item, in order:
        refill = stream.begin(state)                  # the tile to be copied during this one
        slot = stream.wait(state, num_blocks)         # this tile has arrived: stream.k(slot, h), stream.v(slot, h)
        stream.copy_block(refill, j) for all j        # between the arithmetic: issuing is scalar work
        state = stream.advance(state, refill)

I items, S rows, P blocks a table line, L layers, N blocks, H KV heads, B tokens a block, D head_dim, E and F the last
axes of the pool and of its scales, C blocks a tile, K = C * B keys a tile.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import LANES
from pallas_kernels._tpu.tile import ID_ALIGNMENT, ID_SLOTS, KV_SLOTS, TileShape
from pallas_kernels._tpu.work import WorkRefs

LOOKAHEAD = KV_SLOTS - 1  # tiles whose copies are under way while one is computed
FETCH_AHEAD = 4  # tiles between the fetch of block ids and their use

LOG2_E = math.log2(math.e)


def transpose_groups(x: jax.Array, size: int) -> jax.Array:
    """Transposes squares of n x n groups of `size` lanes, n = 128 / size: x[j * n + a, b * size + i] goes to
    [j * n + b, a * size + i]. So lines of blocks that hold every head become lines of heads that hold every block.
    """
    n = LANES // size
    line = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    group = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) // size
    bit = 1
    while bit < n:  # swap off-diagonal quarters, of whole squares at last
        from_below = pltpu.roll(pltpu.roll(x, x.shape[0] - bit, 0), bit * size, 1)  # x[line + bit, group - bit]
        from_above = pltpu.roll(pltpu.roll(x, bit, 0), x.shape[1] - bit * size, 1)
        low_line, low_group = (line & bit) == 0, (group & bit) == 0
        x = jnp.where(low_line == low_group, x, jnp.where(low_line, from_below, from_above))
        bit *= 2
    return x


class Cursor(NamedTuple):
    """A tile of the sequence, i32 scalars."""

    item: jax.Array
    entry: jax.Array  # of the tile's first block in the flat table
    left: jax.Array  # blocks from there to the item's end; 0 past the last item


class StreamState(NamedTuple):
    number: jax.Array  # of the tile to be computed now
    copy: Cursor  # the tile whose copies start now
    fetch: Cursor  # the tile whose block ids are fetched now


class Refill(NamedTuple):
    """The copies to be started during one tile, i32 scalars."""

    slot: jax.Array
    first_id: jax.Array  # where in the SMEM slots the ids start
    num_blocks: jax.Array  # 0 .. C


class StreamRefs(NamedTuple):
    table: Any  # i32[...] in HBM, from flatten_table
    pool: Any  # in HBM, as in KVPages
    scales: Any  # f32[L, N, 2, F] in HBM, or None
    ids: Any  # i32[ID_SLOTS * ids_per_slot] in SMEM
    id_semaphores: Any  # [ID_SLOTS]
    kv: Any  # [KV_SLOTS, 2, H, K, D] or [KV_SLOTS, H, K, E] in VMEM
    kv_semaphores: Any  # [KV_SLOTS]
    kv_scales: Any = None  # f32[KV_SLOTS, C, 2, F] in VMEM, or None


class KVStream:
    """The tiles of items first_item, first_item + item_step, ... of a work list, inside a kernel."""

    def __init__(
        self,
        tile: TileShape,
        work: WorkRefs,
        layer: jax.Array,
        refs: StreamRefs,
        *,
        first_item: jax.typing.ArrayLike = 0,
        item_step: int = 1,
    ) -> None:
        self.tile, self.work, self.layer, self.refs = tile, work, layer, refs
        self.first_item, self.item_step = jnp.asarray(first_item, jnp.int32), item_step
        self.last_entry = work.num_blocks.shape[0] - 1  # of the work list: never an item

    def start(self) -> StreamState:
        """Starts the copies of the first tiles; nothing has arrived yet."""
        first = self._enter(self.first_item)
        fetch = first
        for number in range(FETCH_AHEAD):
            fetch = self._fetch(fetch, jnp.int32(number))

        def fill(_: jax.Array, state: StreamState) -> StreamState:
            refill = self.begin(state)
            self.copy_blocks(refill)
            return self.advance(state, refill)

        return jax.lax.fori_loop(0, LOOKAHEAD, fill, StreamState(jnp.int32(-LOOKAHEAD), first, fetch))

    def begin(self, state: StreamState) -> Refill:
        """Takes in the block ids of the tile LOOKAHEAD further on. Its slot is that of the tile before this one."""
        number = state.number + LOOKAHEAD
        slot = number & (ID_SLOTS - 1)
        count = jnp.minimum(state.copy.left, self.tile.blocks_per_tile)

        @pl.when(count > 0)
        def _() -> None:
            self._id_copy(0, slot).wait()

        offset = state.copy.entry & (ID_ALIGNMENT - 1)
        return Refill(number & (KV_SLOTS - 1), slot * self.tile.ids_per_slot + offset, count)

    def copy_block(self, refill: Refill, j: int) -> None:
        """Starts the copy of block j (static, 0 .. C - 1) of the refilled tile, if it has one."""
        block_id = self.refs.ids[refill.first_id + j]  # outside: a load under the condition would wait for it

        @pl.when(j < refill.num_blocks)
        def _() -> None:
            for copy in self._block_copies(block_id, refill.slot, j):
                copy.start()

    def copy_blocks(self, refill: Refill) -> None:
        """Starts all copies of the refilled tile, in a loop."""

        def start_one(j: jax.Array, _: None) -> None:
            for copy in self._block_copies(self.refs.ids[refill.first_id + j], refill.slot, j):
                copy.start()

        jax.lax.fori_loop(0, refill.num_blocks, start_one, None)

    def wait(self, state: StreamState, num_blocks: jax.Array | None = None) -> jax.Array:
        """Waits for the tile to be computed now, and gives its slot.

        Args:
            state: the state.
            num_blocks: how many blocks it has; None where it is known to have all C.
        """
        slot = state.number & (KV_SLOTS - 1)
        if num_blocks is None:
            for buffer in (self.refs.kv, self.refs.kv_scales):
                if buffer is not None:
                    # Only the size matters: one wait for the bytes of all copies.
                    pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self.refs.kv_semaphores.at[slot]).wait()
            return slot

        def wait_one(j: jax.Array, _: None) -> None:
            for copy in self._block_copies(0, slot, j):
                copy.wait()

        jax.lax.fori_loop(0, num_blocks, wait_one, None)
        return slot

    def advance(self, state: StreamState, refill: Refill) -> StreamState:
        """The state of the next tile; call it when all copies of the refill have been started."""
        fetch = self._fetch(state.fetch, state.number + LOOKAHEAD + FETCH_AHEAD)
        return StreamState(state.number + 1, self._next(state.copy), fetch)

    def k(self, slot: jax.Array, head: jax.typing.ArrayLike) -> jax.Array:
        """[K, D] of one head; K and V [K, E] where they are side by side (zero-pad q over the lanes past D)."""
        return self.refs.kv[slot, head] if self.tile.kv_on_lanes else self.refs.kv[slot, 0, head]

    def v(self, slot: jax.Array, head: jax.typing.ArrayLike) -> jax.Array:
        """[K, D] of one head; K and V [K, E] where they are side by side (take D lanes from v_start on at the end)."""
        return self.refs.kv[slot, head] if self.tile.kv_on_lanes else self.refs.kv[slot, 1, head]

    def scales(self, slot: jax.Array, part: int) -> list[jax.Array]:
        """f32[1, K] a head, of K (K_PART) or V (V_PART); anything where no token is."""
        tile, rows = self.tile, []
        heads = max(1, LANES // tile.block_size)  # whose scales fill the lanes
        for first in range(0, tile.num_kv_heads, heads):
            start, lanes = first * tile.block_size, heads * tile.block_size
            present = min(lanes, tile.scale_lanes - start)
            lines = self.refs.kv_scales[slot, :, part, pl.ds(start, present)]
            if present < lanes:
                rest = jnp.zeros((tile.blocks_per_tile, lanes - present), jnp.float32)
                lines = jnp.concatenate([lines, rest], axis=1)
            lines = transpose_groups(lines, tile.block_size)  # [C, 128], or [C, B]
            for head in range(min(heads, tile.num_kv_heads - first)):
                row = [lines[i : i + 1] for i in range(head, tile.blocks_per_tile, heads)]
                rows.append(jnp.concatenate(row, axis=1))
        return rows

    def _enter(self, item: jax.Array) -> Cursor:
        item = jnp.minimum(item, self.last_entry)
        return Cursor(item, self.work.table_start[item], self.work.num_blocks[item])

    def _next(self, cursor: Cursor) -> Cursor:
        entered = self._enter(cursor.item + self.item_step)
        left = cursor.left - self.tile.blocks_per_tile
        stayed = Cursor(cursor.item, cursor.entry + self.tile.blocks_per_tile, left)
        return Cursor(*(jnp.where(left > 0, a, b) for a, b in zip(stayed, entered, strict=True)))

    def _fetch(self, cursor: Cursor, number: jax.Array) -> Cursor:
        """Starts the fetch of the block ids of tile `number`, if there is one."""

        @pl.when(cursor.left > 0)
        def _() -> None:
            self._id_copy(cursor.entry // ID_ALIGNMENT * ID_ALIGNMENT, number & (ID_SLOTS - 1)).start()

        return self._next(cursor)

    def _id_copy(self, entry: Any, slot: jax.Array) -> Any:
        size = self.tile.ids_per_slot
        source = self.refs.table.at[pl.ds(pl.multiple_of(entry, ID_ALIGNMENT), size)]
        target = self.refs.ids.at[pl.ds(pl.multiple_of(slot * size, ID_ALIGNMENT), size)]
        return pltpu.make_async_copy(source, target, self.refs.id_semaphores.at[slot])

    def _block_copies(self, block_id: Any, slot: jax.Array, j: Any) -> list[Any]:
        refs, size = self.refs, self.tile.block_size
        semaphore = refs.kv_semaphores.at[slot]
        start = j * size if isinstance(j, int) else pl.multiple_of(j * size, size)
        every_head = (slice(None),) * (refs.kv.ndim - 3)
        target = refs.kv.at[(slot, *every_head, pl.ds(start, size))]
        # The layer in a slice of its own: its address is computed once.
        copies = [pltpu.make_async_copy(refs.pool.at[self.layer].at[block_id], target, semaphore)]
        if refs.scales is not None:
            scales = refs.scales.at[self.layer].at[block_id]
            copies.append(pltpu.make_async_copy(scales, refs.kv_scales.at[slot, j], semaphore))
        return copies
