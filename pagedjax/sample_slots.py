"""Where an inner step draws tokens: one slot a row, or one for each token of a row whose proposals are verified.

Dimensions: S slots, T token places, R rows, k proposals a row at most.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.batch import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleSlots:
    """A slot that draws nothing has row R, so that it writes nowhere."""

    rows: jax.Array  # i32[S]
    places: jax.Array  # i32[S] of the token whose hidden state is drawn from
    positions: jax.Array  # i32[S] of the token being drawn
    lines: jax.Array  # i32[S] or i32[], where the result has it


def last_places(batch: Batch, ready: jax.Array, num_tokens: jax.Array, index: jax.Array) -> SampleSlots:
    """One slot for each row that is ready, compacted to S = min(T, R).

    Args:
        batch: the packed tokens.
        ready: bool[R], whether all known tokens of a row are computed.
        num_tokens: i32[R], known tokens.
        index: i32[], of the inner step.
    """
    num_rows = ready.shape[0]
    slots = jnp.nonzero(ready, size=min(batch.rows.shape[0], num_rows), fill_value=num_rows)[0].astype(jnp.int32)
    row = jnp.minimum(slots, num_rows - 1)
    return SampleSlots(slots, batch.query_start_loc[row + 1] - 1, num_tokens[row], index)


def every_place(batch: Batch, index: jax.Array, max_proposals: int) -> SampleSlots:
    """A slot for each place, S = min(T, R (1 + k)) of them; a row's are neighbours, and have lines one after another.

    Args:
        batch: the packed tokens, of each row at most 1 + k.
        index: i32[], of the inner step.
        max_proposals: k.
    """
    num_rows = batch.seq_lens.shape[0]
    places = jnp.arange(min(batch.rows.shape[0], num_rows * (1 + max_proposals)), dtype=jnp.int32)
    rows, positions = batch.rows[: places.shape[0]], batch.positions[: places.shape[0]]
    nth = places - batch.query_start_loc[jnp.minimum(rows, num_rows - 1)]
    return SampleSlots(rows, places, positions + 1, index * (1 + max_proposals) + nth)
