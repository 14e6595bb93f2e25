"""Log-probabilities of drawn tokens under the distribution they were drawn from, and how much of it the cut has kept.

That distribution is what `SamplingParams` describes: bias, penalties and temperature on the logits, then top-k, top-p
and min-p, and what they keep renormalised. An importance ratio for a policy that was sampled with a cut needs both.

Dimensions: S sample rows, P padded vocabulary, G rows at a time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.cuts import MIN_TEMPERATURE, Rows, narrow_cut, top_k_mass, top_p_mass
from pagedjax.logit_rules import apply_rules, clean, needs_rules
from pagedjax.row_sampling import RowSampling
from pagedjax.vocab_tiles import pad_vocab, tile_maxima

ROWS_AT_A_TIME = 8  # of those whose cut leaves many tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledLogprobs:
    """One value a row; zeros and ones where nobody asked."""

    token: jax.Array  # f32[S], natural log; 0 for a greedy row, whose draw is certain
    kept_mass: jax.Array  # f32[S], probability that the cut has left before renormalising; 1 for a greedy row

    @classmethod
    def none(cls, *shape: int) -> SampledLogprobs:
        return cls(jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))


def sampled_logprobs(
    logits: jax.Array,
    rows: RowSampling,
    positions: jax.Array,
    tokens: jax.Array,
    prompt_lens: jax.Array,
    token_ids: jax.Array,
    *,
    num_vocab_tokens: int,
    token_rows: jax.Array,
) -> SampledLogprobs:
    """For the rows that want it; without any, nothing runs.

    Args:
        logits, rows, positions, tokens, prompt_lens, num_vocab_tokens, token_rows: as `pagedjax.sampler.sample` has
            drawn with.
        token_ids: i32[S], what it drew.
    """

    def wanted() -> SampledLogprobs:
        x = clean(pad_vocab(logits, num_vocab_tokens))
        ruled = needs_rules(rows, positions - prompt_lens)
        x = lax.cond(ruled, lambda x: apply_rules(x, rows, positions, tokens, prompt_lens, token_rows), lambda x: x, x)
        lines = Rows.create(x, tile_maxima(x), rows, positions)
        all_mass = jnp.sum(jnp.exp(lines.scale(x)), axis=-1)  # [S]
        random = rows.temperature >= MIN_TEMPERATURE
        cut = rows.sampled_logprobs & random & lines.cut
        kept = lax.cond(jnp.any(cut), lambda: jnp.where(cut, _kept_mass(lines, cut), all_mass), lambda: all_mass)
        drawn = lines.scale(jnp.take_along_axis(x, token_ids[:, None], axis=-1))[:, 0] - jnp.log(kept)
        return SampledLogprobs(
            token=jnp.where(random, drawn, jnp.float32(0)),
            kept_mass=jnp.where(random, jnp.minimum(kept / all_mass, 1), jnp.float32(1)),
        )

    none = SampledLogprobs.none(logits.shape[0])
    return lax.cond(jnp.any(rows.sampled_logprobs), wanted, lambda: none)


def _kept_mass(rows: Rows, cut: jax.Array) -> jax.Array:
    """Weight f32[S] of the tokens kept, where the most likely one has 1, of the rows that are `cut` bool[S]."""
    narrow = narrow_cut(rows, cut)
    kept = jnp.sum(jnp.where(narrow.keep, jnp.exp(narrow.scaled), jnp.float32(0)), axis=-1)
    wide = cut & ~narrow.decided
    num_rows = wide.shape[0]
    size = min(ROWS_AT_A_TIME, num_rows)
    order = jnp.argsort(~wide).astype(jnp.int32)  # stable: wide rows first
    order = jnp.pad(jnp.where(wide[order], order, num_rows), (0, -num_rows % size), constant_values=num_rows)

    def measure(group: jax.Array, kept: jax.Array) -> jax.Array:
        lines = lax.dynamic_slice(order, (group * size,), (size,))
        return kept.at[lines].set(_wide_mass(rows.take(lines)), mode="drop")

    return lax.fori_loop(jnp.int32(0), (jnp.sum(wide, dtype=jnp.int32) + size - 1) // size, measure, kept)


def _wide_mass(rows: Rows) -> jax.Array:
    """Weight f32[G] of the tokens kept: each cut keeps a run of the most likely ones, and the shortest counts."""
    scaled = rows.scale(rows.x)
    weights = lax.optimization_barrier(jnp.exp(scaled))  # [G, P]
    of_top_k = top_k_mass(weights, rows.top_k)
    of_top_p = top_p_mass(weights, rows.top_p * of_top_k)
    of_min_p = jnp.sum(jnp.where(scaled >= rows.log_min_p, weights, jnp.float32(0)), axis=-1, keepdims=True)
    return jnp.maximum(jnp.minimum(jnp.minimum(of_top_k, of_top_p), of_min_p), 1)[:, 0]
