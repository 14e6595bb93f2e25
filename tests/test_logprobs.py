"""pagedjax.logprobs: raw log-probabilities against float64 NumPy, and what a batch gets that asks for less."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.logprobs import TokenLogprobs, token_logprobs
from pagedjax.row_sampling import NO_LOGPROBS, NO_TOKEN
from pagedjax.sampling_params import MAX_LOGPROBS

NUM_ROWS, VOCAB, WIDTH = 5, 300, 400
LOGITS = np.random.default_rng(0).normal(size=(NUM_ROWS, WIDTH)).astype(np.float32) * 4
LOGITS[:, VOCAB:] = np.nan
LOGITS[1, :VOCAB] = np.round(LOGITS[1, :VOCAB])  # ties
TOKENS = np.array([3, 299, int(np.argmax(LOGITS[2, :VOCAB])), 0, int(np.argmin(LOGITS[4, :VOCAB]))], np.int32)
LOGPROBS = jax.jit(token_logprobs, static_argnames=("num_vocab_tokens", "k"))


def _logprobs(logits: np.ndarray, wanted: list[int], vocab: int = VOCAB) -> TokenLogprobs:
    return jax.tree.map(
        np.asarray,
        LOGPROBS(jnp.asarray(logits), jnp.asarray(TOKENS), jnp.array(wanted, jnp.int32), num_vocab_tokens=vocab),
    )


def _expected(logits: np.ndarray) -> np.ndarray:
    x = logits[:, :VOCAB].astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def test_token_and_alternatives() -> None:
    found = _logprobs(LOGITS, [5, NO_LOGPROBS, 0, 20, 1])
    expected = _expected(LOGITS)
    order = np.argsort(-LOGITS[:, :VOCAB], axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_allclose(found.token, expected[np.arange(NUM_ROWS), TOKENS], rtol=1e-6, atol=2e-6)
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, -1), rtol=1e-6, atol=2e-6)
    assert np.isfinite(found.top).all()
    assert all(len(set(row)) == MAX_LOGPROBS for row in found.top_ids.tolist())
    assert found.token[2] == found.top[2, 0]  # inside the alternatives it is the same number


def test_only_what_is_asked_for() -> None:
    token_only = _logprobs(LOGITS, [0, NO_LOGPROBS, 0, 0, NO_LOGPROBS])
    np.testing.assert_array_equal(token_only.token, _logprobs(LOGITS, [5] * NUM_ROWS).token)
    nothing = _logprobs(LOGITS, [NO_LOGPROBS] * NUM_ROWS)
    assert (nothing.token == 0).all()
    for found in (token_only, nothing):
        assert (found.top_ids == NO_TOKEN).all()
        assert (found.top == 0).all()


def test_a_small_vocabulary_and_extreme_logits() -> None:
    logits = np.zeros((NUM_ROWS, 7), np.float32)
    logits[:, 1] = [0, 1e30, np.inf, 500, np.nan]
    tokens = np.zeros(NUM_ROWS, np.int32)
    found = jax.tree.map(np.asarray, LOGPROBS(logits, tokens, np.full(NUM_ROWS, 20, np.int32), num_vocab_tokens=5))
    assert (found.top_ids[:, 5:] == NO_TOKEN).all()
    np.testing.assert_array_equal(np.sort(found.top_ids[:4, :5], axis=-1), np.tile(np.arange(5), (4, 1)))
    np.testing.assert_array_equal(found.top_ids[4, :5], [0, 2, 3, 4, NO_TOKEN])  # NaN: without any probability
    np.testing.assert_allclose(found.token, [-np.log(5), -1e30, -np.finfo(np.float32).max, -500, -np.log(4)], rtol=1e-6)


def test_bfloat16_and_eager() -> None:
    rounded = jnp.asarray(LOGITS).astype(jnp.bfloat16)
    wanted = jnp.full(NUM_ROWS, 3, jnp.int32)
    low = LOGPROBS(rounded, TOKENS, wanted, num_vocab_tokens=VOCAB)
    same = LOGPROBS(rounded.astype(jnp.float32), TOKENS, wanted, num_vocab_tokens=VOCAB)
    eager = token_logprobs(rounded, jnp.asarray(TOKENS), wanted, num_vocab_tokens=VOCAB)
    for other in (same, eager):
        np.testing.assert_array_equal(low.top_ids, other.top_ids)
        np.testing.assert_allclose(low.token, other.token, rtol=1e-6)
    assert low.token.dtype == low.top.dtype == jnp.float32


def test_no_infinity_comes_back() -> None:
    logits = np.zeros((NUM_ROWS, 7), np.float32)
    logits[:, 1] = [-np.inf, np.nan, -np.inf, -np.inf, -np.inf]
    logits[4] = np.nan
    tokens, wanted = np.ones(NUM_ROWS, np.int32), np.full(NUM_ROWS, 20, np.int32)
    found = jax.tree.map(np.asarray, LOGPROBS(logits, tokens, wanted, num_vocab_tokens=5))
    assert np.isfinite(found.top).all()
    assert np.isfinite(found.token).all()
    assert (found.top_ids[:4, :5] == [0, 2, 3, 4, NO_TOKEN]).all()
