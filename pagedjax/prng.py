"""The random draw as a function: Gumbel noise of (seed, sample index, position, token id), and of nothing else.

The generator is threefry2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the one behind
`jax.random.key`, written out here so that no JAX configuration, version default or 64-bit mode can move a draw. Keys
equal `fold_in(fold_in(key(seed), sample_index), position)`; a token's 32 random bits are the xor of the two words of
`fold_in(key, token_id)`. Noise belongs to a token id: it can be drawn for a few candidates or for the whole vocabulary,
in any order, and is the same number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Dimensions: S sample rows, N token ids.

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def threefry2x32(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Encrypts a counter: 20 rounds of threefry on two 32-bit words.

    Args:
        key: Two uint32 arrays that broadcast with the counter's.
        counter: Two uint32 arrays.

    Returns:
        Two uint32 arrays of random bits.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_KEY_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def fold_in(keys: jax.Array, data: jax.Array) -> jax.Array:
    """Derives keys; equals `jax.random.fold_in` on threefry keys.

    Args:
        keys: u32[S, 2], key words, high first.
        data: i32 or u32[S].

    Returns:
        u32[S, 2].
    """
    words = data.astype(jnp.uint32)
    return jnp.stack(threefry2x32((keys[:, 0], keys[:, 1]), (jnp.zeros_like(words), words)), axis=-1)


def draw_keys(seeds: jax.Array, sample_indices: jax.Array, positions: jax.Array) -> jax.Array:
    """The key of each row's draw: `fold_in(fold_in(key(seed), sample_index), position)`.

    Args:
        seeds: u32[S, 2], the seed's high and low words (they are the words of `jax.random.key(seed)`).
        sample_indices: i32[S], which of a request's n completions.
        positions: i32[S], absolute index of the token being drawn.

    Returns:
        u32[S, 2].
    """
    return fold_in(fold_in(seeds, sample_indices), positions)


def gumbel(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise for given token ids.

    Args:
        keys: u32[S, 2].
        token_ids: i32[S, N] or i32[N].

    Returns:
        f32[S, N], finite.
    """
    ids = jnp.broadcast_to(token_ids.astype(jnp.uint32), (keys.shape[0], token_ids.shape[-1]))
    x, y = threefry2x32((keys[:, :1], keys[:, 1:]), (jnp.zeros_like(ids), ids))
    return gumbel_of(x ^ y)


def gumbel_of(bits: jax.Array) -> jax.Array:
    """Uniform bits as standard Gumbel variables: -log(E), where E = -log(1 - u) is exponential.

    A draw is decided by the noise's upper tail, that is by small u, where float32 is fine-grained: all 32 bits count
    there, and the noise reaches 22.9.

    Args:
        bits: u32, any shape.

    Returns:
        f32, same shape, finite.
    """
    uniform = (bits.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, jnp.float32(_BELOW_ONE))))
