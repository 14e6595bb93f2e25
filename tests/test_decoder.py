"""The decoder against transformers: dense and paged forward, every family and rope kind, in float32."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import block_table
from pagedjax.batch import make_batch
from pagedjax.decoder import Decoder
from pagedjax.loaders import hf
from pallas_kernels import KVPages

TINY = pathlib.Path(__file__).parent / "data" / "tiny"
MODELS = sorted(path.parent.name for path in TINY.glob("*/config.json"))
BLOCK_SIZE = 4


def load(name: str) -> tuple[Decoder, np.ndarray, np.ndarray]:
    config, params = hf.load(TINY / name)
    model = Decoder.abstract(config)
    nnx.update(model, nnx.State(jax.tree.map(jnp.asarray, params)))
    reference = np.load(TINY / name / "reference.npz")
    return model, reference["tokens"], reference["logits"]


@pytest.mark.parametrize("name", MODELS)
def test_dense_logits_are_those_of_transformers(name: str) -> None:
    model, tokens, expected = load(name)
    logits = nnx.jit(model)(jnp.asarray(tokens[None], jnp.int32))
    np.testing.assert_allclose(logits[0], expected, atol=1e-4, rtol=0.0)


def test_dense_forward_ignores_padding_on_the_right() -> None:
    model, tokens, expected = load("llama_llama3")
    padded = np.zeros((2, len(tokens)), np.int32)
    padded[0], padded[1, :10] = tokens, tokens[:10]
    logits = nnx.jit(model)(jnp.asarray(padded))
    np.testing.assert_allclose(logits[0], expected, atol=1e-4, rtol=0.0)
    np.testing.assert_allclose(logits[1, :10], expected[:10], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_paged_logits_are_those_of_transformers(name: str) -> None:
    """Two rows at different paces: one in chunks of 7, the other in 7 tokens and then one at a time."""
    model, tokens, expected = load(name)
    graphdef, params = nnx.split(model)
    config = model.config
    places = 16

    @jax.jit
    def forward(params: Any, table: Any, kv_pages: Any, ids: jax.Array, counts: jax.Array) -> Any:
        model = nnx.merge(graphdef, params)
        table, _, ok = block_table.append(table, counts)
        hidden, kv_pages = model.paged(ids, kv_pages, make_batch(table, counts, places))
        return table, kv_pages, model.logits(hidden), ok

    table = block_table.create(40, BLOCK_SIZE, 3, 16)
    kv_pages = KVPages.zeros(config.num_layers, 40, BLOCK_SIZE, config.num_kv_heads, config.head_dim, jnp.float32)
    kv_pages = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv_pages)  # stale slots must not matter
    done = [0, 0]
    while min(done) < min(len(tokens), 20):
        counts = [min(7, len(tokens) - done[0]), 7 if done[1] == 0 else 1]
        ids = np.zeros(places, np.int32)
        ids[: sum(counts)] = np.concatenate([tokens[d : d + c] for d, c in zip(done, counts, strict=True)])
        table, kv_pages, logits, ok = forward(params, table, kv_pages, ids, np.array([*counts, 0], np.int32))
        assert ok
        want = np.concatenate([expected[d : d + c] for d, c in zip(done, counts, strict=True)])
        np.testing.assert_allclose(logits[: sum(counts)], want, atol=1e-4, rtol=0.0)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    assert done[0] == len(tokens)


def test_a_bfloat16_model_stays_close_to_float32() -> None:
    model, tokens, expected = load("qwen3_window")
    graphdef, params = nnx.split(model)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    logits = nnx.jit(nnx.merge(graphdef, half))(jnp.asarray(tokens[None], jnp.int32))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], expected, atol=0.05 * np.abs(expected).max())


def test_gradients_reach_every_parameter() -> None:
    model, tokens, _ = load("qwen2")

    def loss(model: Decoder) -> jax.Array:
        logits = model(jnp.asarray(tokens[None], jnp.int32))
        return -jnp.mean(jax.nn.log_softmax(logits)[0, jnp.arange(len(tokens) - 1), tokens[1:]])

    grads = nnx.jit(nnx.grad(loss))(model)
    for path, grad in nnx.to_flat_state(nnx.state(grads)):
        assert np.any(np.asarray(grad.get_value()) != 0), path
