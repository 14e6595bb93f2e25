"""Writes a model as a Hugging Face folder, the loaders' work undone: names, transposition, separate projections."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pagedjax.config import ModelConfig


def write_llama(folder: pathlib.Path, config: ModelConfig, params: dict[str, Any], num_shards: int = 1) -> None:
    """config.json and safetensors, in shards with an index where there are several."""
    tensors = {
        "model.embed_tokens.weight": params["embed"]["embedding"],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    layers = params["layers"]
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}."
        q, k, v = np.split(layers["attention"]["qkv"]["kernel"][number].T, [q_size, q_size + kv_size])
        gate, up = np.split(layers["mlp"]["gate_up"]["kernel"][number].T, 2)
        tensors |= {
            f"{prefix}input_layernorm.weight": layers["attention_norm"]["scale"][number],
            f"{prefix}post_attention_layernorm.weight": layers["mlp_norm"]["scale"][number],
            f"{prefix}self_attn.q_proj.weight": q,
            f"{prefix}self_attn.k_proj.weight": k,
            f"{prefix}self_attn.v_proj.weight": v,
            f"{prefix}self_attn.o_proj.weight": layers["attention"]["out"]["kernel"][number].T,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": layers["mlp"]["down"]["kernel"][number].T,
        }
    _write_tensors(folder, {name: np.ascontiguousarray(value) for name, value in tensors.items()}, num_shards)
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(settings))


def _write_tensors(folder: pathlib.Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    files = {
        name: f"model-{index % num_shards + 1:05}-of-{num_shards:05}.safetensors" for index, name in enumerate(names)
    }
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
