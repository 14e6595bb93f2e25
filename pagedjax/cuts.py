"""What top-k, top-p and min-p leave of a row's distribution: a run of its most likely tokens, never empty.

Most often the run ends within the `NARROW` most likely tokens, and `narrow_cut` finds it there. Where it does not,
masses are found by bisection on the bits of a probability: non-negative floats are ordered as their bit patterns are.

Dimensions: S sample rows, P padded vocabulary, C vocabulary tiles, K = NARROW candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.prng import draw_keys
from pagedjax.row_sampling import RowSampling
from pagedjax.vocab_tiles import top_k

MIN_TEMPERATURE = 1e-5  # below this a row is greedy
NARROW = 64  # candidates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the draw needs of each row, made of its processed logits and its parameters."""

    x: jax.Array  # f32[S, P], processed logits; no NaN
    maxima: jax.Array  # f32[S, C]
    peak: jax.Array  # f32[S, 1], the largest logit (0 where there is none)
    temperature: jax.Array  # f32[S, 1], above 0
    top_k: jax.Array  # i32[S, 1], P or more where off
    top_p: jax.Array  # f32[S, 1]; +inf where off
    log_min_p: jax.Array  # f32[S, 1]; -inf where off
    keys: jax.Array  # u32[S, 2]

    @classmethod
    def create(cls, x: jax.Array, maxima: jax.Array, rows: RowSampling, positions: jax.Array) -> Rows:
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

    def take(self, lines: jax.Array) -> Rows:
        return jax.tree.map(lambda leaf: jnp.take(leaf, lines, axis=0, mode="clip"), self)

    def scale(self, values: jax.Array) -> jax.Array:
        """Logits with the peak at 0, over temperature: [S, N] -> [S, N]."""
        return (values - self.peak) / self.temperature

    @property
    def cut(self) -> jax.Array:
        """bool[S]: whether the row can lose tokens before the draw."""
        off = (self.top_k >= self.x.shape[1]) & (self.top_p == jnp.inf) & (self.log_min_p == -jnp.inf)
        return ~off[:, 0]


class NarrowCut(NamedTuple):
    """The cut among the most likely tokens, in order (value descending, id ascending)."""

    ids: jax.Array  # i32[S, K]
    scaled: jax.Array  # f32[S, K], as `Rows.scale` gives them
    keep: jax.Array  # bool[S, K]
    decided: jax.Array  # bool[S], whether the cut falls within the candidates, so that `keep` is all of it


@jax.jit  # within a jit as well: traced once for all that use it
def narrow_cut(rows: Rows, cut: jax.Array) -> NarrowCut:
    """The cut of the rows that are `cut` bool[S]; the others' lines mean nothing."""
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
    mass_of_k = jnp.take_along_axis(reached, jnp.clip(rows.top_k, 1, NARROW) - 1, axis=-1)
    # Between K and P the mass of the top k is not known here, and top_p is left to the wide path.
    known = within_k | (rows.top_k >= rows.x.shape[1]) | (rows.top_p == jnp.inf)
    limit = jnp.where(known, rows.top_p * jnp.where(within_k, mass_of_k, full_mass), jnp.inf)

    place = jnp.arange(NARROW, dtype=jnp.int32)[None]
    keep = (place == 0) | ((place < rows.top_k) & (ahead < limit) & (scaled >= rows.log_min_p))
    last = slice(NARROW - 1, NARROW)
    decided = within_k | (reached[:, last] >= limit) | ((scaled[:, last] < rows.log_min_p) & known)
    return NarrowCut(ids, scaled, keep, decided[:, 0])


def top_k_mass(weights: jax.Array, k: jax.Array) -> jax.Array:
    """Sum of each row's k largest weights.

    Args:
        weights: f32[S, P], in [0, 1].
        k: i32[S, 1].

    Returns:
        f32[S, 1].
    """
    kth = _least_weight(lambda weight: jnp.sum(weights > weight, axis=-1, keepdims=True, dtype=jnp.int32) < k, k.shape)
    above = weights > kth
    num_above = jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    mass_above = jnp.sum(jnp.where(above, weights, jnp.float32(0)), axis=-1, keepdims=True)
    return mass_above + (k - num_above).astype(jnp.float32) * kth


def top_p_mass(weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Sum of the shortest run of each row's largest weights that reaches `limit`, or of all.

    Args:
        weights: f32[S, P], in [0, 1].
        limit: f32[S, 1].

    Returns:
        f32[S, 1].
    """

    def mass_above(weight: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights > weight, weights, jnp.float32(0)), axis=-1, keepdims=True)

    last = _least_weight(lambda weight: mass_above(weight) < limit, limit.shape)
    above = mass_above(last)
    num_last = jnp.sum(weights == last, axis=-1, keepdims=True).astype(jnp.float32)
    wanted = jnp.ceil((limit - above) / jnp.where(last > 0, last, jnp.float32(1)))
    return above + last * jnp.clip(wanted, 0, num_last)


def _least_weight(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The least weight f32[S, 1] in [0, 1] for which `holds`, which holds for all larger ones as well."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    one = lax.bitcast_convert_type(jnp.ones(shape, jnp.float32), jnp.int32)
    low, _ = lax.fori_loop(0, 30, halve, (jnp.zeros(shape, jnp.int32), one))  # the pattern of 1.0 is below 2**30
    return lax.bitcast_convert_type(low, jnp.float32)
