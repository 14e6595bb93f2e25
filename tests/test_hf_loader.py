"""pagedjax.loaders.hf: logits equal to transformers', exact bytes, and folders that are damaged in every way."""

from __future__ import annotations

import json
import os
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_decoder
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax.loaders import hf

TINY = pathlib.Path(__file__).parent / "data" / "tiny"
MODELS = sorted(path.parent.name for path in TINY.glob("*/config.json"))
Tensors = dict[str, np.ndarray]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    config, params = hf.load(TINY / name)
    reference = np.load(TINY / name / "reference.npz")
    logits = numpy_decoder.logits(config, params, reference["tokens"])
    np.testing.assert_allclose(logits, reference["logits"], atol=1e-4, rtol=0.0)


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Write a tiny checkpoint again, with its tensors and configuration edited."""

    def write(name: str, edit: Callable[[Tensors], Any] = lambda _: None, **settings: Any) -> pathlib.Path:
        tensors = load_file(TINY / name / "model.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        config = json.loads((TINY / name / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
        return tmp_path

    return write


def _assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, dict):
            _assert_equal(value, second[key])
        else:
            assert value.dtype == second[key].dtype
            assert value.tobytes() == second[key].tobytes()


def _shard(folder: pathlib.Path) -> dict[str, str]:
    """Split model.safetensors in two, as save_pretrained does."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: files[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    _write_index(folder, weight_map)
    return weight_map


def _write_index(folder: pathlib.Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_bfloat16_is_bit_exact(copy: Callable[..., pathlib.Path]) -> None:
    bits = np.array([0x3F80, 0xC020, 0x7F62, 0x0001, 0x8000, 0x7F80, 0x7FC1], np.uint16)  # 1, -2.5, 3e38, tiny, -0 ...
    assert bits[:3].view(ml_dtypes.bfloat16).tolist() == [1.0, -2.5, float(ml_dtypes.bfloat16(3e38))]

    def edit(tensors: Tensors) -> None:
        tensors["model.norm.weight"].view(np.uint16)[:7] = bits
        tensors["model.layers.1.self_attn.k_proj.weight"].view(np.uint16)[3, :7] = bits

    _, params = hf.load(copy("llama_llama3", edit))
    np.testing.assert_array_equal(params["final_norm"]["scale"].view(np.uint16)[:7], bits)
    column = 4 * 8 + 3  # after the four q heads of 8
    qkv = params["layers"]["attention"]["qkv"]["kernel"]
    assert qkv.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(qkv.view(np.uint16)[1, :7, column], bits)


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16])
def test_dtype_converts(dtype: Any) -> None:
    _, stored = hf.load(TINY / "qwen2")
    _, params = hf.load(TINY / "qwen2", dtype)
    for part in ("kernel", "bias"):
        found, expected = (tree["layers"]["attention"]["qkv"][part] for tree in (params, stored))
        assert found.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(dtype).astype(np.float32))


