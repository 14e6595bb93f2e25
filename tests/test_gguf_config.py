"""GGUF metadata: what each key becomes, and everything that is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_files import HIDDEN, INNER, KV_HEADS, LAYERS, Q_HEADS, VOCAB, metadata, random_weights, write

from pagedjax.config import RopeConfig
from pagedjax.loaders import gguf as loader


def test_padded_vocabulary(tmp_path):
    normal, unused = 1, 5
    types = [normal, unused, *[normal] * 38, *[unused] * 8]  # the unused one inside is a token like any other
    config, _ = loader.load(write(tmp_path / "m.gguf", random_weights(), metadata(), token_types=types))
    assert (config.vocab_size, config.num_tokens) == (48, 40)
    config, _ = loader.load(write(tmp_path / "n.gguf", random_weights(), metadata(), token_types=[normal] * 40))
    assert (config.vocab_size, config.num_tokens) == (48, 40)
    config, _ = loader.load(write(tmp_path / "o.gguf", random_weights(), metadata(), token_types=[normal] * 48))
    assert config.num_tokens is None
    with pytest.raises(ValueError, match=r"50 tokens and only 48 embedding rows"):
        loader.load(write(tmp_path / "p.gguf", random_weights(), metadata(), token_types=[normal] * 50))


def test_rotary_metadata(tmp_path):
    def rope(name, **keys):
        return loader.load(write(tmp_path / f"{name}.gguf", random_weights(), metadata(**keys)))[0].rope

    assert rope("absent", rope__freq_base=None) == RopeConfig(theta=10000.0)
    assert rope("theta", rope__freq_base=1e6, rope__scaling__type="none") == RopeConfig(theta=1e6)
    linear = RopeConfig(theta=10000.0, kind="linear", factor=4.0)
    assert rope("linear", rope__scaling__type="linear", rope__scaling__factor=4.0) == linear
    assert rope("untyped", rope__scaling__factor=4.0) == linear
    assert rope("old", rope__scale_linear=4.0) == linear
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}
    assert rope("yarn", **yarn) == RopeConfig(kind="yarn", factor=4.0, original_max_position=16)
    betas = {"rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0}
    expected = RopeConfig(kind="yarn", factor=4.0, original_max_position=16, beta_fast=16.0, beta_slow=2.0)
    assert rope("betas", **yarn, **betas) == expected
    with pytest.raises(ValueError, match=r"rope\.scaling\.type 'longrope'"):
        rope("longrope", rope__scaling__type="longrope", rope__scaling__factor=4.0)
    with pytest.raises(ValueError, match=r"yarn_log_multiplier"):
        rope("log", **yarn, rope__scaling__yarn_log_multiplier=0.1)


def llama3_factors(theta=500000.0, factor=32.0, original=8192, low=1.0, high=4.0, head_dim=64):
    """What llama.cpp's converter writes, wavelength by wavelength."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def with_head_dim_64(name, path, factors, **keys):
    rng = np.random.default_rng(0)
    weights = random_weights()
    for layer in range(LAYERS):
        for projection, heads in (("attn_q", Q_HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            weights[f"blk.{layer}.{projection}.weight"] = rng.standard_normal((heads * 64, HIDDEN)).astype(np.float32)
        weights[f"blk.{layer}.attn_output.weight"] = rng.standard_normal((HIDDEN, Q_HEADS * 64)).astype(np.float32)
    weights["rope_freqs.weight"] = factors
    keys = {"attention__key_length": 64, "attention__value_length": 64, "rope__freq_base": 500000.0} | keys
    return loader.load(write(path / f"{name}.gguf", weights, metadata(**keys)))[0]


@pytest.mark.parametrize(("factor", "original"), [(32.0, 8192), (8.0, 8192), (4.0, 4096)])
def test_llama3_factors_are_recognised(tmp_path, factor, original):
    factors = llama3_factors(factor=factor, original=original)
    assert 3 <= ((factors > 1) & (factors < factor)).sum() <= 4
    config = with_head_dim_64("m", tmp_path, factors)
    assert config.head_dim == 64
    assert config.rope == RopeConfig(theta=500000.0, kind="llama3", factor=factor, original_max_position=original)


def test_other_rotary_factors_are_refused(tmp_path):
    assert with_head_dim_64("ones", tmp_path, np.ones(32, np.float32)).rope == RopeConfig(theta=500000.0)
    odd = llama3_factors()
    odd[16] *= 1.01
    with pytest.raises(ValueError, match=r"rope_freqs\.weight .* not those of the llama3 rule"):
        with_head_dim_64("odd", tmp_path, odd)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has shape \(16,\)"):
        with_head_dim_64("short", tmp_path, llama3_factors()[:16])
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}
    with pytest.raises(ValueError, match=r"both the tensor 'rope_freqs\.weight' and rope\.scaling\.type 'yarn'"):
        with_head_dim_64("both", tmp_path, llama3_factors(), **scaling)


def test_sliding_window(tmp_path):
    def windows(architecture, size):
        bias = architecture == "qwen2"
        path = tmp_path / f"{architecture}{size}.gguf"
        keys = metadata(architecture, attention__sliding_window=size)
        return loader.load(write(path, random_weights(bias=bias), keys, architecture=architecture))[0].sliding_windows

    assert windows("llama", 16) == (16, 16)
    assert windows("llama", 0) is None
    assert windows("qwen2", 64) is None  # as long as the context
    with pytest.raises(ValueError, match="sliding_window = 16"):
        windows("qwen2", 16)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma2", {}, r"architecture 'gemma2'; supported are llama, qwen2, qwen3"),
        ("llama", {"block_count": None}, r"no metadata key 'llama\.block_count'"),
        ("llama", {"block_count": 4_000_000_000}, r"block_count' = 4000000000 and only \d+ tensors"),
        ("llama", {"attention__layer_norm_rms_epsilon": None}, r"no metadata key .*rms_epsilon"),
        ("llama", {"attention__layer_norm_rms_epsilon": "1e-5"}, r"rms_epsilon' = '1e-5'; it must be a number"),
        ("llama", {"embedding_length": 0}, r"embedding_length' = 0; it must be at least 1"),
        ("llama", {"feed_forward_length": [64, 32]}, r"feed_forward_length' = \[64, 32\]: layers that differ"),
        ("llama", {"attention__value_length": 16}, r"value_length = 16 and a head size of 8"),
        ("llama", {"rope__dimension_count": 4}, r"dimension_count = 4 and a head size of 8"),
        ("llama", {"attention__head_count": 5}, r"embedding_length \(32\) is not a multiple of head_count \(5\)"),
        ("llama", {"attention__head_count_kv": 3}, r"num_q_heads \(4\) is not a multiple of num_kv_heads \(3\)"),
        ("llama", {"expert_count": 8}, r"'llama\.expert_count' to 8, which this loader does not implement"),
        ("llama", {"logit_scale": 0.5}, r"'llama\.logit_scale' to 0\.5, which this loader does not implement"),
        ("llama", {"feed_forward_length": 96}, r"'blk\.0\.ffn_gate\.weight' has shape \(64, 32\).* \(96, 32\)"),
        ("llama", {"block_count": 1}, r"has tensors 'blk\.1\..* has no place for"),
        ("llama", {"block_count": 3}, r"lacks tensors 'blk\.2\."),
    ],
)
def test_metadata_that_is_refused(tmp_path, architecture, keys, message):
    path = write(tmp_path / "m.gguf", random_weights(), metadata(architecture, **keys), architecture=architecture)
    with pytest.raises(ValueError, match=message):
        loader.load(path)


def test_agreeing_per_layer_sizes_are_fine(tmp_path):
    keys = metadata(feed_forward_length=[INNER] * LAYERS, expert_count=0, vocab_size=VOCAB)
    assert loader.load(write(tmp_path / "m.gguf", random_weights(), keys))[0].intermediate_size == INNER


def test_without_a_kv_head_count_every_head_has_its_own(tmp_path):
    weights = random_weights()
    for name in [f"blk.{layer}.attn_{part}.weight" for layer in range(LAYERS) for part in "kv"]:
        weights[name] = np.concatenate([weights[name]] * 2)
    path = write(tmp_path / "m.gguf", weights, metadata(attention__head_count_kv=None))
    assert loader.load(path)[0].num_kv_heads == Q_HEADS
