"""pagedjax.capacity: weights and K/V to the byte, against real arrays, for every family, source, pool and share."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import gguf
import gguf_files
import jax.numpy as jnp
import numpy as np
import padded_pool
import pytest
import test_hf_config
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pagedjax import capacity
from pagedjax.capacity import KVShape
from pagedjax.config import ModelConfig
from pagedjax.loaders import load_checkpoint, orbax
from pagedjax.loaders.param_shapes import flatten, map_shapes, param_shapes
from pallas_kernels import KVPages

TINY = sorted((pathlib.Path(__file__).parent / "data" / "tiny").glob("*/config.json"))
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192)


def num_bytes(params: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in flatten(params).values())


# Weights


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.parent.name)
def test_a_config_alone_gives_what_loading_gives(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = load_checkpoint(path.parent, progress=False)
    shutil.copyfile(path, tmp_path / "config.json")
    for source in (path.parent, path, tmp_path, str(tmp_path / "config.json")):
        plan = capacity.plan(source, "1MiB", block_size=4)
        assert plan.shape.params_bytes == num_bytes(checkpoint.params)
        assert plan.shape.window == checkpoint.config.largest_window
        pages = KVPages.zeros(
            checkpoint.config.num_layers,
            1,
            4,
            checkpoint.config.num_kv_heads,
            checkpoint.config.head_dim,
            plan.kv_cache_dtype,
        )
        assert plan.bytes_per_block == pages.nbytes


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("Llama-3.2-1B", 1_235_814_400),
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen3-0.6B", 596_049_920),
        ("SmolLM2-135M", 134_515_008),
        ("Mistral-7B-v0.1", 7_241_732_096),
    ],
)
def test_published_models_have_the_published_number_of_parameters(
    name: str, num_params: int, tmp_path: pathlib.Path
) -> None:
    config, _ = test_hf_config.PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert capacity.plan(tmp_path, "1TiB", dtype=dtype).shape.params_bytes == size * num_params


def test_llama_3_8b() -> None:
    plan = capacity.plan(LLAMA_8B, "80GiB", dtype="bfloat16", max_model_len=8192)
    assert plan.shape.params_bytes == 2 * 8_030_261_248
    assert plan.bytes_per_token == 128 * 2**10


def test_a_quantised_checkpoint_is_refused(tmp_path: pathlib.Path) -> None:
    config = {**test_hf_config.small(), "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the checkpoint is quantised"):
        capacity.plan(tmp_path, "1GiB", dtype="bfloat16")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16])
def test_gguf(kind: gguf.GGMLQuantizationType, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.gguf"
    weights = gguf_files.random_weights(bias=True, head=True)
    types = {name: kind for name, weight in weights.items() if weight.ndim == 2}
    gguf_files.write(path, weights, gguf_files.metadata("qwen2"), architecture="qwen2", types=types)
    checkpoint = load_checkpoint(path, progress=False)
    assert capacity.plan(path, "1MiB").shape.params_bytes == num_bytes(checkpoint.params)


def test_orbax(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(LLAMA_8B, vocab_size=8, hidden_size=8, intermediate_size=6, num_layers=2, head_dim=4)
    params = map_shapes(lambda shape: np.zeros(shape, jnp.bfloat16), param_shapes(config))
    orbax.save(tmp_path / "a", config, params)
    assert capacity.plan(tmp_path / "a", "1MiB").shape.params_bytes == num_bytes(params)


def test_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="model=5 is a int"):
        capacity.plan(5, "1GiB")  # type: ignore[arg-type]


# K/V


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_kv_heads", "block_size"), [(1, 16), (3, 8), (8, 32), (5, 7)])
def test_blocks_are_those_of_the_pool(dtype: str, head_dim: int, num_kv_heads: int, block_size: int) -> None:
    stored = "float8_e4m3fn" if dtype == "fp8" else dtype
    sizes = (2, 3, block_size, num_kv_heads, head_dim, stored)
    shape = KVShape(2, num_kv_heads, head_dim)
    for platform, pages in (("cpu", KVPages.zeros(*sizes)), ("tpu", padded_pool.zeros(*sizes))):
        assert 3 * shape.bytes_per_block(block_size, dtype, platform) == pages.nbytes
        plan = capacity.plan(shape, num_blocks=3, block_size=block_size, kv_cache_dtype=dtype, platform=platform)
        assert plan.pool_bytes == pages.nbytes
    unpadded = shape.bytes_per_token(dtype) * block_size
    assert unpadded == shape.bytes_per_block(block_size, dtype)


def test_a_tpus_name_pads_the_pool() -> None:
    shape = KVShape(1, 3, 96, dtype="bfloat16")
    assert capacity.plan(shape, "v5e").bytes_per_block == 16 * 3 * 256 * 2
    assert capacity.plan(shape, "H100").bytes_per_block == 16 * 3 * 192 * 2


# Shares of a device


def sharded_bytes(config: ModelConfig, num_devices: int, dtype: str) -> int:
    """Bytes of one device where jax shards the parameters in the usual way; what does not divide is whole."""
    mesh = AbstractMesh((num_devices,), ("x",))
    columns, rows = PartitionSpec(None, None, "x"), PartitionSpec(None, "x", None)
    specs = {"qkv.kernel": columns, "gate_up.kernel": columns, "out.kernel": rows, "down.kernel": rows}
    specs |= {"qkv.bias": PartitionSpec(None, "x"), "gate_up.bias": PartitionSpec(None, "x")}
    specs |= {"embed.embedding": PartitionSpec("x"), "lm_head.kernel": PartitionSpec(None, "x")}
    total = 0
    for name, shape in flatten(param_shapes(config)).items():
        spec = specs.get(".".join(name.split(".")[-2:]), PartitionSpec())
        try:
            part = NamedSharding(mesh, spec).shard_shape(shape)
        except ValueError:
            part = shape
        total += int(np.prod(part)) * jnp.dtype(dtype).itemsize
    return total


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [{}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True}])
def test_weights_that_divide_are_cut_as_jax_cuts_them(num_devices: int, more: dict[str, bool]) -> None:
    config = dataclasses.replace(LLAMA_8B, **more)
    plan = capacity.plan(config, "80GiB", dtype="bfloat16", tensor_parallel=num_devices)
    assert plan.shape.params_bytes == sharded_bytes(config, num_devices, "bfloat16")
    assert plan.shape.num_kv_heads == 8 // num_devices
    assert plan.bytes_per_token == 128 * 2**10 // num_devices


def test_more_devices_than_kv_heads_hold_them_several_times() -> None:
    plan = capacity.plan(LLAMA_8B, "80GiB", dtype="bfloat16", tensor_parallel=16)
    assert plan.shape.num_kv_heads == 1
    assert "8 KV heads over 16 devices: each head is held 2 times" in plan.notes
    assert plan.shape.params_bytes == sharded_bytes(LLAMA_8B, 16, "bfloat16")


@pytest.mark.parametrize("num_devices", [3, 24, 64])
def test_heads_that_do_not_divide_stay_whole(num_devices: int) -> None:
    plan = capacity.plan(LLAMA_8B, "80GiB", dtype="bfloat16", tensor_parallel=num_devices)
    assert plan.shape.num_kv_heads == 8
    assert f"32 query and 8 KV heads do not divide by {num_devices} devices: each has the whole attention" in plan.notes
    shapes = flatten(param_shapes(LLAMA_8B))
    whole = sum(np.prod(shape) for name, shape in shapes.items() if "attention" in name or "norm" in name)
    gate_up, down, vocab = (size // (1 if size % num_devices else num_devices) for size in (28672, 14336, 128256))
    assert plan.shape.params_bytes == 2 * (whole + 32 * 4096 * (gate_up + down) + 2 * 4096 * vocab)


def test_a_shape_is_cut_too() -> None:
    shape = KVShape(32, 8, 128, 16 * 2**30, num_q_heads=32)
    plan = capacity.plan(shape, "80GiB", tensor_parallel=4)
    assert (plan.shape.num_kv_heads, plan.shape.params_bytes) == (2, 4 * 2**30)
    assert any("weights are taken to divide evenly" in note for note in plan.notes)
    assert not capacity.plan(shape, "80GiB").notes
