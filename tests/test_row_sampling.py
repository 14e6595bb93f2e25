"""pagedjax.row_sampling: a request's parameters as one line of device arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.row_sampling import NO_LOGPROBS, NO_TOKEN, RowSampling, row_values
from pagedjax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams


def _leaves(rows: RowSampling) -> dict[str, np.ndarray]:
    return {path[0].name: np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(rows)}


def test_values() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.5, presence_penalty=-1.0, logprobs=3,
        frequency_penalty=0.25, min_tokens=4, logit_bias={7: 2.0, 9: -1e300},
    )  # fmt: skip
    row = _leaves(row_values(params, seed=2**40 + 3, sample_index=2, stop_ids=[2, 0]))
    expected = {
        "temperature": 0.5, "top_p": np.float32(0.9), "top_k": 40, "min_p": np.float32(0.1), "repetition_penalty": 1.5,
        "presence_penalty": -1.0, "frequency_penalty": 0.25, "sample_index": 2, "min_tokens": 4, "num_logprobs": 3,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    np.testing.assert_array_equal(row["seed"], [2**8, 3])
    np.testing.assert_array_equal(row["stop_ids"], [2, 0] + [NO_TOKEN] * (MAX_STOP_IDS - 2))
    np.testing.assert_array_equal(row["bias_ids"], [7, 9] + [NO_TOKEN] * (MAX_LOGIT_BIAS - 2))
    np.testing.assert_array_equal(row["bias_values"][:3], [2.0, np.finfo(np.float32).min, 0.0])


def test_large_values_fit() -> None:
    params = SamplingParams(
        temperature=1e300, top_k=2**70, repetition_penalty=1e-300, min_tokens=2**70, max_tokens=2**70
    )
    row = _leaves(row_values(params, seed=2**63 - 1, sample_index=0, stop_ids=range(MAX_STOP_IDS)))
    assert np.isfinite(row["temperature"])
    assert row["repetition_penalty"] > 0
    assert row["top_k"] == row["min_tokens"] == NO_TOKEN
    np.testing.assert_array_equal(row["seed"], [2**31 - 1, 2**32 - 1])
    assert row["num_logprobs"] == NO_LOGPROBS


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"33 stop ids .* at most 32"):
        row_values(SamplingParams(), seed=0, sample_index=0, stop_ids=range(MAX_STOP_IDS + 1))
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=f"seed is {seed}"):
            row_values(SamplingParams(), seed=seed, sample_index=0, stop_ids=())


def test_lines() -> None:
    neutral = RowSampling.zeros(4)
    one = row_values(SamplingParams(top_k=5, seed=1), seed=1, sample_index=0, stop_ids=[3])
    for name, leaf in _leaves(one).items():  # a row's shapes and dtypes are those of the batch
        batch = _leaves(neutral)[name]
        assert (batch.shape, batch.dtype) == ((4, *leaf.shape), leaf.dtype)
    rows = jax.tree.map(lambda batch, leaf: batch.at[2].set(leaf), neutral, one)
    picked = _leaves(rows.gather(jnp.array([2, 0, 2], jnp.int32)))
    np.testing.assert_array_equal(picked["top_k"], [5, 0, 5])
    np.testing.assert_array_equal(picked["temperature"], [1, 0, 1])
    kept = _leaves(jax.jit(RowSampling.keep)(rows, jnp.array([True, True, False, True])))
    for name, leaf in _leaves(neutral).items():
        np.testing.assert_array_equal(kept[name], leaf)
    np.testing.assert_array_equal(_leaves(rows.keep(jnp.ones(4, bool)))["stop_ids"][2], one.stop_ids)
