"""pagedjax.generate: the pure function gives what the engine gives, inside whatever it is traced by."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import mock_engine
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from mock_engine import generate as engine_generate
from mock_model import VOCAB, MockDecoder

from pagedjax import LLM, Decoder, Generated, ModelConfig, SamplingParams, generate

GRAPHDEF, PARAMS = nnx.split(MockDecoder())
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9], [2, 2, 2, 2]]
SEEDS = [3, 2**31 - 1, 0, 77]
RANDOM = SamplingParams(temperature=0.9, top_p=0.8, n=3, max_tokens=9, logprobs=0, repetition_penalty=1.3)


def padded(prompts: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    length = max(map(len, prompts))
    return jnp.array([p + [31] * (length - len(p)) for p in prompts]), jnp.array([len(p) for p in prompts])


def run(params: SamplingParams, **options: Any) -> Generated:
    tokens, lengths = padded(PROMPTS)
    asked = dataclasses.replace(params, max_tokens=16)
    options = {"max_new_tokens": params.max_tokens, "sampling_params": asked, "block_size": 2} | options

    @jax.jit
    def function(params: Any, tokens: jax.Array, lengths: jax.Array, seeds: jax.Array) -> Generated:
        return generate(GRAPHDEF, params, tokens, lengths, seeds, **options)

    return function(PARAMS, tokens, lengths, jnp.array(SEEDS))


def assert_engines(found: Generated, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> None:
    """Equal to the engine's, which has exact logits here as well."""
    asked = [dataclasses.replace(params, seed=seed) for seed in SEEDS]
    samples = [s for output in engine_generate(mock_engine.engine(), prompts, asked) for s in output.outputs]
    assert found.tokens.shape == (len(samples), params.max_tokens)
    for row, sample in enumerate(samples):
        length = int(found.lengths[row])
        assert found.tokens[row, :length].tolist() == sample.token_ids
        assert (np.asarray(found.tokens[row, length:]) == -1).all()
        assert bool(found.stopped[row]) == (sample.finish_reason == "stop")
        if found.logprobs is not None:
            own = [entry[token] for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
            np.testing.assert_allclose(found.logprobs[row, :length], own, atol=1e-5)
            assert not np.asarray(found.logprobs[row, length:]).any()


def test_greedy_tokens_are_the_engines() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    found = run(params)
    assert found.logprobs is None
    assert_engines(found, params)


@pytest.mark.parametrize("prefill_tokens", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (None, 1))])
def test_samples_are_the_engines_however_the_prompts_are_cut(prefill_tokens: int | None) -> None:
    assert_engines(run(RANDOM, prefill_tokens=prefill_tokens), RANDOM)


def test_rows_end_by_themselves() -> None:
    free = run(RANDOM)
    stop = int(free.tokens[4, 3])
    params = dataclasses.replace(RANDOM, stop_token_ids=[stop], min_tokens=2)
    found = run(params)
    assert bool(found.stopped[4])
    assert not bool(found.stopped.all())
    assert_engines(found, params)
    ends = run(RANDOM, end_ids=(stop,))
    assert 0 < int(ends.lengths.min()) < RANDOM.max_tokens
    ignored = run(dataclasses.replace(RANDOM, ignore_eos=True), end_ids=(stop,))
    np.testing.assert_array_equal(ignored.tokens, free.tokens)


@pytest.mark.slow
def test_an_empty_prompt_gets_nothing_and_disturbs_nobody() -> None:
    tokens, lengths = padded(PROMPTS)
    options: dict[str, Any] = {"max_new_tokens": 9, "sampling_params": dataclasses.replace(RANDOM, max_tokens=16)}
    found = generate(GRAPHDEF, PARAMS, tokens, lengths.at[1].set(0), jnp.array(SEEDS), block_size=2, **options)
    whole = run(RANDOM)
    assert not np.asarray(found.lengths[3:6]).any()
    others = np.r_[0:3, 6:12]
    np.testing.assert_array_equal(found.tokens[others], whole.tokens[others])


