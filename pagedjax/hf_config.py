"""Read a Hugging Face `config.json`: the many ways to write one architecture, made one `ModelConfig`.

Where a key is absent its default is that of the family's configuration class in transformers. A setting that would
change the model's output and is not supported is refused by name, never skipped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedjax.config import ModelConfig
from pagedjax.hf_rope import FULL_ATTENTION, SLIDING_ATTENTION, rope_config

DTYPES = ("float32", "bfloat16", "float16", "float64")

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class HFConfig:
    """What a checkpoint's `config.json` and `generation_config.json` say."""

    model: ModelConfig
    dtype: str | None  # of the stored weights, as declared; one of DTYPES
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of both files, ascending, those inside the vocabulary


@dataclasses.dataclass(frozen=True)
class _Family:
    """A `model_type`: its causal-LM class, its parts, and the defaults of its keys in transformers."""

    architecture: str
    max_position_embeddings: int
    num_key_value_heads: int | None = None  # None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    slides: bool = False  # whether layers slide where `use_sliding_window` is absent
    max_window_layers: int = 0  # the first layer that slides
    qkv_bias: bool = False
    attention_bias_key: bool = False  # whether `attention_bias` is read (it covers q, k, v and the output)
    mlp_bias_key: bool = False
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, attention_bias_key=True, mlp_bias_key=True),
    "mistral": _Family("MistralForCausalLM", 131072, num_key_value_heads=8, sliding_window=4096, slides=True),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        32768,
        num_key_value_heads=32,
        sliding_window=4096,
        max_window_layers=28,
        qkv_bias=True,
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        32768,
        num_key_value_heads=32,
        head_dim=128,
        sliding_window=4096,
        max_window_layers=28,
        attention_bias_key=True,
        qk_norm=True,
    ),
}


def read(folder: str | Path) -> HFConfig:
    """Read `config.json` and, where there is one, `generation_config.json`.

    Args:
        folder: the checkpoint.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ValueError: not JSON, or what `parse` refuses.
    """
    folder = Path(folder)
    generation = folder / "generation_config.json"
    return parse(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}; give the folder of a Hugging Face checkpoint")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def parse(config: Json, generation: Json | None = None) -> HFConfig:
    """Read the parsed files.

    Args:
        config: of `config.json`.
        generation: of `generation_config.json`, if there is one; its end tokens are added.

    Raises:
        ValueError: an architecture or setting that is not supported, or a value that makes no sense.
    """
    model = model_config(config)
    flat = _flatten(config)
    ends = {
        token
        for source in (flat, generation or {})
        for token in _token_ids(source, "eos_token_id")
        if token < model.vocab_size
    }
    starts = _token_ids(flat, "bos_token_id")
    return HFConfig(model, _dtype(flat), starts[0] if starts else None, tuple(sorted(ends)))


def model_config(config: Json) -> ModelConfig:
    """The architecture of a `config.json`.

    Args:
        config: the parsed file; a text model nested under `text_config` is read from there.

    Raises:
        ValueError: an architecture, quantisation, activation, rope kind or layer type that is not supported, a missing
            size, or sizes that contradict each other.
    """
    _refuse_quantised(config)
    config = _flatten(config)
    name, family = _family(config)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act is {activation!r}; the {name} family is supported with 'silu' only")
    num_layers = _size(config, "num_hidden_layers")
    hidden_size, num_q_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    attention_bias = family.attention_bias_key and bool(config.get("attention_bias", False))
    max_position = _size(config, "max_position_embeddings", family.max_position_embeddings)
    windows = _sliding_windows(config, family, num_layers)
    return ModelConfig(
        family=name,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=_size(config, "num_key_value_heads", family.num_key_value_heads or num_q_heads, null=num_q_heads),
        head_dim=_head_dim(config, family, hidden_size, num_q_heads),
        max_position_embeddings=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", family.rms_norm_eps)),
        rope=rope_config(config, max_position, windows),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.mlp_bias_key and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tie_word_embeddings)),
        sliding_windows=windows if any(windows) else None,
    )


