"""Speculation without a second model: a row proposes tokens from its own history, and keeps those it would have drawn.

Text repeats itself, so a row looks for the latest earlier place where its last tokens stood and proposes what followed
there (prompt lookup: Saxena, "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding). The model
computes all proposals of a row in one step, and every position makes its own draw, with its own key, from its own
logits. A proposal is kept while the draw before it is that proposal: then the draw is the one that plain decoding would
have made, greedy or random. (Rejection sampling, Leviathan et al. 2023, keeps the distribution but not the tokens.)

The history holds the proposals behind the known tokens while they are judged, so that the decoder and the penalties
read them there; whatever a position's draw depends on stands before it.

Dimensions: R rows, M tokens of history, k proposals a row at most, S sample slots: the packed tokens, row after row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.batch import Batch
from pagedjax.plan import NO_TOKEN
from pagedjax.row_state import RowState
from pagedjax.sample_slots import SampleSlots

NGRAM = 3  # most tokens that have to agree; fewer count as well, where so many don't


def propose(rows: RowState, num_wanted: jax.Array, max_proposals: int) -> tuple[RowState, jax.Array]:
    """Writes proposals behind the known tokens of each row.

    The place that agrees with most of the last `NGRAM` tokens is chosen, the latest of them. If fewer than `num_wanted`
    tokens follow it, the history repeats with that period, and so do the proposals.

    Args:
        rows: the row state.
        num_wanted: i32[R], most proposals of each row, 0 .. k.
        max_proposals: k.

    Returns:
        The row state; and i32[R], how many proposals a row has: all that are wanted, but none if its last token stands
        nowhere else, and never so many that the draw after the last would be past the row's end.
    """
    num_rows, length = rows.tokens.shape
    places = jnp.arange(length, dtype=jnp.int32)[None]  # [1, M]
    agrees = (places > 0) & (places < rows.num_tokens[:, None])
    num_agreeing = jnp.zeros((num_rows, length), jnp.int32)  # of the tokens right before each place
    for back in range(1, NGRAM + 1):
        before = jnp.pad(rows.tokens, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, :length]
        last = jnp.take_along_axis(rows.tokens, jnp.maximum(rows.num_tokens - back, 0)[:, None], axis=1)
        agrees = agrees & (before == last)
        num_agreeing = num_agreeing + agrees.astype(jnp.int32)
    best = jnp.max(num_agreeing * length + places * (num_agreeing > 0), axis=1)  # [R]; the latest of the longest
    start = jax.lax.rem(best, jnp.int32(length))
    left = rows.end_len - rows.num_tokens - 1  # one for the draw after the last proposal
    num_proposed = jnp.where(best > 0, jnp.clip(num_wanted, 0, jnp.maximum(left, 0)), 0)

    nth = jnp.arange(max_proposals, dtype=jnp.int32)[None]  # [1, k]
    period = jnp.maximum(rows.num_tokens - start, 1)[:, None]
    proposals = jnp.take_along_axis(rows.tokens, start[:, None] + jax.lax.rem(nth, period), axis=1)  # [R, k]
    columns = jnp.where(nth < num_proposed[:, None], rows.num_tokens[:, None] + nth, length)
    lines = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    tokens = rows.tokens.at[lines, columns].set(proposals, mode="drop")
    return dataclasses.replace(rows, tokens=tokens), num_proposed


def keep(slots: SampleSlots, token_ids: jax.Array, goes_on: jax.Array, rows: RowState, batch: Batch) -> SampleSlots:
    """Keeps the draws that plain decoding would have made; the other slots draw nothing.

    Args:
        slots: one for each place.
        token_ids: i32[S], what was drawn.
        goes_on: bool[S], whether that token lets its row go on.
        rows: the row state, with the proposals.
        batch: the packed tokens.
    """
    num_rows = batch.seq_lens.shape[0]
    row = jnp.minimum(slots.rows, num_rows - 1)
    has_next = slots.places + 1 < batch.query_start_loc[row + 1]
    proposed = rows.tokens.at[slots.rows, slots.positions].get(mode="fill", fill_value=NO_TOKEN)
    kept = accept(has_next & goes_on & (token_ids == proposed), batch.query_start_loc[row])
    return dataclasses.replace(slots, rows=jnp.where(kept, slots.rows, num_rows))


def accept(agrees: jax.Array, first_slots: jax.Array) -> jax.Array:
    """Which draws become tokens: the first of each row, and every one whose predecessors in the row all agree.

    Args:
        agrees: bool[S], whether the draw is the token that its successor has been computed with, and the row goes on.
        first_slots: i32[S], the first slot of each slot's row.

    Returns:
        bool[S].
    """
    misses = (~agrees).astype(jnp.int32)
    missed_before = jnp.cumsum(misses, dtype=jnp.int32) - misses  # [S], of all rows
    return missed_before == missed_before[first_slots]