@pytest.mark.slow
def test_large_seeds_have_two_words() -> None:
    big = 2**40 + 5
    tokens, lengths = padded(PROMPTS[:1])
    seeds = jnp.array([[big >> 32, big & 0xFFFFFFFF]], jnp.uint32)
    asked = dataclasses.replace(RANDOM, max_tokens=16)
    found = generate(GRAPHDEF, PARAMS, tokens, lengths, seeds, max_new_tokens=9, sampling_params=asked)
    (output,) = engine_generate(mock_engine.engine(), PROMPTS[:1], dataclasses.replace(RANDOM, seed=big))
    for row, sample in enumerate(output.outputs):
        assert found.tokens[row].tolist() == sample.token_ids


def test_inside_scan_and_shard_map() -> None:
    expected = run(RANDOM)
    tokens, lengths = padded(PROMPTS)
    asked = dataclasses.replace(RANDOM, max_tokens=16)

    def some(tokens: jax.Array, lengths: jax.Array, seeds: jax.Array) -> Generated:
        return generate(GRAPHDEF, PARAMS, tokens, lengths, seeds, max_new_tokens=9, sampling_params=asked, block_size=2)

    def body(_: None, xs: Any) -> tuple[None, Generated]:
        return None, some(*(x[None] for x in xs))

    _, scanned = jax.jit(lambda *xs: jax.lax.scan(body, None, xs))(tokens, lengths, jnp.array(SEEDS))
    np.testing.assert_array_equal(scanned.tokens.reshape(12, 9), expected.tokens)

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(some, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(sharded)(tokens, lengths, jnp.array(SEEDS)).tokens, expected.tokens)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": jnp.array([1, 2])}, r"tokens \[4, 11\], lengths \[2\]"),
        ({"seeds": jnp.zeros(4)}, "seeds are float32"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prefill_tokens": 0}, "prefill_tokens=0"),
        ({"sampling_params": SamplingParams(stop=["x"], seed=3)}, r"\['stop', 'seed'\]"),
        ({"sampling_params": SamplingParams(logprobs=3)}, r"\['logprobs'\]"),
        ({"tokens": jnp.zeros((4, 0), jnp.int32)}, "nothing to complete"),
    ],
)
def test_what_cannot_be_done_is_said(changed: dict[str, Any], message: str) -> None:
    tokens, lengths = padded(PROMPTS)
    arguments: dict[str, Any] = {"tokens": tokens, "lengths": lengths, "seeds": jnp.array(SEEDS), "max_new_tokens": 3}
    with pytest.raises(ValueError, match=message):
        generate(GRAPHDEF, PARAMS, **arguments | changed)


@pytest.mark.slow
def test_ids_above_the_vocabulary_are_never_drawn() -> None:
    found = run(dataclasses.replace(RANDOM, top_p=1.0, temperature=9.0), num_vocab_tokens=7)
    assert 0 <= int(found.tokens.min()) <= int(found.tokens.max()) < 7 < VOCAB


def test_a_row_ends_where_the_models_positions_do() -> None:
    config = ModelConfig("llama", VOCAB, 16, 16, 1, 2, 1, 16, max_position_embeddings=12)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    tokens, lengths = padded(PROMPTS)

    def run(tokens: jax.Array, lengths: jax.Array) -> Generated:
        return generate(graphdef, params, tokens, lengths, jnp.array(SEEDS), max_new_tokens=10)

    found = jax.jit(run)(tokens, lengths)
    assert found.lengths.tolist() == [9, 10, 1, 8]
    assert not found.stopped.any()
    llm = LLM(nnx.merge(graphdef, params), block_size=4, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=8)
    asked = [SamplingParams(max_tokens=10, seed=seed) for seed in SEEDS]
    for row, output in enumerate(llm.generate(PROMPTS, asked, use_tqdm=False)):
        assert output.outputs[0].token_ids == found.tokens[row, : found.lengths[row]].tolist()
    with pytest.raises(ValueError, match="13 tokens wide, and the model has 12 positions"):
        run(jnp.zeros((4, 13), jnp.int32), lengths)
