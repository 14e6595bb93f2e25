"""What the device knows of the sequence in each batch row, so that a step needs no tokens from the host.

The history holds prompt and generated tokens; a step reads its inputs there and writes what it samples, so the next
step can be dispatched before the host has seen the last one's tokens.

Dimensions: R rows, M tokens of history (max_model_len), P blocks a row at most; A rows started and D blocks dropped by
one call.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import block_table
from pagedjax.block_table import BlockTable
from pagedjax.row_sampling import RowSampling

# Sequences one `change_rows` starts, and cached blocks it drops; more take more calls of the same program.
ADMITS = 8
DROPS = 64

NO_PARENT = -1

_MAX_INT32 = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """One line a row; lines of rows without a sequence are stale and have `active` False."""

    tokens: jax.Array  # i32[R, M] token ids by position; past num_tokens stale, or proposals within a step
    num_tokens: jax.Array  # i32[R] known tokens, prompt and generated
    prompt_len: jax.Array  # i32[R]
    end_len: jax.Array  # i32[R] num_tokens at which the row ends by length
    prompt_logprobs_from: jax.Array  # i32[R] first position whose prompt logprob is wanted; prompt_len or more: none
    active: jax.Array  # bool[R] holds a sequence that has not ended
    sampling: RowSampling

    @classmethod
    def zeros(cls, num_rows: int, max_model_len: int) -> RowState:
        def zero() -> jax.Array:
            return jnp.zeros(num_rows, jnp.int32)

        return cls(
            tokens=jnp.zeros((num_rows, max_model_len), jnp.int32),
            num_tokens=zero(),
            prompt_len=zero(),
            end_len=zero(),
            prompt_logprobs_from=zero(),
            active=jnp.zeros(num_rows, bool),
            sampling=RowSampling.zeros(num_rows),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Changes:
    """The rare transition of a plan: rows to give up and sequences to put into rows, as host arrays."""

    release: np.ndarray  # bool[R]
    drops: np.ndarray  # i32[D] blocks that leave the prefix cache; NULL_BLOCK for padding
    rows: np.ndarray  # i32[A], num_rows for padding
    lines: RowState  # [A] lines to write there
    adopts: np.ndarray  # bool[A] whether the row starts from cached blocks, or from nothing; else it is a fork
    num_tokens: np.ndarray  # i32[A] tokens it starts with
    block_ids: np.ndarray  # i32[A, P] the cached blocks that hold them
    parents: np.ndarray  # i32[R] the row to fork, or NO_PARENT
    ends: np.ndarray  # i32[R] tokens that are left of it

    @staticmethod
    def none(rows: RowState, max_blocks_per_seq: int) -> Changes:
        """Changes nothing; to be filled in."""
        num_rows = rows.num_tokens.shape[0]
        return Changes(
            release=np.zeros(num_rows, bool),
            drops=np.full(DROPS, block_table.NULL_BLOCK, np.int32),
            rows=np.full(ADMITS, num_rows, np.int32),
            lines=jax.tree.map(lambda leaf: np.zeros((ADMITS, *leaf.shape[1:]), leaf.dtype), rows),
            adopts=np.zeros(ADMITS, bool),
            num_tokens=np.zeros(ADMITS, np.int32),
            block_ids=np.full((ADMITS, max_blocks_per_seq), block_table.NULL_BLOCK, np.int32),
            parents=np.full(num_rows, NO_PARENT, np.int32),
            ends=np.full(num_rows, _MAX_INT32, np.int32),
        )


def change_rows(table: BlockTable, rows: RowState, changes: Changes) -> tuple[BlockTable, RowState]:
    """Releases, drops, adopts, forks, in this order; a row may be released and started. Cost follows what changes.

    Args:
        table: the block table.
        rows: the row state.
        changes: what to do; padding lines are dropped.
    """
    table = block_table.release(table, changes.release)
    table = block_table.drop(table, changes.drops)
    adopters = jnp.where(changes.adopts, changes.rows, table.max_num_seqs)
    table = block_table.adopt(table, adopters, changes.block_ids, changes.num_tokens)
    table = block_table.truncate(block_table.fork(table, changes.parents), changes.ends)
    rows = dataclasses.replace(rows, active=rows.active & ~changes.release)
    rows = jax.tree.map(lambda old, new: old.at[changes.rows].set(new, mode="drop"), rows, changes.lines)
    return table, rows
