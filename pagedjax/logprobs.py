"""Log-probabilities of tokens under the raw distribution: the model's logits before bias, penalties and temperature."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.logit_rules import clean
from pagedjax.row_sampling import NO_LOGPROBS, NO_TOKEN
from pagedjax.sampling_params import MAX_LOGPROBS
from pagedjax.vocab_tiles import pad_vocab, tile_maxima, top_k

# Dimensions: S sample rows, V token ids, k alternatives.

_LEAST = jnp.finfo(jnp.float32).min  # of a token without any probability: sums and JSON take no infinity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities per row; zeros and NO_TOKEN where the batch asked for less."""

    token: jax.Array  # f32[S], of the row's own token
    top_ids: jax.Array  # i32[S, k], most likely first; NO_TOKEN where the vocabulary is smaller than k
    top: jax.Array  # f32[S, k]


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, num_logprobs: jax.Array, *, num_vocab_tokens: int, k: int = MAX_LOGPROBS
) -> TokenLogprobs:
    """Log-probabilities of each row's token and of the k most likely ones.

    The work is done for the whole batch if any row asks for it, and not at all otherwise. For a row that asks for m
    alternatives, the first m columns are its own.

    Args:
        logits: [S, >= V], raw; columns from V on are padding and have no probability.
        token_ids: i32[S], in range.
        num_logprobs: i32[S]: NO_LOGPROBS, 0 (only the token itself), or the number of alternatives.
        num_vocab_tokens: V.
        k: Columns of alternatives.

    Returns:
        TokenLogprobs, finite. Tokens without any probability are no alternatives; a row's own token that has none gets
        the least float32.
    """
    num_rows = logits.shape[0]
    no_top = (jnp.full((num_rows, k), NO_TOKEN, jnp.int32), jnp.zeros((num_rows, k), jnp.float32))

    def wanted() -> TokenLogprobs:
        x = clean(pad_vocab(logits, num_vocab_tokens))
        maxima = tile_maxima(x)
        largest = jnp.max(maxima, axis=-1, keepdims=True)
        largest = jnp.where(largest > -jnp.inf, largest, jnp.float32(0))  # a row of nothing else
        log_sum = largest + jnp.log(jnp.sum(jnp.exp(x - largest), axis=-1, keepdims=True))  # [S, 1]

        def alternatives() -> tuple[jax.Array, jax.Array]:
            values, ids = top_k(x, maxima, k)
            real = (ids < num_vocab_tokens) & (values > -jnp.inf)
            return jnp.where(real, ids, NO_TOKEN), jnp.where(real, values - log_sum, jnp.float32(0))

        top_ids, top = lax.cond(jnp.any(num_logprobs > 0), alternatives, lambda: no_top)
        token = jnp.take_along_axis(x, token_ids[:, None], axis=-1) - log_sum
        token = jnp.where(jnp.isfinite(token), token, _LEAST)
        return TokenLogprobs(token=token[:, 0], top_ids=top_ids, top=top)

    def unwanted() -> TokenLogprobs:
        return TokenLogprobs(token=jnp.zeros(num_rows, jnp.float32), top_ids=no_top[0], top=no_top[1])

    return lax.cond(jnp.any(num_logprobs != NO_LOGPROBS), wanted, unwanted)
