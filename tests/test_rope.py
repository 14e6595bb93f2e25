"""pagedjax.rope against transformers' numbers (a reference file), and against complex arithmetic in float64."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import pytest

from pagedjax import hf_config, rope
from pagedjax.config import RopeConfig

REFERENCES = json.loads((pathlib.Path(__file__).parent / "data" / "tiny" / "rope.json").read_text())
ROTATE = jax.jit(rope.rotate)  # eager operations compile one by one
SIZES = {"model_type": "llama", "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference["name"])
def test_frequencies_are_those_of_transformers(reference: dict[str, Any]) -> None:
    config = hf_config.model_config({**SIZES, **reference["config"]})
    inv_freq, scaling = rope.frequencies(config.rope, config.head_dim, reference["seq_len"])
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, reference["inv_freq"], rtol=3e-6)
    assert scaling == pytest.approx(reference["scaling"], rel=1e-6)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference["name"])
def test_frequencies_are_those_of_the_definitions(reference: dict[str, Any]) -> None:
    config = hf_config.model_config({**SIZES, **reference["config"]})
    inv_freq, scaling = rope.frequencies(config.rope, config.head_dim, reference["seq_len"])
    expected, expected_scaling = numpy_decoder.rope_frequencies(config.rope, config.head_dim, reference["seq_len"])
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-7)  # float64 up to the last rounding
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


def test_llama3_keeps_blends_and_divides() -> None:
    base, _ = rope.frequencies(RopeConfig(theta=5e5), 64)
    config = RopeConfig(5e5, "llama3", factor=32.0, original_max_position=8192)
    inv_freq, scaling = rope.frequencies(config, 64)
    np.testing.assert_array_equal(inv_freq[:15], base[:15])
    assert np.all((inv_freq[15:18] < base[15:18]) & (inv_freq[15:18] > base[15:18] / 32))
    np.testing.assert_allclose(inv_freq[18:], base[18:] / 32, rtol=1e-7)
    assert scaling == 1.0


def test_dynamic_is_fixed_and_default_up_to_the_original_length() -> None:
    config = RopeConfig(kind="dynamic", factor=4.0, original_max_position=512)
    base, _ = rope.frequencies(RopeConfig(), 32)
    for length in (None, 1, 511, 512):
        np.testing.assert_array_equal(rope.frequencies(config, 32, length)[0], base)
    longer, _ = rope.frequencies(config, 32, 1024)
    assert longer[0] == base[0]
    assert np.all(longer[1:] < base[1:])


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_only_dynamic_reads_the_length(kind: Any) -> None:
    config = RopeConfig(kind=kind, factor=4.0, original_max_position=64)
    np.testing.assert_array_equal(rope.frequencies(config, 32, 9999)[0], rope.frequencies(config, 32)[0])


def _inputs(dtype: Any = np.float32) -> tuple[jax.Array, jax.Array]:
    x = np.random.default_rng(0).normal(size=(6, 3, 16))
    return jnp.asarray(x, dtype), jnp.asarray([0, 1, 7, 7, 300, 4095], jnp.int32)


def _expected(x: jax.Array, positions: jax.Array, inv_freq: np.ndarray, scaling: float) -> np.ndarray:
    values = np.asarray(x).astype(np.float64)
    pairs = values[..., :8] + 1j * values[..., 8:]
    phases = np.asarray(positions, np.float64)[:, None] * inv_freq.astype(np.float64)
    turned = pairs * (scaling * np.exp(1j * phases))[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotate_turns_half_split_pairs(dtype: Any) -> None:
    x, positions = _inputs(dtype)
    inv_freq, scaling = rope.frequencies(RopeConfig(kind="yarn", factor=4.0, original_max_position=64), 16)
    assert scaling > 1.0
    with jax.numpy_dtype_promotion("strict"):
        rotated = ROTATE(x, positions, inv_freq, scaling)
    assert rotated.dtype == dtype
    # float32: the phase of position 4095 is rounded to 2**-13 radians; bfloat16: only the result is rounded.
    tolerance = {"atol": 1e-3} if dtype == jnp.float32 else {"atol": 1e-3, "rtol": 2**-8}
    np.testing.assert_allclose(
        np.asarray(rotated, np.float64), _expected(x, positions, inv_freq, scaling), **{"rtol": 0.0, **tolerance}
    )
    small = slice(0, 4)
    if dtype == jnp.float32:
        np.testing.assert_allclose(
            rotated[small], _expected(x, positions, inv_freq, scaling)[small], atol=3e-6, rtol=0.0
        )


def test_jit_equals_eager_and_rows_are_independent() -> None:
    x, positions = _inputs()
    inv_freq, _ = rope.frequencies(RopeConfig(), 16)
    rotated = np.asarray(ROTATE(x, positions, inv_freq))
    np.testing.assert_allclose(rotated, rope.rotate(x, positions, inv_freq), atol=1e-6, rtol=0.0)
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = ROTATE(np.asarray(x)[order], np.asarray(positions)[order], inv_freq)
    np.testing.assert_array_equal(permuted, rotated[order])
    batched = ROTATE(np.asarray(x).reshape(2, 3, 3, 16), np.asarray(positions).reshape(2, 3), inv_freq)
    np.testing.assert_allclose(np.asarray(batched).reshape(6, 3, 16), rotated, atol=1e-6, rtol=0.0)
    np.testing.assert_array_equal(rotated[0], x[0])  # position 0 is not rotated


def test_scores_depend_on_the_distance_only() -> None:
    x, _ = _inputs()
    inv_freq, _ = rope.frequencies(RopeConfig(), 16)
    same = np.repeat(np.asarray(x)[:2], 3, axis=0)  # rows 0-2 are the query, 3-5 the key
    q, k = np.split(np.asarray(ROTATE(same, np.array([9, 105, 10, 4, 100, 4], np.int32), inv_freq)), 2)
    scores = (q * k).sum(axis=(1, 2))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert abs(scores[0] - scores[2]) > 1e-2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "longrope"}, "longrope.*default, linear, dynamic, yarn, llama3"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_position.*None"),
        ({"kind": "llama3", "factor": 2.0, "original_max_position": 0}, "original_max_position.*0"),
        ({"kind": "dynamic", "factor": 2.0}, "original_max_position"),
        ({"kind": "llama3", "original_max_position": 8, "low_freq_factor": 4.0}, "low_freq_factor.*4.0.*4.0"),
        ({"kind": "linear", "factor": 0.0}, "factor.*0.0"),
        ({"theta": 0.0}, "theta.*0.0"),
    ],
)
def test_config_refuses(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RopeConfig(**settings)


@pytest.mark.parametrize(("kind", "head_dim"), [("default", 15), ("default", 0), ("dynamic", 2)])
def test_head_dim_is_refused(kind: Any, head_dim: int) -> None:
    with pytest.raises(ValueError, match=str(head_dim)):
        rope.frequencies(RopeConfig(kind=kind, original_max_position=8), head_dim)
