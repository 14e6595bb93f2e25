"""GGUF files: row order, fusing, a type per tensor, and a real model against an independent reader."""

from __future__ import annotations

import json
import pathlib
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    VOCAB,
    interleave,
    metadata,
    random_weights,
    write,
)

from pagedjax.config import RopeConfig
from pagedjax.loaders import gguf as loader
from pagedjax.loaders.param_shapes import flatten, param_shapes

Q_SIZE, KV_SIZE = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
REFERENCE = pathlib.Path(__file__).parent / "data" / "smollm2_gguf.json"


def expect(weights, name):
    """All layers of one projection, [L, in, out]."""
    return np.stack([weights[f"blk.{layer}.{name}.weight"].T for layer in range(LAYERS)])


def test_row_order_of_one_head():
    assert interleave(np.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    np.testing.assert_array_equal(loader.unpermute(np.array([0, 4, 1, 5, 2, 6, 3, 7]), 1), np.arange(8))
    rows = np.arange(2 * 3 * 8 * 5).reshape(48, 5)
    np.testing.assert_array_equal(loader.unpermute(interleave(rows, 6), 6), rows)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_parameter_arrives_in_its_place(tmp_path, architecture):
    qk_norm, bias, head = architecture == "qwen3", architecture != "qwen3", architecture == "llama"
    weights = random_weights(bias=bias, qk_norm=qk_norm, head=head)
    keys = metadata(architecture)
    config, params = loader.load(write(tmp_path / "m.gguf", weights, keys, architecture=architecture))

    assert (config.family, config.num_q_heads, config.num_kv_heads, config.head_dim) == (architecture, 4, 2, 8)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (48, 32, 64, 2)
    assert (config.qkv_bias, config.qk_norm, config.tie_word_embeddings) == (bias, qk_norm, not head)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 64)
    flat = flatten(params)
    assert {name: leaf.shape for name, leaf in flat.items()} == flatten(param_shapes(config))
    assert {leaf.dtype for leaf in flat.values()} == {np.dtype(np.float32)}

    qkv = np.concatenate([expect(weights, name) for name in ("attn_q", "attn_k", "attn_v")], axis=-1)
    np.testing.assert_array_equal(flat["layers.attention.qkv.kernel"], qkv)
    gate_up = np.concatenate([expect(weights, name) for name in ("ffn_gate", "ffn_up")], axis=-1)
    np.testing.assert_array_equal(flat["layers.mlp.gate_up.kernel"], gate_up)
    np.testing.assert_array_equal(flat["layers.attention.out.kernel"], expect(weights, "attn_output"))
    np.testing.assert_array_equal(flat["layers.mlp.down.kernel"], expect(weights, "ffn_down"))
    np.testing.assert_array_equal(flat["layers.attention_norm.scale"], expect(weights, "attn_norm"))
    np.testing.assert_array_equal(flat["layers.mlp_norm.scale"], expect(weights, "ffn_norm"))
    np.testing.assert_array_equal(flat["embed.embedding"], weights["token_embd.weight"])
    np.testing.assert_array_equal(flat["final_norm.scale"], weights["output_norm.weight"])
    if head:
        np.testing.assert_array_equal(flat["lm_head.kernel"], weights["output.weight"].T)
    if qk_norm:
        np.testing.assert_array_equal(flat["layers.attention.q_norm.scale"], expect(weights, "attn_q_norm"))
        np.testing.assert_array_equal(flat["layers.attention.k_norm.scale"], expect(weights, "attn_k_norm"))
    if bias:
        rows = [np.concatenate([weights[f"blk.{i}.attn_{p}.bias"] for p in "qkv"]) for i in range(LAYERS)]
        np.testing.assert_array_equal(flat["layers.attention.qkv.bias"], np.stack(rows))


