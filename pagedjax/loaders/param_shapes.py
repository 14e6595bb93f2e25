"""The parameter tree as data: the name and shape of every array a `ModelConfig` needs.

What the checkpoint format checks against, and what weights are counted with before there are any. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from pagedjax.config import ModelConfig

PARAM_DTYPES = ("float32", "bfloat16", "float16")


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The decoder's parameters, each as its shape.

    Letters: L layers, V vocab_size, D hidden_size, F intermediate_size, Hq / Hkv heads, Dh head_dim.

    Args:
        config: the model.

    Returns:
        Nested dicts whose leaves are shapes. Kernels are [in, out]; the parameters of all layers are stacked on axis 0.
        The columns of `qkv` are all q heads, then all k heads, then all v heads; those of `gate_up` gate, then up.
    """
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_dim
    qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim

    def norm(size: int) -> dict[str, tuple[int, ...]]:
        return {"scale": (layers, size)}

    def linear(size_in: int, size_out: int, bias: bool) -> dict[str, tuple[int, ...]]:
        kernel: dict[str, tuple[int, ...]] = {"kernel": (layers, size_in, size_out)}
        return kernel | ({"bias": (layers, size_out)} if bias else {})

    attention = {
        "qkv": linear(hidden, qkv_size, config.qkv_bias),  # [L, D, (Hq + 2 Hkv) Dh]
        "out": linear(q_size, hidden, config.out_bias),  # [L, Hq Dh, D]
    }
    if config.qk_norm:
        attention |= {"q_norm": norm(config.head_dim), "k_norm": norm(config.head_dim)}
    mlp = {
        "gate_up": linear(hidden, 2 * inner, config.mlp_bias),  # [L, D, 2 F]
        "down": linear(inner, hidden, config.mlp_bias),  # [L, F, D]
    }
    shapes: dict[str, Any] = {
        "embed": {"embedding": (config.vocab_size, hidden)},  # [V, D]
        "layers": {"attention_norm": norm(hidden), "attention": attention, "mlp_norm": norm(hidden), "mlp": mlp},
        "final_norm": {"scale": (hidden,)},
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = {"kernel": (hidden, config.vocab_size)}  # [D, V]
    return shapes


def map_shapes(make: Callable[[tuple[int, ...]], Any], shapes: dict[str, Any]) -> dict[str, Any]:
    """The same tree with `make(shape)` at every leaf."""
    return {key: map_shapes(make, value) if isinstance(value, dict) else make(value) for key, value in shapes.items()}


def float_dtype(dtype: Any) -> np.dtype:
    """`dtype` (a name or a type) as a NumPy dtype; a ValueError unless it is one that parameters can have."""
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is not a dtype; parameters can be {', '.join(PARAM_DTYPES)}") from error
    if found.name not in PARAM_DTYPES:
        raise ValueError(f"dtype is {found.name}; parameters can be {', '.join(PARAM_DTYPES)}")
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The tree's leaves by dotted name, for example "layers.mlp.down.kernel"."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
