"""Layers' matrices that are read out of their stack: the same arrays and numbers, and no copy in the program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams, block_table
from pagedjax.batch import make_batch
from pagedjax.layer_matrices import LayerMatrices, ScannedLayers, whole
from pallas_kernels import KVPages

CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    qkv_bias=True,
)
TOKENS = np.arange(10, dtype=np.int32)[None] * 7 % 96


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    bias = model.layers.attention.qkv.bias  # starts as zeros
    bias.set_value(jax.random.normal(jax.random.key(1), bias[...].shape))
    return model


def matrices_of(params: nnx.State) -> list[LayerMatrices]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, LayerMatrices))
    return [leaf for leaf in leaves if isinstance(leaf, LayerMatrices)]


def test_the_arrays_are_the_same(decoder: Decoder) -> None:
    params = nnx.split(decoder)[1]
    marked = Decoder.engine_params(params)
    assert len(matrices_of(marked)) == 4  # of qkv, out, gate_up and down
    given, held = jax.tree.leaves(params), jax.tree.leaves(marked)
    assert len(given) == len(held)
    assert {id(leaf) for leaf in given} == {id(leaf) for leaf in held}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_are_the_same(decoder: Decoder, dtype: str) -> None:
    graphdef, params = nnx.split(decoder)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    forward = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(TOKENS)))
    expected = np.asarray(forward(params))
    tolerance = {"float32": 1e-5, "bfloat16": 5e-2}[dtype]
    np.testing.assert_allclose(forward(Decoder.engine_params(params)), expected, rtol=0, atol=tolerance)
    assert np.ptp(expected) > 0.1


def test_tokens_of_a_step_that_are_padding_change_nothing(decoder: Decoder) -> None:
    """Products leave out the rows beyond the batch's tokens; the hidden states of the tokens stay what they are."""
    graphdef, params = nnx.split(decoder)
    marked = Decoder.engine_params(params)

    @jax.jit
    def hidden_states(params: nnx.State, tokens: jax.Array, counts: jax.Array) -> jax.Array:
        table, _, _ = block_table.append(block_table.create(8, 4, 2, 4), counts)
        batch = make_batch(table, counts, tokens.shape[0])
        pool = KVPages.zeros(3, 8, 4, 2, 16, jnp.float32)
        return nnx.merge(graphdef, params).paged(tokens, pool, batch, implementation="xla")[0]

    counts = jnp.asarray([4, 1])
    expected = hidden_states(params, jnp.asarray(TOKENS[0, :5]), counts)
    alone = hidden_states(marked, jnp.asarray(TOKENS[0, :5]), counts)
    padded = hidden_states(marked, jnp.asarray(TOKENS[0]), counts)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(padded[:5], expected, rtol=0, atol=1e-5)
    assert np.isfinite(padded).all()


def test_no_matrix_is_copied() -> None:
    """The temporaries of a step are smaller than the largest matrix of a layer; without marks they hold it."""
    config = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=512)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))

    def temporaries(params: nnx.State) -> int:
        run = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(TOKENS[:, :2])))
        return run.lower(params).compile().memory_analysis().temp_size_in_bytes

    largest = 4 * config.hidden_size * 2 * config.intermediate_size
    assert temporaries(Decoder.engine_params(params)) < largest / 4
    assert temporaries(params) >= largest


def test_only_kernels_are_marked_and_the_scan_gives_back_every_leaf() -> None:
    state = nnx.State({"kernel": nnx.Param(jnp.ones((3, 5, 7))), "scale": nnx.Param(jnp.arange(3.0)[:, None])})
    (marked,) = matrices_of(whole(state))
    assert marked.stack is state["kernel"].get_value()
    scanned = ScannedLayers(whole(state), jnp.int32(2))
    (slices,) = scanned.scanned
    np.testing.assert_array_equal(slices, state["scale"].get_value())
    layer = scanned.layer(jnp.int32(1), [slices[1]])
    matrix = layer["kernel"].get_value()
    assert matrix.stack is marked.stack
    assert (int(matrix.layer), int(matrix.num_rows)) == (1, 2)
    np.testing.assert_array_equal(layer["scale"].get_value(), [1])


def test_a_state_without_marks_is_scanned_over_whole(decoder: Decoder) -> None:
    layers = nnx.split(decoder)[1]["layers"]
    scanned = ScannedLayers(layers, None)
    leaves = jax.tree.leaves(layers)
    assert [id(leaf) for leaf in scanned.scanned] == [id(leaf) for leaf in leaves]
    again = jax.tree.leaves(scanned.layer(jnp.int32(2), [leaf[2] for leaf in leaves]))
    for got, leaf in zip(again, leaves, strict=True):
        np.testing.assert_array_equal(got, leaf[2])


def test_an_engine_hands_out_the_params_it_was_given(decoder: Decoder) -> None:
    params = nnx.split(decoder)[1]
    llm = LLM(Decoder.abstract(CONFIG), params, max_num_seqs=2, num_blocks=16, block_size=8, max_model_len=32)
    given, held = jax.tree.leaves(params), jax.tree.leaves(llm.params)
    assert all(one is other for one, other in zip(given, held, strict=True))
    assert not matrices_of(llm.params)
    assert matrices_of(llm._runner._program_params)


def test_a_train_step_may_donate_what_an_engine_holds(decoder: Decoder) -> None:
    """The engine says that they are gone, and takes the new ones."""
    graphdef, params = nnx.split(decoder)
    params = jax.tree.map(jnp.copy, params)
    llm = LLM(Decoder.abstract(CONFIG), params, max_num_seqs=2, num_blocks=16, block_size=8, max_model_len=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
    train = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * -1, params), donate_argnums=0)
    trained = train(params)
    with pytest.raises(ValueError, match="donated or deleted"):
        llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
    llm.update_params(trained)
    (last,) = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
    tokens = [1, 2, 3]
    for _ in range(6):
        logits = nnx.merge(graphdef, trained)(jnp.asarray([tokens], jnp.int32))
        tokens.append(int(jnp.argmax(logits[0, -1])))
    assert last.outputs[0].token_ids == tokens[3:]