def dequantise(raw: np.ndarray, kind: Type) -> np.ndarray:
    """ggml's block formats, value by value (ggml-quants.c, dequantize_row_*); raw is uint8 [blocks, bytes]."""

    def half(data: bytes) -> float:
        return struct.unpack("<e", data)[0]

    values = []
    for block in (bytes(row) for row in raw):
        if kind == Type.Q8_0:
            values += [half(block[:2]) * byte for byte in struct.unpack("<32b", block[2:])]
        elif kind == Type.Q4_0:
            values += [half(block[:2]) * ((byte & 15) - 8) for byte in block[2:]]
            values += [half(block[:2]) * ((byte >> 4) - 8) for byte in block[2:]]
        elif kind == Type.Q4_1:
            values += [half(block[:2]) * (byte & 15) + half(block[2:4]) for byte in block[4:]]
            values += [half(block[:2]) * (byte >> 4) + half(block[2:4]) for byte in block[4:]]
        elif kind == Type.Q6_K:
            low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
            for i in range(256):
                part, rest = divmod(i, 128)  # two halves of 128 values, each four groups of 32
                group, lane = divmod(rest, 32)
                nibble = low[part * 64 + (group % 2) * 32 + lane] >> (4 * (group // 2)) & 15
                bits = high[part * 32 + lane] >> (2 * group) & 3
                values.append(half(block[208:]) * scales[i // 16] * ((nibble | bits << 4) - 32))
    return np.array(values)


BLOCK_BYTES = {Type.Q8_0: (32, 34), Type.Q4_0: (32, 18), Type.Q4_1: (32, 20), Type.Q6_K: (256, 210)}


def random_blocks(rng, kind: Type, rows: int, columns: int) -> np.ndarray:
    """Random quantised bytes, [rows, bytes per row], with scales that are ordinary numbers."""
    values, size = BLOCK_BYTES[kind]
    raw = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    scale = rng.uniform(0.01, 1, (len(raw), 1)).astype("<f2").view(np.uint8)
    if kind == Type.Q6_K:
        raw[:, 208:] = scale
    else:
        raw[:, :2] = scale
    if kind == Type.Q4_1:
        raw[:, 2:4] = scale[::-1]
    return raw.reshape(rows, -1)


def test_types_are_per_tensor(tmp_path):
    rng = np.random.default_rng(1)
    inner = 256  # a Q6_K block
    weights = random_weights()
    kinds = {
        "token_embd.weight": (Type.Q8_0, VOCAB, HIDDEN),
        "blk.0.attn_v.weight": (Type.Q4_0, KV_SIZE, HIDDEN),
        "blk.0.ffn_gate.weight": (Type.Q4_1, inner, HIDDEN),
        "blk.1.ffn_down.weight": (Type.Q6_K, HIDDEN, inner),
    }
    for layer in range(LAYERS):
        for name, shape in {"gate": (inner, HIDDEN), "up": (inner, HIDDEN), "down": (HIDDEN, inner)}.items():
            weights[f"blk.{layer}.ffn_{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    for name, (kind, rows, columns) in kinds.items():
        weights[name] = random_blocks(rng, kind, rows, columns)
    types = {name: kind for name, (kind, _, _) in kinds.items()}
    types |= {"blk.0.attn_q.weight": Type.F16, "blk.1.attn_output.weight": Type.BF16}
    path = write(tmp_path / "m.gguf", weights, metadata(feed_forward_length=inner), types=types)
    _, params = loader.load(path)
    flat = flatten(params)

    oracle = {
        name: dequantise(weights[name].reshape(-1, BLOCK_BYTES[kind][1]), kind).reshape(rows, columns)
        for name, (kind, rows, columns) in kinds.items()
    }
    tolerance = {"rtol": 1e-6, "atol": 1e-7}  # the products of the oracle are float64
    np.testing.assert_allclose(flat["embed.embedding"], oracle["token_embd.weight"], **tolerance)
    np.testing.assert_allclose(
        flat["layers.attention.qkv.kernel"][0, :, -KV_SIZE:], oracle["blk.0.attn_v.weight"].T, **tolerance
    )
    np.testing.assert_allclose(
        flat["layers.mlp.gate_up.kernel"][0, :, :inner], oracle["blk.0.ffn_gate.weight"].T, **tolerance
    )
    np.testing.assert_allclose(flat["layers.mlp.down.kernel"][1], oracle["blk.1.ffn_down.weight"].T, **tolerance)
    np.testing.assert_array_equal(
        flat["layers.attention.qkv.kernel"][0, :, :Q_SIZE], weights["blk.0.attn_q.weight"].T.astype(np.float16)
    )
    np.testing.assert_array_equal(
        flat["layers.attention.out.kernel"][1], weights["blk.1.attn_output.weight"].T.astype(ml_dtypes.bfloat16)
    )
    np.testing.assert_array_equal(flat["layers.attention_norm.scale"][0], weights["blk.0.attn_norm.weight"])


def test_bfloat16_bits_survive(tmp_path):
    weights = random_weights()
    weights["token_embd.weight"][0, :3] = [1, -2.5, 3e38]
    types = {name: Type.BF16 for name, weight in weights.items() if weight.ndim == 2}
    path = write(tmp_path / "m.gguf", weights, metadata(), types=types)
    _, params = loader.load(path)
    assert {leaf.dtype for leaf in flatten(params).values()} == {np.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(
        params["embed"]["embedding"].view(np.uint16),
        weights["token_embd.weight"].astype(ml_dtypes.bfloat16).view(np.uint16),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype("float32")])
def test_dtype_is_the_one_asked_for(tmp_path, dtype):
    _, params = loader.load(write(tmp_path / "m.gguf", random_weights(), metadata()), dtype)
    assert {leaf.dtype for leaf in flatten(params).values()} == {np.dtype(jnp.dtype(dtype))}


@pytest.mark.parametrize("dtype", ["int8", "floaty"])
def test_a_dtype_that_is_no_float_is_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=rf"{dtype}.*parameters can be"):
        loader.load(write(tmp_path / "m.gguf", random_weights(), metadata()), dtype)


@pytest.mark.parametrize(
    ("missing", "added", "message"),
    [
        ("blk.1.attn_k.weight", None, r"lacks tensor 'blk\.1\.attn_k\.weight'"),
        ("token_embd.weight", None, r"no tensor 'token_embd\.weight'"),
        ("output_norm.weight", None, r"lacks tensor 'output_norm\.weight'"),
        (None, "blk.1.attn_k.bias", r"has tensor 'blk\.1\.attn_k\.bias'"),
        (None, "blk.0.attn_q.bias", r"lacks tensors 'blk\.0\.attn_k\.bias'"),
        (None, "blk.0.ffn_gate_exps.weight", r"has tensor 'blk\.0\.ffn_gate_exps\.weight'"),
    ],
)
def test_tensors_missing_or_unexpected(tmp_path, missing, added, message):
    weights = random_weights()
    if missing:
        del weights[missing]
    if added:
        weights[added] = np.ones(Q_SIZE if "attn_q" in added else KV_SIZE, np.float32)
    with pytest.raises(ValueError, match=message):
        loader.load(write(tmp_path / "m.gguf", weights, metadata()))


def test_qwen2_without_biases_is_incomplete(tmp_path):
    path = write(tmp_path / "m.gguf", random_weights(), metadata("qwen2"), architecture="qwen2")
    with pytest.raises(ValueError, match=r"lacks tensors 'blk\.0\.attn_q\.bias'"):
        loader.load(path)


def test_quick_and_quiet_loads_print_nothing(tmp_path, capfd):
    path = write(tmp_path / "m.gguf", random_weights(), metadata())
    loader.load(path)
    loader.load(path, progress=False)
    assert capfd.readouterr() == ("", "")


# The reference was made with transformers 5's GGUF reader: float64 sums, and entries of the tensors by their
# Hugging Face names.
PLACES = {
    "model.embed_tokens": ("embed.embedding", None, None),
    "model.norm": ("final_norm.scale", None, None),
    "self_attn.q_proj": ("layers.attention.qkv.kernel", 0, 576),
    "self_attn.k_proj": ("layers.attention.qkv.kernel", 576, 768),
    "self_attn.v_proj": ("layers.attention.qkv.kernel", 768, 960),
    "self_attn.o_proj": ("layers.attention.out.kernel", 0, 576),
    "mlp.gate_proj": ("layers.mlp.gate_up.kernel", 0, 1536),
    "mlp.up_proj": ("layers.mlp.gate_up.kernel", 1536, 3072),
    "mlp.down_proj": ("layers.mlp.down.kernel", 0, 576),
    "input_layernorm": ("layers.attention_norm.scale", None, None),
    "post_attention_layernorm": ("layers.mlp_norm.scale", None, None),
}


def test_smollm2_equals_an_independent_reader(smollm2_path):
    config, params = loader.load(smollm2_path, progress=False)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.rope, config.rms_norm_eps) == (RopeConfig(theta=100000.0), 1e-5)
    assert (config.tie_word_embeddings, config.num_tokens, config.max_position_embeddings) == (True, None, 8192)
    flat = flatten(params)
    for name, reference in json.loads(REFERENCE.read_text()).items():
        module = name.removesuffix(".weight")
        layer = None
        if module.startswith("model.layers."):
            layer, module = int(module.split(".")[2]), module.split(".", 3)[3]
        place, start, stop = PLACES[module]
        value = flat[place] if layer is None else flat[place][layer]
        if start is not None:
            value = value[:, start:stop].T
        assert list(value.shape) == reference["shape"], name
        assert [value[tuple(at)] for at in reference["at"]] == reference["values"], name
        np.testing.assert_allclose(value.sum(dtype=np.float64), reference["sum"], rtol=1e-12, err_msg=name)
