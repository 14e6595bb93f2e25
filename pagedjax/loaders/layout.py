"""Where a checkpoint's tensors go: one tensor per projection and layer in, fused and stacked parameters out.

Every format names its tensors its own way and stores a matrix as [out, in]; the places are the same for all of them.
A parameter is allocated once, in its final shape, and each tensor is written to its own part of it.

Letters: L layers, D hidden_size, F intermediate_size, V vocab_size, Hq / Hkv heads, Dh head_dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedjax.config import ModelConfig

ALIGNMENT = 64  # bytes; a host buffer that begins elsewhere is copied when it becomes an array
NAMES_SHOWN = 4  # in a message about many tensors


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one tensor goes: a parameter, a layer of it, and a range of its last axis."""

    parameter: tuple[str, ...]
    shape: tuple[int, ...]  # of the tensor, [out, in] or [features]
    layer: int | None = None  # None: not stacked
    start: int = 0  # first column of a fused kernel or bias
    rotary_heads: int = 0  # heads of a q or k projection, 0 for every other tensor

    @property
    def is_kernel(self) -> bool:
        """Whether the parameter is the tensor's transpose, [in, out]."""
        return self.parameter[-1] == "kernel"

    def write(self, params: dict[str, Any], value: np.ndarray) -> None:
        """Write the tensor, converted to the parameter's dtype; ValueError where it overflows float16."""
        target: Any = params
        for key in self.parameter:
            target = target[key]
        if self.layer is not None:
            target = target[self.layer]
        if self.parameter[-1] != "embedding":
            target = target[..., self.start : self.start + self.shape[0]]
        with np.errstate(over="ignore"):  # found below, with more to say
            target[...] = value.T if self.is_kernel else value
        narrowed = target.dtype == np.float16 and value.dtype != np.float16
        if narrowed and not np.isfinite(target).all() and np.isfinite(value).all():
            raise ValueError(
                f"the {value.dtype} values of a tensor of {'.'.join(self.parameter)} reach "
                f"{np.abs(value.astype(np.float32)).max():.3g}, over float16's 65504; use bfloat16 or float32"
            )


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """A format's names. Those of a layer have `{layer}` for its number; of a linear map, `{part}` weight or bias."""

    embed: str
    final_norm: str
    lm_head: str
    attention_norm: str
    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str


def places(config: ModelConfig, names: TensorNames) -> dict[str, Place]:
    """Every tensor that a checkpoint of this configuration has, by name."""
    vocab, hidden = config.vocab_size, config.hidden_size
    found = {
        names.embed: Place(("embed", "embedding"), (vocab, hidden)),
        names.final_norm: Place(("final_norm", "scale"), (hidden,)),
    }
    if not config.tie_word_embeddings:
        found[names.lm_head] = Place(("lm_head", "kernel"), (vocab, hidden))
    for layer in range(config.num_layers):
        found |= _layer_places(config, names, layer)
    return found


def _layer_places(config: ModelConfig, names: TensorNames, layer: int) -> dict[str, Place]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    found: dict[str, Place] = {}

    def norm(name: str, parameter: tuple[str, ...], size: int) -> None:
        found[name.format(layer=layer)] = Place(("layers", *parameter, "scale"), (size,), layer)

    def linear(
        name: str, parameter: tuple[str, ...], size: tuple[int, int], bias: bool, start: int = 0, heads: int = 0
    ) -> None:
        kernel, vector = ("layers", *parameter, "kernel"), ("layers", *parameter, "bias")
        found[name.format(layer=layer, part="weight")] = Place(kernel, size, layer, start, heads)
        if bias:
            found[name.format(layer=layer, part="bias")] = Place(vector, size[:1], layer, start, heads)

    qkv, gate_up = ("attention", "qkv"), ("mlp", "gate_up")
    norm(names.attention_norm, ("attention_norm",), hidden)
    linear(names.q, qkv, (q_size, hidden), config.qkv_bias, heads=config.num_q_heads)
    linear(names.k, qkv, (kv_size, hidden), config.qkv_bias, q_size, config.num_kv_heads)
    linear(names.v, qkv, (kv_size, hidden), config.qkv_bias, q_size + kv_size)
    linear(names.out, ("attention", "out"), (hidden, q_size), config.out_bias)
    if config.qk_norm:
        norm(names.q_norm, ("attention", "q_norm"), head_dim)
        norm(names.k_norm, ("attention", "k_norm"), head_dim)
    norm(names.mlp_norm, ("mlp_norm",), hidden)
    linear(names.gate, gate_up, (inner, hidden), config.mlp_bias)
    linear(names.up, gate_up, (inner, hidden), config.mlp_bias, inner)
    linear(names.down, ("mlp", "down"), (hidden, inner), config.mlp_bias)
    return found


def check(places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compare what a checkpoint must have with what it has.

    Args:
        places: from `places`.
        shapes: of the tensors that are there, by name; those that may be ignored left out.
        source: the file or folder, for the message.

    Raises:
        ValueError: tensors are missing or unexpected, or a shape differs; it names them.
    """
    if missing := [name for name in places if name not in shapes]:
        raise ValueError(f"{source} lacks {_some(missing)}; the checkpoint is incomplete, or its configuration wrong")
    if unexpected := [name for name in shapes if name not in places]:
        raise ValueError(
            f"{source} has {_some(unexpected)}, which its configuration has no place for; ignoring a tensor would "
            "change the model"
        )
    for name, place in places.items():
        if tuple(shapes[name]) != place.shape:
            raise ValueError(
                f"{source}: tensor {name!r} has shape {tuple(shapes[name])}, and the configuration makes it "
                f"{place.shape}; the two belong to different models"
            )


def allocate(places: Mapping[str, Place], dtype: np.dtype) -> dict[str, Any]:
    """The parameter tree, nested dicts of arrays in their final shapes and not yet filled."""
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
    for place in places.values():
        columns = place.shape[::-1] if place.is_kernel else place.shape
        columns = (*columns[:-1], columns[-1] + place.start)
        shape = columns if place.layer is None else (place.layer + 1, *columns)
        known = shapes.get(place.parameter, shape)
        shapes[place.parameter] = tuple(max(sizes) for sizes in zip(known, shape, strict=True))
    params: dict[str, Any] = {}
    for path, shape in shapes.items():
        parent = params
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        parent[path[-1]] = _aligned(shape, dtype)
    return params


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array not yet filled that begins where jax can use it as it is on a CPU; NumPy's own would be copied."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
