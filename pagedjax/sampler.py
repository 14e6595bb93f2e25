"""One token per sample row: the Gumbel-max draw, with every option in one program.

A row's token is the argmax of (processed logits / temperature + Gumbel noise of the token id) over the tokens its cut
(top-k, top-p, min-p) keeps; a greedy row has no noise. Three paths, each skipped if no row needs it, and chosen for a
row by its own logits and parameters only, so that batch mates never change a draw:

- greedy: the argmax.
- narrow: the cut falls within the `cuts.NARROW` most likely tokens; only those get noise.
- wide: the whole vocabulary gets noise, a few rows at a time. A cut is not searched for: the draw's winner is kept
  if the probability of the tokens ahead of it is below top_p (and so on); otherwise all it is ahead of is discarded
  with it and the next winner is tried. That is the same token a sort would give, at one sum per try.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.cuts import MIN_TEMPERATURE, Rows, narrow_cut, top_k_mass
from pagedjax.logit_rules import apply_rules, clean, needs_rules
from pagedjax.prng import gumbel
from pagedjax.row_sampling import RowSampling
from pagedjax.vocab_tiles import argmax, pad_vocab, tile_maxima

# Dimensions: S sample rows, R history rows, M history length, V token ids, P padded vocabulary, C vocabulary tiles,
# K = NARROW candidates, G rows of a wide group.

WIDE_ROWS = 8  # rows of the wide path at a time


def sample(
    logits: jax.Array,
    rows: RowSampling,
    positions: jax.Array,
    tokens: jax.Array,
    prompt_lens: jax.Array,
    *,
    num_vocab_tokens: int,
    token_rows: jax.Array | None = None,
) -> jax.Array:
    """Draws one token for each sample row.

    The draw depends on the row's logits, history and parameters, and on (seed, sample index, position); never on other
    rows, the row's place, the logits' dtype or the padded vocabulary. A NaN logit counts as -inf; a row of nothing
    else gives id 0.

    Args:
        logits: [S, >= V], any float dtype; columns from V on are never drawn.
        rows: S lines of parameters.
        positions: i32[S], absolute index of the token being drawn (prompt included): also the history's length.
        tokens: i32[R, M], prompt and output ids of the sequences; entries from `positions` on are not read.
        prompt_lens: i32[S], the first output's position.
        num_vocab_tokens: V, static.
        token_rows: i32[S], the line of `tokens` that each sample row continues; None: line s for row s.

    Returns:
        i32[S], token ids in [0, V).
    """
    if token_rows is None:
        token_rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    x = pad_vocab(logits, num_vocab_tokens)
    maxima = tile_maxima(x)
    # A NaN or +inf shows in the sum; a maximum may miss it (see vocab_tiles).
    invalid = ~jnp.all(jnp.sum(x, axis=-1) < jnp.inf)
    ruled = needs_rules(rows, positions - prompt_lens)
    random = rows.temperature >= MIN_TEMPERATURE

    def draw() -> jax.Array:
        # `clean` makes a new array here: what a conditional may change or hand through must not be its own input, or
        # XLA copies that ahead of every branch, the plain one below included.
        processed = lax.cond(
            ruled, lambda x: apply_rules(x, rows, positions, tokens, prompt_lens, token_rows), lambda x: x, clean(x)
        )
        new_maxima = tile_maxima(processed)
        greedy_ids = argmax(processed, new_maxima)
        return lax.cond(
            jnp.any(random),
            lambda: _draw(Rows.create(processed, new_maxima, rows, positions), random, greedy_ids),
            lambda: greedy_ids,
        )

    return lax.cond(invalid | ruled | jnp.any(random), draw, lambda: argmax(x, maxima))


def _draw(rows: Rows, random: jax.Array, greedy_ids: jax.Array) -> jax.Array:
    """Token ids i32[S]: drawn for the `random` rows bool[S], greedy for the others."""
    cut = random & rows.cut
    ids, decided = lax.cond(jnp.any(cut), lambda: _draw_narrow(rows, cut), lambda: (greedy_ids, cut))
    decided = decided & cut
    return _draw_wide(rows, random & ~decided, jnp.where(decided, ids, greedy_ids))


def _draw_narrow(rows: Rows, cut: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids i32[S], and bool[S]: whether the cut falls within the candidates, so that the id is the draw."""
    ids, scaled, keep, decided = narrow_cut(rows, cut)
    perturbed = jnp.where(keep, scaled + gumbel(rows.keys, ids), -jnp.inf)
    winners = perturbed == jnp.max(perturbed, axis=-1, keepdims=True)
    return jnp.min(jnp.where(winners, ids, jnp.iinfo(jnp.int32).max), axis=-1), decided


