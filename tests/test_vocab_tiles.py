"""pagedjax.vocab_tiles: maxima by tiles are the maxima a stable sort gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.vocab_tiles import TILE, argmax, pad_vocab, tile_maxima, top_k

WIDE = 70 * TILE  # more tiles than candidates: the largest are looked for in the best tiles only
NARROW = 5 * TILE


def _rows(width: int, step: float) -> np.ndarray:
    rng = np.random.default_rng(width)
    x = np.round(rng.normal(size=(6, width)) * 3 / step) * step
    x[1] = 0.0
    x[1, ::3] = -0.0
    x[2] = -np.inf
    x[3, 7:] = -np.inf
    x[4, -1] = x[4, TILE - 1] = 50.0
    x[5] = 0.0
    x[5, : 6 * TILE] = -0.0
    return x.astype(np.float32)


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("step", [1e-6, 2.0])
def test_maxima_equal_a_stable_sort(width: int, step: float) -> None:
    x = _rows(width, step)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :64]
    values, ids = jax.jit(top_k, static_argnums=2)(x, tile_maxima(x), 64)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=-1))
    np.testing.assert_array_equal(jax.jit(argmax)(x, tile_maxima(x)), order[:, 0])


@pytest.mark.parametrize("num_vocab_tokens", [1, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_padding(num_vocab_tokens: int) -> None:
    logits = np.full((2, 4 * TILE), np.nan, np.float32)
    logits[:, :num_vocab_tokens] = 1.5
    x = np.asarray(pad_vocab(jnp.asarray(logits, jnp.bfloat16), num_vocab_tokens))
    assert x.dtype == np.float32
    assert x.shape[1] % TILE == 0
    assert x.shape[1] - num_vocab_tokens < TILE
    assert (x[:, :num_vocab_tokens] == 1.5).all()
    assert (x[:, num_vocab_tokens:] == -np.inf).all()
