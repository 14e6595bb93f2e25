"""pagedjax.loaders.layout: the parameter tree, and each tensor's own part of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedjax.config import ModelConfig
from pagedjax.loaders import layout

CONFIG = ModelConfig("llama", 10, 6, 5, 2, 4, 2, 8, 64, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
LINEAR = ("q", "k", "v", "out", "gate", "up", "down")
NAMES = layout.TensorNames(
    **{
        field.name: f"{field.name}.{{layer}}" + (".{part}" if field.name in LINEAR else "")
        for field in dataclasses.fields(layout.TensorNames)
    }
    | {"embed": "embed", "final_norm": "final_norm", "lm_head": "lm_head"}
)


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, np.ndarray]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return flat


def test_the_tree() -> None:
    places = layout.places(CONFIG, NAMES)
    params = layout.allocate(places, np.dtype(ml_dtypes.bfloat16))
    assert {name: array.shape for name, array in _flat(params).items()} == {
        "embed.embedding": (10, 6),
        "layers.attention_norm.scale": (2, 6),
        "layers.attention.qkv.kernel": (2, 6, 64),
        "layers.attention.qkv.bias": (2, 64),
        "layers.attention.out.kernel": (2, 32, 6),
        "layers.attention.out.bias": (2, 6),
        "layers.attention.q_norm.scale": (2, 8),
        "layers.attention.k_norm.scale": (2, 8),
        "layers.mlp_norm.scale": (2, 6),
        "layers.mlp.gate_up.kernel": (2, 6, 10),
        "layers.mlp.gate_up.bias": (2, 10),
        "layers.mlp.down.kernel": (2, 5, 6),
        "layers.mlp.down.bias": (2, 6),
        "final_norm.scale": (6,),
        "lm_head.kernel": (6, 10),
    }
    assert all(array.dtype == ml_dtypes.bfloat16 for array in _flat(params).values())


def test_optional_parts_are_absent() -> None:
    plain = dataclasses.replace(
        CONFIG, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False, tie_word_embeddings=True
    )
    names = _flat(layout.allocate(layout.places(plain, NAMES), np.dtype(np.float32)))
    assert len(names) == 8
    assert not [name for name in names if "bias" in name or "lm_head" in name or "q_norm" in name]


def test_every_element_is_written_once() -> None:
    places = layout.places(CONFIG, NAMES)
    params = layout.allocate(places, np.dtype(np.float32))
    for array in _flat(params).values():
        array[...] = 0.0
    for number, (_, place) in enumerate(places.items()):
        before = {name: array.copy() for name, array in _flat(params).items()}
        place.write(params, np.full(place.shape, number + 1.0, np.float32))
        changed = {name: array != before[name] for name, array in _flat(params).items()}
        assert sum(mask.sum() for mask in changed.values()) == np.prod(place.shape)
        assert all(np.all(before[name][mask] == 0.0) for name, mask in changed.items())
    assert all(np.all(array > 0.0) for array in _flat(params).values())


def test_fused_columns_and_transposition() -> None:
    params = layout.allocate(layout.places(CONFIG, NAMES), np.dtype(np.float32))
    rng = np.random.default_rng(0)
    places = layout.places(CONFIG, NAMES)
    tensors = {name: rng.normal(size=place.shape).astype(np.float32) for name, place in places.items()}
    for name, place in places.items():
        place.write(params, tensors[name])
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for layer in (0, 1):
        qkv = np.concatenate([tensors[f"{part}.{layer}.weight"] for part in "qkv"])
        np.testing.assert_array_equal(attention["qkv"]["kernel"][layer], qkv.T)
        np.testing.assert_array_equal(
            attention["qkv"]["bias"][layer], np.concatenate([tensors[f"{part}.{layer}.bias"] for part in "qkv"])
        )
        gate_up = np.concatenate([tensors[f"gate.{layer}.weight"], tensors[f"up.{layer}.weight"]])
        np.testing.assert_array_equal(mlp["gate_up"]["kernel"][layer], gate_up.T)
        np.testing.assert_array_equal(mlp["down"]["kernel"][layer], tensors[f"down.{layer}.weight"].T)
    np.testing.assert_array_equal(params["embed"]["embedding"], tensors["embed"])
    np.testing.assert_array_equal(params["lm_head"]["kernel"], tensors["lm_head"].T)


def test_rotary_heads_are_those_of_q_and_k() -> None:
    heads = {name: place.rotary_heads for name, place in layout.places(CONFIG, NAMES).items() if place.rotary_heads}
    assert heads == {f"{part}.{layer}.{kind}": count for part, count in (("q", 4), ("k", 2)) for layer in (0, 1)
                     for kind in ("weight", "bias")}  # fmt: skip


def test_check_names_what_is_wrong() -> None:
    places = layout.places(CONFIG, NAMES)
    shapes = {name: place.shape for name, place in places.items()}
    layout.check(places, shapes, "file")
    with pytest.raises(ValueError, match=r"file lacks tensor 'q\.1\.bias'"):
        layout.check(places, {name: shape for name, shape in shapes.items() if name != "q.1.bias"}, "file")
    with pytest.raises(ValueError, match=r"file has tensors 'a', 'b', 'c', 'd' and 1 more"):
        layout.check(places, {**shapes, **dict.fromkeys("abcde", (1,))}, "file")
    with pytest.raises(ValueError, match=r"'up\.0\.weight' has shape \(6, 5\).*\(5, 6\)"):
        layout.check(places, {**shapes, "up.0.weight": (6, 5)}, "file")


def test_float16_overflow_is_refused() -> None:
    places = layout.places(CONFIG, NAMES)
    params = layout.allocate(places, np.dtype(np.float16))
    place = places["down.0.weight"]
    place.write(params, np.full(place.shape, 65504.0, np.float32))
    for dtype in (np.float32, ml_dtypes.bfloat16):
        with pytest.raises(ValueError, match=r"down\.kernel.*float16"):
            place.write(params, np.full(place.shape, 7e4).astype(dtype))
    place.write(params, np.full(place.shape, np.inf, np.float32))  # infinite in the file already
