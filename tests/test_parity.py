"""pagedjax.check_parity: zero where engine and trainer agree, and what a difference looks like."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import jax
import numpy as np
import numpy_decoder
import own_gpt
import pytest
from flax import nnx

import pallas_kernels._xla.decode
from pagedjax import LLM, Decoder, ModelConfig, Rollout, SamplingParams, check_parity
from pagedjax.parity import NUM_DRAWN

CONFIG = ModelConfig("llama", 96, 32, 64, 2, 4, 2, 16, 64)
GRAPHDEF, PARAMS = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
OTHER = jax.tree.map(lambda leaf: leaf * 1.05, PARAMS)
TEXTS = [np.random.default_rng(seed).integers(0, 96, length).tolist() for seed, length in enumerate((40, 2, 17))]
NUM_KNOWN = sum(len(text) - 1 for text in TEXTS)
SIZES: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(nnx.merge(GRAPHDEF, PARAMS), num_blocks=40, **SIZES)


@jax.jit
def dense(params: Any, tokens: jax.Array) -> jax.Array:
    """f32[64, V] logprobs after each of the tokens i32[64]."""
    return jax.nn.log_softmax(nnx.merge(GRAPHDEF, params)(tokens[None])[0])


def padded(tokens: list[int]) -> np.ndarray:
    return np.array(tokens + [0] * (64 - len(tokens)), np.int32)


def logprobs(params: Any, text: list[int]) -> np.ndarray:
    """f32[T - 1] of each token but the first, by the dense forward."""
    return np.asarray(dense(params, padded(text)))[np.arange(len(text) - 1), text[1:]]


def heads() -> list[tuple[list[int], int]]:
    """What the engine goes on from, and for how many tokens."""
    nums = [min(NUM_DRAWN, len(text) - 1) for text in TEXTS]
    return [(text[:-num], num) for text, num in zip(TEXTS, nums, strict=True)]


def test_the_same_weights_agree_in_chunks_and_from_the_cache(llm: LLM) -> None:
    for _ in range(2):
        before, steps = llm._engine.scheduler.num_cached_tokens, llm.stats().num_steps
        parity = check_parity(llm, PARAMS, TEXTS)
        assert parity.num_tokens == NUM_KNOWN + sum(num for _, num in heads())
        assert parity.max_difference < 1e-5
        assert parity.ratios[50] == pytest.approx(1, abs=1e-5)
        assert llm._engine.scheduler.num_cached_tokens >= before + 20, "of the 24 tokens of the first text's head"
        assert llm.stats().num_steps > steps + 2, "56 known tokens with 24 a step"
    assert f"{parity.num_tokens} tokens" in str(parity)


def test_other_weights_show_and_by_how_much(llm: LLM) -> None:
    expected = [logprobs(PARAMS, text) - logprobs(OTHER, text) for text in TEXTS]
    for head, num in heads():
        sequence = list(head)
        for _ in range(num):
            sequence.append(int(np.argmax(dense(PARAMS, padded(sequence))[len(sequence) - 1])))
        expected.append((logprobs(PARAMS, sequence) - logprobs(OTHER, sequence))[-num:])
    each = np.concatenate(expected)
    parity = check_parity(llm, OTHER, TEXTS)
    np.testing.assert_allclose(parity.differences, each, atol=1e-5)
    assert parity.max_difference == pytest.approx(np.abs(each).max(), abs=1e-5)
    assert parity.mean_difference == pytest.approx(np.abs(each).mean(), abs=1e-5)
    assert parity.ratios[100] == pytest.approx(np.exp(-each).max(), rel=1e-4)


def test_a_rollout_is_compared_as_it_was_drawn(llm: LLM) -> None:
    """With samples that fork, hits in the prefix cache, and sequences that give way."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 96, 30).tolist()
    prompts = [shared + rng.integers(0, 96, length).tolist() for length in (1, 3, 5)]
    before = llm.stats().num_preemptions
    rollout = llm.rollout(prompts, SamplingParams(n=2, temperature=0.9, seed=1, max_tokens=29), use_tqdm=False)
    assert llm.stats().num_preemptions > before
    assert any(output.num_cached_tokens > 0 for output in rollout.outputs)
    for given in (rollout, rollout.outputs):
        parity = check_parity(llm, PARAMS, given)
        assert parity.num_tokens == rollout.arrays().mask.sum() == 6 * 29
        assert parity.max_difference < 1e-5
    assert check_parity(llm, OTHER, rollout).max_difference > 1e-3

    wrong = copy.deepcopy(rollout)
    sample = wrong.outputs[1].outputs[1]
    assert sample.logprobs is not None
    sample.logprobs[7][sample.token_ids[7]] += 0.125
    assert check_parity(llm, PARAMS, wrong).differences[3 * 29 + 7] == pytest.approx(0.125, abs=1e-5)


