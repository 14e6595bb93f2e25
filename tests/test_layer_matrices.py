"""Each layer's matrices as arrays of their own: the same memory, the same numbers, and no copy in the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams
from pagedjax.layer_matrices import LayerMatrices, separate

CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
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


def test_the_memory_is_the_same(decoder: Decoder) -> None:
    params = nnx.split(decoder)[1]
    apart = Decoder.engine_params(params)
    assert len(matrices_of(apart)) == 4  # of qkv, out, gate_up and down
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    for matrices in matrices_of(apart):
        assert len(matrices.matrices) == CONFIG.num_layers
        first = matrices.matrices[0].unsafe_buffer_pointer()
        assert first in addresses
        steps = [matrix.unsafe_buffer_pointer() - first for matrix in matrices.matrices]
        assert steps == [index * matrices.matrices[0].nbytes for index in range(CONFIG.num_layers)]


def test_the_logits_are_the_same(decoder: Decoder) -> None:
    graphdef, params = nnx.split(decoder)
    forward = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(TOKENS)))
    expected = np.asarray(forward(params))
    np.testing.assert_allclose(forward(Decoder.engine_params(params)), expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 0.1


def test_no_matrix_is_copied(decoder: Decoder) -> None:
    """The temporaries of a program are smaller than the largest matrix of a layer; with stacked ones they hold it."""
    graphdef, params = nnx.split(decoder)
    hidden = jnp.zeros((2, CONFIG.hidden_size))

    def temporaries(params: nnx.State) -> int:
        run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(jnp.asarray(TOKENS[:, :2])).sum() + x.sum())
        return run.lower(params, hidden).compile().memory_analysis().temp_size_in_bytes

    largest = 4 * CONFIG.hidden_size * 2 * CONFIG.intermediate_size
    assert temporaries(Decoder.engine_params(params)) < largest
    assert temporaries(params) >= largest


def test_matrices_that_begin_anywhere_stay_stacked() -> None:
    """They would be copied: 5 x 7 floats are no multiple of 64 bytes. And what is no kernel is read by other code."""
    odd = {"kernel": nnx.Param(jnp.ones((3, 5, 7))), "other": nnx.Param(jnp.ones((3, 16, 16)))}
    assert not matrices_of(separate(nnx.State(odd)))


def test_an_engine_holds_them_and_hands_out_the_stacked_ones(decoder: Decoder) -> None:
    params = nnx.split(decoder)[1]
    llm = LLM(Decoder.abstract(CONFIG), params, max_num_seqs=2, num_blocks=16, block_size=8, max_model_len=32)
    given, held = jax.tree.leaves(params), jax.tree.leaves(llm.params)
    assert all(one is other for one, other in zip(given, held, strict=True))
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
