"""Tiny GGUF files for tests: random weights in Hugging Face's layout, written the way llama.cpp's converter does."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np

Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS, VOCAB = 4, 2, 8, 32, 64, 2, 48


def random_weights(
    seed: int = 0, bias: bool = False, qk_norm: bool = False, head: bool = False
) -> dict[str, np.ndarray]:
    """Weights by GGUF tensor name, [out, in], rows in Hugging Face's order."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {"token_embd.weight": draw(VOCAB, HIDDEN), "output_norm.weight": draw(HIDDEN)}
    if head:
        weights["output.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        sizes = {
            "attn_q": (Q_HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, Q_HEADS * HEAD_DIM),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        for name, size in sizes.items():
            weights[f"blk.{layer}.{name}.weight"] = draw(*size)
        for name in ("attn_norm", "ffn_norm"):
            weights[f"blk.{layer}.{name}.weight"] = draw(HIDDEN)
        for name in ("attn_q", "attn_k", "attn_v") if bias else ():
            weights[f"blk.{layer}.{name}.bias"] = draw(sizes[name][0])
        for name in ("attn_q_norm", "attn_k_norm") if qk_norm else ():
            weights[f"blk.{layer}.{name}.weight"] = draw(HEAD_DIM)
    return weights


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's q and k row order, row by row: pair i's two rows side by side."""
    size = rows.shape[0] // num_heads
    stored = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(size // 2):
            stored[head * size + 2 * pair] = rows[head * size + pair]
            stored[head * size + 2 * pair + 1] = rows[head * size + pair + size // 2]
    return stored


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """The metadata of the tiny model; a change to None removes a key, dots in names are written `__`."""
    values = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": Q_HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{architecture}.{name}": value for name, value in values.items() if value is not None}


def write(
    path: pathlib.Path,
    weights: dict[str, Any],
    keys: dict[str, Any],
    *,
    architecture: str = "llama",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    token_types: list[int] | None = None,
    permute: bool | None = None,
) -> pathlib.Path:
    """Writes a file. `types` quantises tensors; a uint8 array is taken as already quantised to its type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if token_types is not None:
        writer.add_token_list([f"t{i}" for i in range(len(token_types))])
        writer.add_token_types(token_types)
    for name, weight in weights.items():
        kind = (types or {}).get(name)
        if architecture == "llama" if permute is None else permute:
            if "attn_q." in name:
                weight = interleave(weight, Q_HEADS)
            if "attn_k." in name:
                weight = interleave(weight, KV_HEADS)
        if kind is not None and weight.dtype != np.uint8:
            weight = gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