def _flatten(config: Json) -> Json:
    """A text model nested in a larger one, with the keys that only the outer level has (dtype, end tokens, tying)."""
    nested = config.get("text_config")
    if not nested:
        return config
    outer = {key: value for key, value in config.items() if key not in ("text_config", "architectures")}
    return {**outer, **nested}


def _family(config: Json) -> tuple[str, _Family]:
    name, architectures = config.get("model_type"), config.get("architectures") or []
    if name is None:  # files that only name the class
        name = next((key for key, family in _FAMILIES.items() if family.architecture in architectures), None)
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if name is None or family is None or (architectures and family.architecture not in architectures):
        supported = ", ".join(f"{key} ({value.architecture})" for key, value in _FAMILIES.items())
        raise ValueError(f"model_type {name!r} with architectures {architectures} is not supported; use {supported}")
    return name, family


def _refuse_quantised(config: Json) -> None:
    for level in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            found = level.get(key)
            if not found:
                continue
            found = found if isinstance(found, Mapping) else {"quant_method": found}
            bits = [name for name in ("load_in_8bit", "load_in_4bit") if found.get(name)]  # old bitsandbytes files
            method = found.get("quant_method") or ("bitsandbytes" if bits else "unnamed")
            raise ValueError(
                f"the checkpoint is quantised ({key}: {method}), which is not supported; "
                "load the float16, bfloat16 or float32 original, or a GGUF file"
            )


def _size(config: Json, key: str, default: int | None = None, *, null: int | None = None) -> int:
    """A positive integer; `default` where the key is absent, `null` where it is null."""
    value = config.get(key, default)
    if value is None:
        value = null if key in config and null is not None else default
    if value is None:
        raise ValueError(f"config.json has no {key!r}; add it, or take the file from the original checkpoint")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key} is {value!r} in config.json; it must be a positive integer")
    return value


def _head_dim(config: Json, family: _Family, hidden_size: int, num_q_heads: int) -> int:
    default = None if "head_dim" in config else family.head_dim
    if config.get("head_dim", default) is None and hidden_size % num_q_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_q_heads}) and there is no "
            "head_dim; give head_dim"
        )
    return _size(config, "head_dim", default or hidden_size // num_q_heads)


def _sliding_windows(config: Json, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """One entry a layer. `layer_types` wins; else `use_sliding_window`, `max_window_layers` and the family decide.

    A Llama `sliding_window` with neither `layer_types` nor `use_sliding_window` is without effect, as in transformers.
    """
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return _windows_of_types(layer_types, config.get("sliding_window", family.sliding_window), num_layers)
    slides = config.get("use_sliding_window", family.slides)
    window = config.get("sliding_window", family.sliding_window)
    if not slides or window is None:
        return (None,) * num_layers
    window = _size(config, "sliding_window", window)
    first = config.get("max_window_layers", family.max_window_layers)
    if not isinstance(first, int) or first < 0:
        raise ValueError(f"max_window_layers is {first!r}; it must be a layer number, the first that slides")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _windows_of_types(layer_types: Any, window: Any, num_layers: int) -> tuple[int | None, ...]:
    if not isinstance(layer_types, (list, tuple)) or len(layer_types) != num_layers:
        length = len(layer_types) if isinstance(layer_types, (list, tuple)) else f"is {layer_types!r}: no"
        raise ValueError(f"layer_types has {length} entries for num_hidden_layers={num_layers}; give one a layer")
    for layer, kind in enumerate(layer_types):
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ValueError(
                f"layer_types[{layer}] is {kind!r}; supported: {FULL_ATTENTION!r} and {SLIDING_ATTENTION!r}"
            )
    if SLIDING_ATTENTION not in layer_types:
        return (None,) * num_layers
    window = _size({"sliding_window": window}, "sliding_window")
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in layer_types)


def _token_ids(config: Json, key: str) -> list[int]:
    value = config.get(key)
    tokens = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{key} is {value!r}; it must be a token id or a list of them")
    return list(tokens)


def _dtype(config: Json) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name in (None, "auto"):
        return None
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r} in config.json; supported: {', '.join(DTYPES)}")
    return name
