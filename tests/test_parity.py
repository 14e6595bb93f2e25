"""pagedjax.check_parity: zero where engine and trainer agree, and what a difference looks like."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, check_parity

CONFIG = ModelConfig("llama", 96, 32, 64, 2, 4, 2, 16, 64)
GRAPHDEF, PARAMS = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
TEXTS = [np.random.default_rng(seed).integers(0, 96, length).tolist() for seed, length in enumerate((40, 2, 17))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    sizes = {"max_model_len": 64, "block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    return LLM(nnx.merge(GRAPHDEF, PARAMS), **sizes)


def test_the_same_weights_agree_also_in_chunks_and_with_a_warm_cache(llm: LLM) -> None:
    for _ in range(2):
        parity = check_parity(llm, PARAMS, TEXTS)
        assert parity.num_tokens == sum(len(text) - 1 for text in TEXTS)
        assert parity.max_difference < 1e-5
        assert parity.ratios[50] == pytest.approx(1, abs=1e-5)
        llm.generate(TEXTS, use_tqdm=False)
    assert f"{parity.num_tokens} tokens" in str(parity)


def test_other_weights_show_and_by_how_much(llm: LLM) -> None:
    other = jax.tree.map(lambda leaf: leaf * 1.05, PARAMS)

    def logprobs(params: Any, text: list[int]) -> np.ndarray:
        logits = nnx.merge(GRAPHDEF, params)(jnp.array([text]))[0, :-1]
        return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(text) - 1), text[1:]]

    expected = np.concatenate([logprobs(PARAMS, text) - logprobs(other, text) for text in TEXTS])
    parity = check_parity(llm, other, TEXTS)
    np.testing.assert_allclose(parity.differences, expected, atol=1e-5)
    assert parity.max_difference == pytest.approx(np.abs(expected).max(), abs=1e-5)
    assert parity.mean_difference == pytest.approx(np.abs(expected).mean(), abs=1e-5)
    assert parity.ratios[100] == pytest.approx(np.exp(-expected).max(), rel=1e-4)


def test_a_text_of_one_token_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="a text has 1 token"):
        check_parity(llm, PARAMS, [[3]])
    assert check_parity(llm, PARAMS, []).max_difference == 0.0
