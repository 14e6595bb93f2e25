"""One token per sample row: the Gumbel-max draw, with every option in one program.

A row's token is the argmax of (processed logits / temperature + Gumbel noise of the token id) over the tokens its cut
(top-k, top-p, min-p) keeps; a greedy row has no noise. Three paths, each skipped if no row needs it, and chosen for a
row by its own logits and parameters only, so that batch mates never change a draw:

- greedy: the argmax.
- narrow: the cut falls within the NARROW most likely tokens; only those get noise.
- wide: the whole vocabulary gets noise, a few rows at a time. A cut is not searched for: the draw's winner is kept
  if the probability of the tokens ahead of it is below top_p (and so on); otherwise all it is ahead of is discarded
  with it and the next winner is tried. That is the same token a sort would give, at one sum per try.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.logit_rules import apply_rules, clean, needs_rules
from pagedjax.prng import draw_keys, gumbel
from pagedjax.row_sampling import RowSampling
from pagedjax.vocab_tiles import argmax, pad_vocab, tile_maxima, top_k

# Dimensions: S sample rows, R history rows, M history length, V token ids, P padded vocabulary, C vocabulary tiles,
# K = NARROW candidates, G rows of a wide group.

MIN_TEMPERATURE = 1e-5  # below this a row is greedy
NARROW = 64  # candidates of the narrow path
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
            lambda: _draw(_Rows.create(processed, new_maxima, rows, positions), random, greedy_ids),
            lambda: greedy_ids,
        )

    return lax.cond(invalid | ruled | jnp.any(random), draw, lambda: argmax(x, maxima))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """What the draw needs of each row."""

    x: jax.Array  # f32[S, P], processed logits; no NaN
    maxima: jax.Array  # f32[S, C]
    peak: jax.Array  # f32[S, 1], the largest logit (0 where there is none)
    temperature: jax.Array  # f32[S, 1], above 0
    top_k: jax.Array  # i32[S, 1], P or more where off
    top_p: jax.Array  # f32[S, 1]; +inf where off
    log_min_p: jax.Array  # f32[S, 1]; -inf where off
    keys: jax.Array  # u32[S, 2]

    @classmethod
    def create(cls, x: jax.Array, maxima: jax.Array, rows: RowSampling, positions: jax.Array) -> _Rows:
        peak = jnp.max(maxima, axis=-1, keepdims=True)
        everything = jnp.int32(x.shape[1])
        return cls(
            x=x,
            maxima=maxima,
            peak=jnp.where(peak > -jnp.inf, peak, jnp.float32(0)),
            temperature=jnp.where(rows.temperature < MIN_TEMPERATURE, jnp.float32(1), rows.temperature)[:, None],
            top_k=jnp.where(rows.top_k > 0, rows.top_k, everything)[:, None],
            top_p=jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)[:, None],
            log_min_p=jnp.log(rows.min_p)[:, None],
            keys=draw_keys(rows.seed, rows.sample_index, positions),
        )

    def take(self, lines: jax.Array) -> _Rows:
        return jax.tree.map(lambda leaf: jnp.take(leaf, lines, axis=0, mode="clip"), self)

    def scale(self, values: jax.Array) -> jax.Array:
        """Logits with the peak at 0, over temperature: [S, N] -> [S, N]."""
        return (values - self.peak) / self.temperature

    @property
    def cut(self) -> jax.Array:
        """bool[S]: whether the row can lose tokens before the draw."""
        off = (self.top_k >= self.x.shape[1]) & (self.top_p == jnp.inf) & (self.log_min_p == -jnp.inf)
        return ~off[:, 0]


def _draw(rows: _Rows, random: jax.Array, greedy_ids: jax.Array) -> jax.Array:
    """Token ids i32[S]: drawn for the `random` rows bool[S], greedy for the others."""
    cut = random & rows.cut
    ids, decided = lax.cond(jnp.any(cut), lambda: _draw_narrow(rows, cut), lambda: (greedy_ids, cut))
    decided = decided & cut
    return _draw_wide(rows, random & ~decided, jnp.where(decided, ids, greedy_ids))


def _draw_narrow(rows: _Rows, cut: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids i32[S], and bool[S]: whether the cut falls within the candidates, so that the id is the draw."""
    values, ids = top_k(rows.x, rows.maxima, NARROW)  # [S, K]
    scaled = rows.scale(values)
    weights = jnp.exp(scaled)  # the most likely token has 1
    reached = jnp.cumsum(weights, axis=-1)  # [S, K]
    ahead = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
    within_k = rows.top_k <= NARROW
    full_mass = lax.cond(
        jnp.any(cut[:, None] & ~within_k & (rows.top_p < jnp.inf)),
        lambda: jnp.sum(jnp.exp(rows.scale(rows.x)), axis=-1, keepdims=True),
        lambda: reached[:, -1:],
    )
    top_k_mass = jnp.take_along_axis(reached, jnp.clip(rows.top_k, 1, NARROW) - 1, axis=-1)
    # Between K and P the mass of the top k is not known here, and top_p is left to the wide path.
    known = within_k | (rows.top_k >= rows.x.shape[1]) | (rows.top_p == jnp.inf)
    limit = jnp.where(known, rows.top_p * jnp.where(within_k, top_k_mass, full_mass), jnp.inf)

    place = jnp.arange(NARROW, dtype=jnp.int32)[None]
    keep = (place == 0) | ((place < rows.top_k) & (ahead < limit) & (scaled >= rows.log_min_p))
    last = slice(NARROW - 1, NARROW)
    decided = within_k | (reached[:, last] >= limit) | ((scaled[:, last] < rows.log_min_p) & known)
    perturbed = jnp.where(keep, scaled + gumbel(rows.keys, ids), -jnp.inf)
    winners = perturbed == jnp.max(perturbed, axis=-1, keepdims=True)
    return jnp.min(jnp.where(winners, ids, jnp.iinfo(jnp.int32).max), axis=-1), decided[:, 0]