def test_a_broken_decode_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is drawn: the known tokens come in a chunk, all 16 at once."""
    attend = pallas_kernels._xla.decode.attend
    monkeypatch.setattr(
        pallas_kernels._xla.decode,
        "attend",
        lambda problem, out, lse: attend(problem._replace(scale=problem.scale * 2), out, lse),
    )
    # A pool of a size of its own: what was traced for others is not taken, nor this for them.
    llm = LLM(nnx.merge(GRAPHDEF, PARAMS), num_blocks=41, attention="xla", **SIZES)
    parity = check_parity(llm, PARAMS, TEXTS[2:])
    assert np.abs(parity.differences[:16]).max() < 1e-5
    assert np.abs(parity.differences[16:]).max() > 1e-3


def test_a_stale_cache_shows(llm: LLM) -> None:
    """Weights that change behind the engine's back, so that blocks of the old ones are found."""
    llm.generate(TEXTS, use_tqdm=False)
    llm._engine.runner.params = OTHER
    parity = check_parity(llm, OTHER, TEXTS)
    llm.update_params(PARAMS)
    assert np.abs(parity.differences[:NUM_KNOWN]).max() < 1e-5
    assert np.abs(parity.differences[NUM_KNOWN:]).max() > 1e-3
    assert check_parity(llm, PARAMS, TEXTS).max_difference < 1e-5


def test_a_text_as_long_as_the_model_allows_and_learned_positions() -> None:
    """40 of them, which is no power of two; the model has dropout, and the trainer hands over its parameters alone."""
    model = own_gpt.OwnGPT(nnx.Rngs(0))
    model.eval()
    llm = LLM(model, num_blocks=30, batch_invariant=True, **SIZES | {"max_model_len": own_gpt.MAX_LEN})
    text = np.random.default_rng(0).integers(0, 256, own_gpt.MAX_LEN).tolist()
    other = jax.tree.map(lambda leaf: leaf * 1.05, nnx.state(model, nnx.Param))
    for params in (nnx.state(model), other):
        llm.update_params(params)
        assert check_parity(llm, params, [text]).max_difference < 1e-4
    assert check_parity(llm, model, [text]).max_difference > 1e-3


def test_what_can_be_compared(llm: LLM) -> None:
    with pytest.raises(ValueError, match="a text has 1 token"):
        check_parity(llm, PARAMS, [[3]])
    assert check_parity(llm, PARAMS, []).max_difference == 0.0
    assert check_parity(llm, PARAMS, Rollout([])).num_tokens == 0
    assert check_parity(llm, PARAMS, TEXTS[1]).num_tokens == 2, "a list of token ids is one text"
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        check_parity(llm, PARAMS, "hello")
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ValueError, match="an output has no log-probabilities"):
        check_parity(llm, PARAMS, outputs)


@pytest.mark.slow
def test_two_thousand_tokens_of_a_real_model(smollm2_path: pathlib.Path) -> None:
    """Drawn ones and known ones, with hits in the prefix cache, prompts in chunks and sequences that give way.

    Of the known ones some are so unlikely after sums so large that the dense float32 forward is itself 1.6e-4 from
    float64, with these texts; the engine is held to float64 there.
    """
    llm = LLM.load(
        smollm2_path, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=30, max_model_len=256, watermark=0.0
    )
    assert llm.tokenizer is not None
    text = llm.tokenizer.encode((pathlib.Path(__file__).parent.parent / "LICENSE").read_text())
    prompts = [text[:64] + text[64 + 20 * index :][:20] for index in range(24)]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=88, ignore_eos=True) for seed in range(24)]
    rollout = llm.rollout(prompts, params, use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in rollout.outputs[4:])
    assert llm.stats().num_preemptions > 0
    parity = check_parity(llm, llm.params, rollout)
    assert parity.num_tokens == 24 * 88 > 2000
    assert parity.max_difference < 1e-4, parity

    before = llm.stats().num_preemptions
    for index in range(3):  # requests that came earlier, and grow: those of the comparison give way to them
        llm.add_request(str(index), text[200 + 50 * index :][:40], SamplingParams(max_tokens=120, ignore_eos=True))
    texts = [text[172 * index :][:172] for index in range(12)]
    scores = dict(llm.score_many([known[:1] for known in texts], [[known[1:]] for known in texts]))
    assert llm.stats().num_preemptions > before
    weights = jax.tree.map(np.asarray, nnx.to_pure_dict(llm.params))
    for index, known in enumerate(texts):
        rows = numpy_decoder.logits(llm.model_config, weights, np.array(known))[:-1, : llm.num_vocab_tokens]
        rows -= rows.max(-1, keepdims=True)
        expected = rows[np.arange(len(rows)), known[1:]] - np.log(np.exp(rows).sum(-1))
        np.testing.assert_allclose(scores[index][0].token_logprobs, expected, atol=1e-4, rtol=0)
