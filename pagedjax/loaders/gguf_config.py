"""GGUF metadata to `ModelConfig`: which architectures are known, and where each number is kept.

A key of the file's architecture that is not listed here may change the mathematics, so it is refused by name. Key
names and defaults: the GGUF specification (ggml, docs/gguf.md) and, for the rotary keys, what llama.cpp does with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.loaders.gguf_file import GGUFFile
from pagedjax.rope import frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral and SmolLM files are written as "llama"
ROPE_FACTORS = "rope_freqs.weight"  # f32[head_dim / 2]: what each rotary frequency is divided by
TOKEN_TYPE_UNUSED = 5  # tokenizer.ggml.token_type of a padding entry

_READ_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
# Present in real files, and without effect on the computation of a model that has only this value.
_NEUTRAL_KEYS: dict[str, Callable[[Any], bool]] = {
    "vocab_size": lambda value: True,  # the embedding's rows decide
    "tensor_data_layout": lambda value: True,
    "rope.scaling.finetuned": lambda value: True,
    "expert_count": lambda value: value == 0,
    "expert_used_count": lambda value: value == 0,
    "rope.scaling.attn_factor": lambda value: value == 1,
    "rope.scaling.yarn_ext_factor": lambda value: value == 1,
    "rope.scaling.yarn_attn_factor": lambda value: value == 1,
    "attention.causal": bool,
}


def read_config(file: GGUFFile) -> ModelConfig:
    """The `ModelConfig` of an open GGUF file.

    Args:
        file: the open file; its tensor list decides which biases there are and whether the head is tied.

    Returns:
        The configuration. `family` is the file's architecture.

    Raises:
        ValueError: an unknown architecture, a missing key, a key that changes the computation in a way this package
            does not implement, or numbers that contradict each other.
    """
    architecture = file.require("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} has architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)} "
            "(Mistral and SmolLM files are 'llama')"
        )
    _refuse_unknown_keys(file, architecture)
    num_layers = _num_layers(file, architecture)
    hidden_size = _positive_int(file, f"{architecture}.embedding_length")
    num_q_heads = _positive_int(file, f"{architecture}.attention.head_count")
    num_kv_heads = _positive_int(file, f"{architecture}.attention.head_count_kv", num_q_heads)
    head_dim = _head_dim(file, architecture, hidden_size, num_q_heads)
    max_positions = _positive_int(file, f"{architecture}.context_length")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'; the file is incomplete, convert it again")
    embedding_shape = file.shape("token_embd.weight")
    if len(embedding_shape) != 2:
        raise ValueError(f"{file.path}: tensor 'token_embd.weight' has shape {embedding_shape}; it must be a matrix")
    vocab_size = embedding_shape[0]
    return ModelConfig(
        family=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_positive_int(file, f"{architecture}.feed_forward_length"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file, architecture, head_dim, max_positions),
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        tie_word_embeddings="output.weight" not in file.tensors,
        sliding_windows=_sliding_windows(file, architecture, num_layers, max_positions),
        num_tokens=_num_tokens(file, vocab_size),
    )


def _refuse_unknown_keys(file: GGUFFile, architecture: str) -> None:
    prefix = f"{architecture}."
    for key in file:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        neutral = _NEUTRAL_KEYS.get(name)
        if name in _READ_KEYS or (neutral is not None and neutral(file.get(key))):
            continue
        raise ValueError(
            f"{file.path} sets {key!r} to {file.get(key)!r}, which this loader does not implement; "
            "load the model from its safetensors folder, or use a checkpoint without it"
        )


def _positive_int(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.integer(key, default)
    if value == 0:
        raise ValueError(f"{file.path} has {key!r} = 0; it must be at least 1")
    return value


def _num_layers(file: GGUFFile, architecture: str) -> int:
    key = f"{architecture}.block_count"
    num_layers = _positive_int(file, key)
    if num_layers > len(file.tensors):  # before anything is built per layer
        raise ValueError(
            f"{file.path} has {key!r} = {num_layers} and only {len(file.tensors)} tensors; it is incomplete"
        )
    return num_layers


def _head_dim(file: GGUFFile, architecture: str, hidden_size: int, num_q_heads: int) -> int:
    key = f"{architecture}.attention.key_length"
    if key not in file and hidden_size % num_q_heads:
        raise ValueError(
            f"{file.path} has no {key!r}, and embedding_length ({hidden_size}) is not a multiple of head_count "
            f"({num_q_heads}); the head size is unknown"
        )
    head_dim = _positive_int(file, key, hidden_size // num_q_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = file.integer(f"{architecture}.{name}", head_dim)
        if other != head_dim:
            raise ValueError(
                f"{file.path} has {name} = {other} and a head size of {head_dim}; only models where they are equal "
                "are supported"
            )
    return head_dim


def _read_rope(file: GGUFFile, architecture: str, head_dim: int, max_positions: int) -> RopeConfig:
    """The rotary embedding: a scaling declared in the metadata, or llama3's factors kept as a tensor."""
    theta = file.number(f"{architecture}.rope.freq_base", 10000.0)
    factor = file.number(f"{architecture}.rope.scaling.factor", 0.0)
    factor = factor or file.number(f"{architecture}.rope.scale_linear", 0.0) or 1.0
    # A factor without a type is linear: how llama.cpp reads files older than the key.
    kind = file.get(f"{architecture}.rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        plain = RopeConfig(theta=theta)
        return plain if ROPE_FACTORS not in file.tensors else _rope_from_factors(file, plain, head_dim)
    if ROPE_FACTORS in file.tensors:
        raise ValueError(
            f"{file.path} has both the tensor {ROPE_FACTORS!r} and rope.scaling.type {kind!r}; "
            "this loader does not combine them"
        )
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        original = file.integer(f"{architecture}.rope.scaling.original_context_length", max_positions)
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=file.number(f"{architecture}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=file.number(f"{architecture}.rope.scaling.yarn_beta_slow", 1.0),
        )
    raise ValueError(f"{file.path} has rope.scaling.type {kind!r}; supported are 'none', 'linear' and 'yarn'")


def _rope_from_factors(file: GGUFFile, plain: RopeConfig, head_dim: int) -> RopeConfig:
    """The llama3 configuration that gives exactly the tensor's factors.

    GGUF keeps only the result of the rule; its parameters are found again by trying the ones that models were published
    with and comparing every factor, so a tensor made by another rule is refused, not approximated.
    """
    factors = file.read(ROPE_FACTORS)
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} has shape {factors.shape}, expected ({head_dim // 2},)")
    if np.all(factors == 1):
        return plain
    unscaled, _ = frequencies(plain, head_dim)
    for original in (8192, 4096, 2048, 16384, 32768):
        rope = dataclasses.replace(plain, kind="llama3", factor=float(factors.max()), original_max_position=original)
        if np.allclose(unscaled / frequencies(rope, head_dim)[0], factors, rtol=1e-4, atol=0):
            return rope
    raise ValueError(
        f"{file.path}: the factors in {ROPE_FACTORS} (from {factors.min():.4g} to {factors.max():.4g}) are not those "
        "of the llama3 rule with low_freq_factor 1 and high_freq_factor 4; load the model from its safetensors folder"
    )


def _sliding_windows(
    file: GGUFFile, architecture: str, num_layers: int, max_positions: int
) -> tuple[int | None, ...] | None:
    window = file.integer(f"{architecture}.attention.sliding_window", 0)
    if window == 0 or window >= max_positions:
        return None
    if architecture != "llama":
        raise ValueError(
            f"{file.path} has attention.sliding_window = {window}, and GGUF does not say which {architecture} layers "
            "have it; load the model from its safetensors folder"
        )
    return (window,) * num_layers  # Mistral: every layer


def _num_tokens(file: GGUFFile, vocab_size: int) -> int | None:
    """How many embedding rows are tokens: converters fill the tokenizer's list up with unused entries."""
    types = file.get("tokenizer.ggml.token_type")
    if types is None:
        return None
    if len(types) > vocab_size:
        raise ValueError(f"{file.path} has {len(types)} tokens and only {vocab_size} embedding rows")
    used = len(types)
    while used > 0 and types[used - 1] == TOKEN_TYPE_UNUSED:
        used -= 1
    return None if used in (0, vocab_size) else used
