"""The packed view of one step: which token goes where, derived from the block table and the number of new tokens a row.

Rows contribute their new tokens one row after another to a flat list of `num_tokens` places; what is left over is
padding. Everything here is index arithmetic on the device, so the host sends counts and never indices.

Dimensions: T token places, R rows, P blocks a row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.block_table import BlockTable
from pagedjax.head_sharding import HeadSharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Index arrays of one step.

    Padding places have row `num_rows` and a slot outside the pool, so that gathers by row can be filled and writes are
    dropped.
    """

    rows: jax.Array  # i32[T] row of each token, R for padding
    positions: jax.Array  # i32[T] position of each token in its sequence, 0 for padding
    slot_mapping: jax.Array  # i32[T] slot in the KV pool, num_slots for padding
    block_tables: jax.Array  # i32[R, P]
    seq_lens: jax.Array  # i32[R] tokens with K/V, this step's included
    query_start_loc: jax.Array  # i32[R + 1] first place of each row
    max_query_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    heads: HeadSharding | None = dataclasses.field(default=None, metadata={"static": True})  # None: on one device

    @property
    def num_tokens(self) -> jax.Array:
        """i32[], tokens that are no padding; they come first."""
        return jnp.sum(self.rows < self.block_tables.shape[0], dtype=jnp.int32)

    def by_token(self) -> Batch:
        """The same tokens, each as a row of its own: `rows` and the four fields after `slot_mapping` change.

        Attention then takes every token by the one path, in one shape, and gives it the same bits whatever else is
        computed with it.
        """
        num_rows, num_tokens = self.block_tables.shape[0], self.rows.shape[0]
        real, row = self.rows < num_rows, jnp.minimum(self.rows, num_rows - 1)
        places = jnp.arange(num_tokens + 1, dtype=jnp.int32)
        return dataclasses.replace(
            self,
            rows=jnp.where(real, places[:-1], num_tokens),
            block_tables=self.block_tables[row],
            seq_lens=jnp.where(real, self.positions + 1, 0),
            query_start_loc=places,
            max_query_len=1,
        )


def make_batch(
    table: BlockTable,
    num_new_tokens: jax.Array,
    num_tokens: int,
    max_query_len: int | None = None,
) -> Batch:
    """Lays the last `num_new_tokens` tokens of every row out in `num_tokens` places.

    Args:
        table: the block table after `append` of these tokens.
        num_new_tokens: i32[R], at most `num_tokens` in sum.
        num_tokens: the static number of places, T.
        max_query_len: the most new tokens of a row, where that is known to be few: attention then needs no path for
            prompts. One place implies 1.
    """
    num_rows = num_new_tokens.shape[0]
    ends = jnp.cumsum(num_new_tokens, dtype=jnp.int32)  # [R]
    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    places = jnp.arange(num_tokens, dtype=jnp.int32)  # [T]
    rows = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
    real = rows < num_rows
    row = jnp.minimum(rows, num_rows - 1)
    first = table.seq_lens - num_new_tokens  # [R] position of each row's first new token
    positions = jnp.where(real, first[row] + places - query_start_loc[row], 0)
    blocks = table.block_tables[row, positions // table.block_size]
    num_slots = table.num_blocks * table.block_size
    slots = jnp.where(real, blocks * table.block_size + positions % table.block_size, num_slots)
    return Batch(
        rows=rows,
        positions=positions,
        slot_mapping=slots,
        block_tables=table.block_tables,
        seq_lens=table.seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=1 if num_tokens == 1 else max_query_len,
    )
