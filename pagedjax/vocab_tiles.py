"""Maxima over a vocabulary, found tile by tile.

A vocabulary row is tens of thousands of logits, and the first pass over it is what costs. Reducing tiles of 128 to
their maxima is a plain reduction that every backend does fast; the largest element, and the k largest, are then looked
for only in the tiles that can hold them. Order is (value descending, id ascending) everywhere.

Inputs hold no NaN: XLA's CPU backend may let one through a maximum, or lose the largest value to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# Dimensions: S sample rows, V token ids, P = V padded to whole tiles, C = P / TILE tiles.

TILE = 128


def pad_vocab(logits: jax.Array, num_vocab_tokens: int) -> jax.Array:
    """Float32 logits of the real tokens, padded with -inf to whole tiles.

    Args:
        logits: [S, >= num_vocab_tokens], any float dtype.
        num_vocab_tokens: V; columns from V on are the model's padding and are cut off.

    Returns:
        f32[S, P].
    """
    real = logits[:, :num_vocab_tokens].astype(jnp.float32)
    return jnp.pad(real, ((0, 0), (0, -num_vocab_tokens % TILE)), constant_values=-jnp.inf)


def tile_maxima(x: jax.Array) -> jax.Array:
    """f32[S, P] -> f32[S, C], the largest value of each tile."""
    return jnp.max(x.reshape(x.shape[0], -1, TILE), axis=-1)


def argmax(x: jax.Array, maxima: jax.Array) -> jax.Array:
    """The id of each row's largest value, the lowest among equals.

    Args:
        x: f32[S, P].
        maxima: f32[S, C], `tile_maxima(x)`.

    Returns:
        i32[S].
    """
    tile = jnp.argmax(maxima, axis=-1).astype(jnp.int32)  # [S]
    inside = jnp.argmax(_tiles(x, tile[:, None])[:, 0], axis=-1).astype(jnp.int32)
    return tile * TILE + inside


def top_k(x: jax.Array, maxima: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Each row's k largest values and their ids, in order.

    The k largest lie in the k tiles with the largest maxima: any other tile has k elements, one in each of those,
    ahead of all of its own.

    Args:
        x: f32[S, P].
        maxima: f32[S, C], `tile_maxima(x)`.
        k: At most TILE.

    Returns:
        f32[S, k] and i32[S, k].
    """
    if maxima.shape[1] <= k:
        values, ids = lax.top_k(_no_negative_zero(x), k)
        return values, ids.astype(jnp.int32)
    _, tiles = lax.top_k(_no_negative_zero(maxima), k)
    tiles = jnp.sort(tiles.astype(jnp.int32), axis=-1)  # [S, k], ascending: a position's order is its id's order
    candidates = _tiles(x, tiles).reshape(x.shape[0], -1)  # [S, k * TILE]
    values, places = lax.top_k(_no_negative_zero(candidates), k)
    places = places.astype(jnp.int32)
    return values, jnp.take_along_axis(tiles, places // TILE, axis=-1) * TILE + places % TILE


def _tiles(x: jax.Array, tiles: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x.reshape(x.shape[0], -1, TILE), tiles[:, :, None], axis=1)  # [S, k, TILE]


def _no_negative_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, jnp.zeros_like(x), x)  # lax.top_k puts 0.0 ahead of -0.0; they are ties