def test_dtype_of_a_mixed_checkpoint(copy: Callable[..., pathlib.Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)

    def dtypes(folder: pathlib.Path) -> set[str]:
        params = hf.load(folder)[1]
        return {params["final_norm"]["scale"].dtype.name, params["embed"]["embedding"].dtype.name}

    assert dtypes(copy("llama_llama3", edit)) == {"bfloat16"}  # as declared
    assert dtypes(copy("llama_llama3", edit, dtype="float16")) == {"float32"}  # the widest
    assert dtypes(copy("llama_llama3", edit, dtype=None)) == {"float32"}
    assert dtypes(copy("llama_llama3", dtype="float32")) == {"bfloat16"}  # as stored


def test_float64_becomes_float32(copy: Callable[..., pathlib.Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors.update({name: tensor.astype(np.float64) for name, tensor in tensors.items()})

    _assert_equal(hf.load(copy("llama_bias_tied", edit))[1], hf.load(TINY / "llama_bias_tied")[1])


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64"])
def test_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"{dtype}.*float32, bfloat16, float16"):
        hf.load(TINY / "qwen2", dtype)


def test_float16_overflow(copy: Callable[..., pathlib.Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 3e38

    with pytest.raises(ValueError, match=r"mlp\.gate_up\.kernel.*float16"):
        hf.load(copy("qwen2", edit), "float16")


def test_shards_equal_one_file(copy: Callable[..., pathlib.Path]) -> None:
    folder = copy("qwen3_window")
    _shard(folder)
    config, params = hf.load(str(folder))
    expected_config, expected = hf.load(TINY / "qwen3_window")
    assert config == expected_config
    _assert_equal(params, expected)


def test_missing_shard(copy: Callable[..., pathlib.Path]) -> None:
    folder = copy("qwen2")
    _shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        hf.load(folder)


def test_index_and_shards_disagree(copy: Callable[..., pathlib.Path]) -> None:
    folder = copy("qwen2")
    weight_map = _shard(folder)
    shard = weight_map["model.norm.weight"]
    _write_index(folder, {**weight_map, "model.extra": shard})
    with pytest.raises(ValueError, match=rf"'model\.extra'.*{shard}"):
        hf.load(folder)
    for wrong in ({}, None, [1]):
        _write_index(folder, wrong)
        with pytest.raises(ValueError, match="weight_map"):
            hf.load(folder)
    for place in ("../model.safetensors", "/etc/passwd", 3):
        _write_index(folder, {**weight_map, "model.norm.weight": place})
        with pytest.raises(ValueError, match="beside their index"):
            hf.load(folder)
    _write_index(folder, {**weight_map, "a": "copy.safetensors"})
    (folder / "copy.safetensors").write_bytes((folder / shard).read_bytes())
    with pytest.raises(ValueError, match="is in two files"):
        hf.load(folder)


def test_no_weights(copy: Callable[..., pathlib.Path]) -> None:
    folder = copy("qwen2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors.*pytorch_model\.bin"):
        hf.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load(folder)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load(folder / "absent")


@pytest.mark.parametrize("size", [0, 4, 100, 10_000, -2])
def test_truncated_file(copy: Callable[..., pathlib.Path], size: int) -> None:
    folder = copy("qwen2")
    path = folder / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        hf.load(folder)


def test_corrupt_file_and_lfs_pointer(copy: Callable[..., pathlib.Path]) -> None:
    folder = copy("qwen2")
    (folder / "model.safetensors").write_bytes(b"\x07" * 4096)
    with pytest.raises(ValueError, match=r"truncated or corrupt.*4096 bytes"):
        hf.load(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        hf.load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.0.mlp.gate_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_missing_tensor(copy: Callable[..., pathlib.Path], name: str) -> None:
    with pytest.raises(ValueError, match=f"lacks tensor '{name}'"):
        hf.load(copy("qwen2", lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias", "score"])
def test_unexpected_tensor(copy: Callable[..., pathlib.Path], name: str) -> None:
    with pytest.raises(ValueError, match=f"has tensor '{name}'"):
        hf.load(copy("qwen2", lambda tensors: tensors.update({name: np.zeros(3, np.float32)})))


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv", "qweight", "k_scale"])
def test_left_over_of_quantisation(copy: Callable[..., pathlib.Path], suffix: str) -> None:
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    with pytest.raises(ValueError, match=f"{name}.*quantised"):
        hf.load(copy("qwen2", lambda tensors: tensors.update({name: np.zeros(1, np.float32)})))


@pytest.mark.parametrize(("dtype", "stored"), [(ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8")])
def test_stored_dtype_is_refused(copy: Callable[..., pathlib.Path], dtype: Any, stored: str) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].astype(dtype)

    with pytest.raises(ValueError, match=rf"'model\.layers\.1\.mlp\.up_proj\.weight' is {stored}"):
        hf.load(copy("qwen2", edit))


def test_shape_mismatch(copy: Callable[..., pathlib.Path]) -> None:
    with pytest.raises(ValueError, match=r"q_proj\.weight' has shape \(32, 32\).*\(16, 32\)"):
        hf.load(copy("qwen2", num_attention_heads=2, head_dim=8))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight' has shape \(128, 32\).*\(127, 32\)"):
        hf.load(copy("qwen2", vocab_size=127))


def test_quantised_config_is_refused(copy: Callable[..., pathlib.Path]) -> None:
    with pytest.raises(ValueError, match="gptq"):
        hf.load(copy("qwen2", quantization_config={"quant_method": "gptq"}))


def test_tied_with_the_same_head_stored(copy: Callable[..., pathlib.Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    config, params = hf.load(copy("qwen2", edit))
    assert config.tie_word_embeddings
    _assert_equal(params, hf.load(TINY / "qwen2")[1])


def test_tied_with_another_head_stored(copy: Callable[..., pathlib.Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    with pytest.warns(UserWarning, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        config, params = hf.load(copy("qwen2", edit))
    assert not config.tie_word_embeddings
    embedding, kernel = params["embed"]["embedding"], params["lm_head"]["kernel"]
    assert np.argwhere(kernel != embedding.T).tolist() == [[31, 127]]


def test_tied_with_only_the_head_stored(copy: Callable[..., pathlib.Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    _assert_equal(hf.load(copy("qwen2", edit))[1], hf.load(TINY / "qwen2")[1])


def test_untied_without_a_head(copy: Callable[..., pathlib.Path]) -> None:
    with pytest.raises(ValueError, match=r"'lm_head\.weight'.*tie_word_embeddings"):
        hf.load(copy("qwen2", tie_word_embeddings=False))


def test_stored_frequencies_are_ignored(copy: Callable[..., pathlib.Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = copy("llama_yarn", lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    _assert_equal(hf.load(folder)[1], hf.load(TINY / "llama_yarn")[1])


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("", "lm_head."),
    ],
)
def test_a_text_model_from_a_larger_one(copy: Callable[..., pathlib.Path], prefix: str, head: str) -> None:
    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            renamed = name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head)
            tensors[renamed] = tensors.pop(name)

    folder = copy("mistral_window", edit)
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": inner}))
    config, params = hf.load(folder)
    expected_config, expected = hf.load(TINY / "mistral_window")
    assert config == expected_config
    _assert_equal(params, expected)


def test_vision_tensors_are_refused(copy: Callable[..., pathlib.Path]) -> None:
    name = "vision_tower.patch_conv.weight"
    with pytest.raises(ValueError, match=name):
        hf.load(copy("mistral_window", lambda tensors: tensors.update({name: np.ones(4, np.float32)})))


def test_peak_memory_is_the_parameters_and_one_tensor(copy: Callable[..., pathlib.Path]) -> None:
    def widen(tensors: Tensors) -> None:
        for name in list(tensors):
            if "mlp" in name:
                out_features, in_features = tensors[name].shape
                shape = (20_000, in_features) if out_features == 48 else (out_features, 20_000)
                tensors[name] = np.ones(shape, ml_dtypes.bfloat16)

    folder = copy("llama_llama3", widen, intermediate_size=20_000)
    tensor = 20_000 * 32 * 2  # bytes; the parameters are six of these and a little
    hf.load(TINY / "llama_llama3")  # what is imported and cached at the first load
    tracemalloc.start()
    hf.load(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 7 * tensor < peak < 7.5 * tensor
