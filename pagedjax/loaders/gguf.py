"""Weights from a GGUF file: dequantised, in Hugging Face's row order, fused and stacked as the decoder wants them.

The peak is the parameters plus one dequantised tensor. llama.cpp stores the q and k rows of `llama` files for a
rotation of neighbouring pairs; they are put back for the rotation of halves that the decoder uses.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tqdm

from pagedjax.config import ModelConfig
from pagedjax.loaders import layout
from pagedjax.loaders.gguf_config import ROPE_FACTORS, read_config
from pagedjax.loaders.gguf_file import GGUFFile
from pagedjax.loaders.param_shapes import float_dtype

# Letters: Hq query heads, Hkv key/value heads, Dh head_dim.

PERMUTED_ARCHITECTURES = ("llama",)  # the others are written in Hugging Face's row order
NAMES = layout.TensorNames(
    embed="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    attention_norm="blk.{layer}.attn_norm.weight",
    q="blk.{layer}.attn_q.{part}",
    k="blk.{layer}.attn_k.{part}",
    v="blk.{layer}.attn_v.{part}",
    out="blk.{layer}.attn_output.{part}",
    q_norm="blk.{layer}.attn_q_norm.weight",
    k_norm="blk.{layer}.attn_k_norm.weight",
    mlp_norm="blk.{layer}.ffn_norm.weight",
    gate="blk.{layer}.ffn_gate.{part}",
    up="blk.{layer}.ffn_up.{part}",
    down="blk.{layer}.ffn_down.{part}",
)
IGNORED_TENSORS = (ROPE_FACTORS,)  # already part of the configuration
PROGRESS_DELAY_SECONDS = 1.0  # loads shorter than this show no bar


def load(
    path: str | os.PathLike[str], dtype: Any = None, *, progress: bool = True
) -> tuple[ModelConfig, dict[str, Any]]:
    """Loads a GGUF file.

    Args:
        path: the file. Architectures: llama (Mistral and SmolLM too), qwen2, qwen3; any tensor type the `gguf` package
            dequantises, chosen per tensor.
        dtype: of every parameter. None: bfloat16 if every matrix in the file is BF16, else float32, which holds every
            other type's values exactly.
        progress: whether a load of more than a second shows a bar on stderr.

    Returns:
        The configuration, and the parameters as NumPy arrays on the host (nested dicts, kernels [in, out], layers
        stacked on axis 0).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not GGUF, is truncated, or holds something this package does not implement; missing,
            unexpected and misshapen tensors are named.
    """
    file = GGUFFile(path)
    config = read_config(file)
    places = layout.places(config, NAMES)
    shapes = {name: file.shape(name) for name in file.tensors if name not in IGNORED_TENSORS}
    layout.check(places, shapes, str(file.path))
    dtype = float_dtype(default_dtype(file) if dtype is None else dtype)
    params = layout.allocate(places, dtype)
    permuted = config.family in PERMUTED_ARCHITECTURES
    bar = tqdm.tqdm(
        places.items(),
        desc=f"loading {file.path.name}",
        unit="tensor",
        delay=PROGRESS_DELAY_SECONDS,
        disable=not progress,
        leave=False,
    )
    for name, place in bar:
        value = file.read(name)
        if permuted and place.rotary_heads:
            value = unpermute(value, place.rotary_heads)
        place.write(params, value)
    return config, params


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of a llama.cpp q or k projection back into Hugging Face's order.

    llama.cpp stores row i of a head's first half at 2i, and row i of its second half at 2i + 1.

    Args:
        rows: [num_heads * Dh, ...], a weight in [out, in] order or a bias.
        num_heads: the projection's own heads: Hq for q, Hkv for k.

    Returns:
        The same rows, [num_heads * Dh, ...], each head's first half first.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, Dh / 2, half, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def default_dtype(file: GGUFFile) -> str:
    """What the parameters become where no dtype is asked for."""
    matrices = (name for name in file.tensors if len(file.shape(name)) == 2)
    return "bfloat16" if all(file.type_name(name) == "BF16" for name in matrices) else "float32"