def _draw_wide(rows: Rows, wide: jax.Array, ids: jax.Array) -> jax.Array:
    """Draws the `wide` rows bool[S] over the whole vocabulary, and leaves the other rows' ids i32[S]."""
    num_rows = wide.shape[0]
    group_size = min(WIDE_ROWS, num_rows)
    order = jnp.argsort(~wide).astype(jnp.int32)  # stable: wide rows first
    order = jnp.where(wide[order], order, num_rows)  # out of range: not drawn, not written
    order = jnp.pad(order, (0, -num_rows % group_size), constant_values=num_rows)
    num_groups = (jnp.sum(wide, dtype=jnp.int32) + group_size - 1) // group_size

    def draw_group(group: jax.Array, ids: jax.Array) -> jax.Array:
        lines = lax.dynamic_slice(order, (group * group_size,), (group_size,))
        return ids.at[lines].set(_draw_group(rows.take(lines), lines < num_rows), mode="drop")

    return lax.fori_loop(jnp.int32(0), num_groups, draw_group, ids)


def _draw_group(rows: Rows, wanted: jax.Array) -> jax.Array:
    """Token ids i32[G] of a group; a row that is not `wanted` bool[G] gets some id."""
    ids = jnp.arange(rows.x.shape[1], dtype=jnp.int32)
    # The barrier keeps the noise out of the reduction's loop: fused, XLA's CPU backend computes it unvectorised.
    perturbed = lax.optimization_barrier(rows.scale(rows.x) + gumbel(rows.keys, ids))  # [G, P]
    winner = argmax(perturbed, tile_maxima(perturbed))
    cut = wanted & rows.cut
    return lax.cond(jnp.any(cut), lambda: _first_kept(rows, perturbed, winner, ~cut), lambda: winner)


def _first_kept(rows: Rows, perturbed: jax.Array, winner: jax.Array, done: jax.Array) -> jax.Array:
    """The winner i32[G] among the tokens the cut keeps; rows already `done` bool[G] keep theirs.

    Each rejected winner takes all tokens behind it along, so the number of tries grows with log(1 / kept probability).
    """
    ids = jnp.arange(rows.x.shape[1], dtype=jnp.int32)[None]
    weights = lax.optimization_barrier(jnp.exp(rows.scale(rows.x)))
    full_mass = jnp.sum(weights, axis=-1, keepdims=True)
    some_k = (rows.top_k < rows.x.shape[1]) & (rows.top_p < jnp.inf)
    mass = lax.cond(
        jnp.any(some_k), lambda: jnp.where(some_k, top_k_mass(weights, rows.top_k), full_mass), lambda: full_mass
    )

    State = tuple[jax.Array, jax.Array, jax.Array]

    def judge(state: State) -> State:
        perturbed, winner, done = state
        token = winner[:, None]
        value = jnp.take_along_axis(rows.x, token, axis=-1)
        ahead = (rows.x > value) | ((rows.x == value) & (ids < token))  # [G, P]
        num_ahead = jnp.sum(ahead, axis=-1, keepdims=True, dtype=jnp.int32)
        mass_ahead = jnp.sum(jnp.where(ahead, weights, jnp.float32(0)), axis=-1, keepdims=True)
        keep = (num_ahead < rows.top_k) & (mass_ahead < rows.top_p * mass) & (rows.scale(value) >= rows.log_min_p)
        done = done | (keep | (num_ahead == 0))[:, 0]
        perturbed = lax.optimization_barrier(jnp.where(ahead, perturbed, -jnp.inf))
        return perturbed, jnp.where(done, winner, argmax(perturbed, tile_maxima(perturbed))), done

    return lax.while_loop(lambda state: ~jnp.all(state[2]), judge, (perturbed, winner, done))[1]
