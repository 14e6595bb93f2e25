"""What the device knows of the sequence in each batch row, so that a step needs no tokens from the host.

The history holds prompt and generated tokens; a step reads its inputs there and writes what it samples, so the next
step can be dispatched before the host has seen the last one's tokens.

Dimensions: R rows, M tokens of history (max_model_len), A rows admitted by one call.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import block_table
from pagedjax.block_table import BlockTable
from pagedjax.row_sampling import RowSampling

# Sequences one `admit` call starts; more take more calls of the same program.
ADMITS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """One line a row; lines of rows without a sequence are stale and have `active` False."""

    tokens: jax.Array  # i32[R, M] token ids by position; stale past num_tokens
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
    rows: np.ndarray  # i32[A], num_rows for padding
    lines: RowState  # [A] lines to write there


def change_rows(table: BlockTable, rows: RowState, changes: Changes) -> tuple[BlockTable, RowState]:
    """Releases, then admits; a row may be in both. Cost follows what changes.

    Args:
        table: the block table.
        rows: the row state.
        changes: what to do; padding lines are dropped.
    """
    table = block_table.release(table, changes.release)
    rows = dataclasses.replace(rows, active=rows.active & ~changes.release)
    rows = jax.tree.map(lambda old, new: old.at[changes.rows].set(new, mode="drop"), rows, changes.lines)
    return table, rows