def _draw_wide(rows: _Rows, wide: jax.Array, ids: jax.Array) -> jax.Array:
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


def _draw_group(rows: _Rows, wanted: jax.Array) -> jax.Array:
    """Token ids i32[G] of a group; a row that is not `wanted` bool[G] gets some id."""
    ids = jnp.arange(rows.x.shape[1], dtype=jnp.int32)
    # The barrier keeps the noise out of the reduction's loop: fused, XLA's CPU backend computes it unvectorised.
    perturbed = lax.optimization_barrier(rows.scale(rows.x) + gumbel(rows.keys, ids))  # [G, P]
    winner = argmax(perturbed, tile_maxima(perturbed))
    cut = wanted & rows.cut
    return lax.cond(jnp.any(cut), lambda: _first_kept(rows, perturbed, winner, ~cut), lambda: winner)


def _first_kept(rows: _Rows, perturbed: jax.Array, winner: jax.Array, done: jax.Array) -> jax.Array:
    """The winner i32[G] among the tokens the cut keeps; rows already `done` bool[G] keep theirs.

    Each rejected winner takes all tokens behind it along, so the number of tries grows with log(1 / kept probability).
    """
    ids = jnp.arange(rows.x.shape[1], dtype=jnp.int32)[None]
    weights = lax.optimization_barrier(jnp.exp(rows.scale(rows.x)))
    full_mass = jnp.sum(weights, axis=-1, keepdims=True)
    some_k = (rows.top_k < rows.x.shape[1]) & (rows.top_p < jnp.inf)
    mass = lax.cond(
        jnp.any(some_k), lambda: jnp.where(some_k, _top_k_mass(weights, rows.top_k), full_mass), lambda: full_mass
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


def _top_k_mass(weights: jax.Array, k: jax.Array) -> jax.Array:
    """Sum of each row's k largest weights.

    The k-th largest is found by bisection on the bits: non-negative floats are ordered as their bit patterns are.

    Args:
        weights: f32[G, P], in [0, 1].
        k: i32[G, 1].

    Returns:
        f32[G, 1].
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        above = weights > lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32) >= k
        return jnp.where(enough, middle + 1, low), jnp.where(enough, high, middle)

    one = lax.bitcast_convert_type(jnp.ones_like(k, jnp.float32), jnp.int32)
    low, _ = lax.fori_loop(0, 30, halve, (jnp.zeros_like(k), one))  # 30 bits: the pattern of 1.0 is below 2**30
    kth = lax.bitcast_convert_type(low, jnp.float32)
    above = weights > kth
    num_above = jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    mass_above = jnp.sum(jnp.where(above, weights, jnp.float32(0)), axis=-1, keepdims=True)
    return mass_above + (k - num_above).astype(jnp.float32) * kth
