"""Write the tiny reference checkpoints under `tiny/`: random weights, and the logits transformers computes with them.

The tests read the files only. To write them again, in a throw-away environment (not a dependency of this package):

    pip install torch==2.13.0 transformers==5.24.0
    python tests/data/make_tiny.py

Each folder has `config.json` and `model.safetensors` as `save_pretrained` leaves them, and `reference.npz`: `tokens`
i32[40] and `logits` f32[40, 128], computed in float32 with eager attention. `rope.json` has the inverse frequencies
and the scaling of transformers for the `config.json` forms of published models and some odd ones.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FOLDER = pathlib.Path(__file__).parent / "tiny"
NUM_TOKENS = 40
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


# model_type, stored dtype, what differs from SIZES. Windows are shorter than the prompt, and rope's original context
# too, so that a reader who ignores one fails.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_llama3": (
        "llama",
        "bfloat16",
        {
            **_rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "eos_token_id": [2, 5],
        },
    ),
    "llama_bias_tied": (
        "llama",
        "float32",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_attention_heads": 3, "head_dim": 8}
        | {"hidden_size": 24, "num_key_value_heads": 1},
    ),
    "mistral_window": ("mistral", "bfloat16", {"sliding_window": 8, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", "bfloat16", {"tie_word_embeddings": True}),
    "qwen3_window": (
        "qwen3",
        "bfloat16",
        {"head_dim": 16, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 12}
        | {"max_window_layers": 1},
    ),
    "llama_linear": ("llama", "bfloat16", _rope("linear", factor=4.0)),
    "llama_yarn": (
        "llama",
        "bfloat16",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.5),
    ),
    "llama_dynamic": ("llama", "float16", _rope("dynamic", factor=2.0)),
}

_BIG = {"hidden_size": 2048, "num_attention_heads": 32, "max_position_embeddings": 131072}
_LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {**_BIG, "rope_theta": 100000},
    "default 96": {**_BIG, "head_dim": 96},
    "linear": {**_BIG, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "llama3": {**_BIG, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    "dynamic": {**_BIG, "max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "dynamic long": {
        **_BIG,
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "seq_len": 5000,
    },
    "yarn": {**_BIG, "rope_theta": 1e6, "head_dim": 128, "rope_scaling": _YARN},
    "yarn factor from lengths": {**_BIG, "rope_scaling": {**_YARN, "factor": None}},
    "yarn attention factor": {**_BIG, "rope_scaling": {**_YARN, "attention_factor": 1.25}},
    "yarn mscale": {**_BIG, "rope_scaling": {**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn not truncated": {
        **_BIG,
        "rope_scaling": {**_YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    },
    "yarn from the first pair": {**_BIG, "rope_scaling": {**_YARN, "original_max_position_embeddings": 128}},
    "yarn past the last pair": {
        **_BIG,
        "max_position_embeddings": 524288,
        "rope_theta": 1000.0,
        "rope_scaling": {**_YARN, "original_max_position_embeddings": 131072},
    },
    "yarn narrow": {**_BIG, "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}},
}


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that attention is peaked and every bias and norm matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5))


def write_model(name: str, seed: int) -> None:
    """One checkpoint and its logits."""
    kind, dtype, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(FOLDER / name)
    if not isinstance(config.eos_token_id, list):  # one folder keeps a generation_config.json
        (FOLDER / name / "generation_config.json").unlink()
    stored = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = stored(tokens).logits[0]
    np.savez(FOLDER / name / "reference.npz", tokens=tokens[0].numpy().astype(np.int32), logits=logits.numpy())
    print(name, f"largest logit {logits.abs().max():.1f}")


def write_ropes() -> None:
    """The frequencies of every entry of ROPES."""
    references = []
    for name, entry in ROPES.items():
        settings = json.loads(json.dumps(entry))
        seq_len = settings.pop("seq_len", None)
        rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**json.loads(json.dumps(settings))))
        if seq_len is not None:
            rotary(torch.zeros(1), torch.arange(seq_len)[None])
        references.append(
            {
                "name": name,
                "config": settings,
                "seq_len": seq_len,
                "inv_freq": [float(f"{value:.9g}") for value in rotary.inv_freq.tolist()],
                "scaling": float(rotary.attention_scaling),
            }
        )
    (FOLDER / "rope.json").write_text("[\n" + ",\n".join(json.dumps(entry) for entry in references) + "\n]\n")


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, name in enumerate(MODELS):
        write_model(name, seed)
    write_ropes()
