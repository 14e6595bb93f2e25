"""What a request changes in its logits before the draw: bias, stop ids held back, penalties.

Each rule runs only if a row of the batch uses it, and is exact for the rows that don't. The order (bias, held-back
stop ids, repetition, frequency, presence) is vLLM's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.row_sampling import NO_TOKEN, RowSampling

# Dimensions: S sample rows, R history rows, M history length, P padded vocabulary.

_MAX_LOGIT = float(jnp.finfo(jnp.float32).max)


def needs_rules(rows: RowSampling, num_outputs: jax.Array) -> jax.Array:
    """bool[]: whether `apply_rules` changes any row; num_outputs i32[S] is how many tokens are out."""
    return jnp.any(_biased(rows)) | jnp.any(_held_back(rows, num_outputs)) | jnp.any(_penalised(rows))


@jax.jit  # within a jit as well: traced once for all that use it
def apply_rules(
    x: jax.Array,
    rows: RowSampling,
    positions: jax.Array,
    tokens: jax.Array,
    prompt_lens: jax.Array,
    token_rows: jax.Array,
) -> jax.Array:
    """Logits after bias, held-back stop ids and penalties.

    Args:
        x: f32[S, P], clean.
        rows: S lines.
        positions: i32[S], index of the token being drawn: the history is the tokens before it.
        tokens: i32[R, M], prompt and output.
        prompt_lens: i32[S].
        token_rows: i32[S], the line of `tokens` each sample row continues.

    Returns:
        f32[S, P], clean.
    """
    lines = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    held_back = _held_back(rows, positions - prompt_lens)
    x = lax.cond(
        jnp.any(_biased(rows)), lambda x: x.at[lines, rows.bias_ids].add(rows.bias_values, mode="drop"), lambda x: x, x
    )
    stop_ids = jnp.where(held_back[:, None], rows.stop_ids, NO_TOKEN)
    x = lax.cond(jnp.any(held_back), lambda x: x.at[lines, stop_ids].set(-jnp.inf, mode="drop"), lambda x: x, x)
    x = lax.cond(
        jnp.any(_penalised(rows)),
        lambda x: _penalise(x, rows, positions, tokens[token_rows], prompt_lens),
        lambda x: x,
        x,
    )
    return clean(x)


def _biased(rows: RowSampling) -> jax.Array:
    return rows.bias_ids[:, 0] != NO_TOKEN  # entries fill from the left


def _held_back(rows: RowSampling, num_outputs: jax.Array) -> jax.Array:
    return num_outputs < rows.min_tokens


def _penalised(rows: RowSampling) -> jax.Array:
    return (rows.repetition_penalty != 1) | (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)


def _penalise(
    x: jax.Array, rows: RowSampling, positions: jax.Array, history: jax.Array, prompt_lens: jax.Array
) -> jax.Array:
    lines = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    places = jnp.arange(history.shape[1], dtype=jnp.int32)[None]  # [1, M]
    known = places < positions[:, None]
    output = known & (places >= prompt_lens[:, None])
    seen = jnp.zeros(x.shape, jnp.bool_).at[lines, jnp.where(known, history, NO_TOKEN)].set(True, mode="drop")
    counts = jnp.zeros(x.shape, jnp.float32)
    counts = counts.at[lines, jnp.where(output, history, NO_TOKEN)].add(jnp.float32(1), mode="drop")
    repetition = rows.repetition_penalty[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - rows.frequency_penalty[:, None] * counts
    return x - rows.presence_penalty[:, None] * (counts > 0).astype(jnp.float32)


def clean(x: jax.Array) -> jax.Array:
    """NaN becomes -inf and +inf the largest float32, so that a broken row still gives a token; same shape."""
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, jnp.float32(_MAX_LOGIT)))
