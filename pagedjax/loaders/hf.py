"""Weights from a Hugging Face folder: safetensors read from mapped files, fused and stacked as the decoder wants them.

The headers are compared with the configuration before any value is read. The peak is the parameters plus one tensor.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tqdm

from pagedjax import hf_config
from pagedjax.config import ModelConfig
from pagedjax.loaders import layout
from pagedjax.loaders.param_shapes import float_dtype
from pagedjax.loaders.safetensors_folder import DTYPES, SafetensorsFolder

PROGRESS_DELAY_SECONDS = 1.0  # loads shorter than this show no bar
# A text model alone, in the three layouts of multimodal checkpoints, and a base model saved without its head's wrapper.
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
QUANTISED_SUFFIXES = (
    *("weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "input_scale", "k_scale", "v_scale"),
    *("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "SCB", "weight_format"),
)


def load(
    folder: str | os.PathLike[str], dtype: Any = None, *, progress: bool = True
) -> tuple[ModelConfig, dict[str, Any]]:
    """Load a checkpoint.

    Args:
        folder: holds `config.json` and `model.safetensors`, or the shards and `model.safetensors.index.json`.
        dtype: of every parameter: float32, bfloat16 or float16. None: the stored one, bit for bit; of a checkpoint
            that mixes several, the one that `config.json` declares, else the widest (float64 becomes float32).
        progress: whether a load of more than a second shows a bar on stderr.

    Returns:
        The configuration, and the parameters as NumPy arrays on the host: nested dicts, kernels [in, out], layers
        stacked on axis 0. Where `config.json` says that the head is tied and the checkpoint holds another one, the
        configuration returned says untied, and there is a warning (transformers does the same).

    Raises:
        FileNotFoundError: no `config.json`, no weights, or a missing shard.
        ValueError: an unsupported configuration, a corrupt file, a quantised tensor, or tensors that are missing,
            unexpected or of another shape than the configuration makes them; each is named.
    """
    folder = Path(folder)
    target = None if dtype is None else float_dtype(dtype)
    declared = hf_config.read(folder)
    with SafetensorsFolder(folder) as tensors:
        _refuse_quantised(tensors)
        config, names, ignored = _resolve_head(declared.model, tensors, _names(tensors))
        places = layout.places(config, names)
        shapes = {name: shape for name, shape in tensors.shapes.items() if name not in ignored}
        layout.check(places, shapes, str(folder))
        params = layout.allocate(places, target or _stored_dtype(tensors, places, declared.dtype))
        stored_order = [name for name in tensors.shapes if name in places]
        for name in tqdm.tqdm(
            stored_order,
            desc=f"loading {folder.name}",
            unit="tensor",
            delay=PROGRESS_DELAY_SECONDS,
            disable=not progress,
        ):
            places[name].write(params, tensors.read(name))
    return config, params


def _stored_dtype(tensors: SafetensorsFolder, places: dict[str, layout.Place], declared: str | None) -> np.dtype:
    stored = {DTYPES[tensors.stored_dtypes[name]] for name in places}
    if declared in stored:
        stored = {declared}
    widest = reduce(jnp.promote_types, (jnp.dtype(name) for name in sorted(stored)))
    return np.dtype(np.float32) if widest == np.float64 else widest


def _names(tensors: SafetensorsFolder) -> layout.TensorNames:
    """The names of transformers, under the prefix this checkpoint uses."""
    norm = "layers.0.input_layernorm.weight"
    prefix = next((prefix for prefix in PREFIXES if prefix + norm in tensors.shapes), PREFIXES[0])
    heads = ("lm_head.weight", "language_model.lm_head.weight")
    layer = prefix + "layers.{layer}."
    return layout.TensorNames(
        embed=prefix + "embed_tokens.weight",
        final_norm=prefix + "norm.weight",
        lm_head=next((name for name in heads if name in tensors.shapes), heads[0]),
        attention_norm=layer + "input_layernorm.weight",
        q=layer + "self_attn.q_proj.{part}",
        k=layer + "self_attn.k_proj.{part}",
        v=layer + "self_attn.v_proj.{part}",
        out=layer + "self_attn.o_proj.{part}",
        q_norm=layer + "self_attn.q_norm.weight",
        k_norm=layer + "self_attn.k_norm.weight",
        mlp_norm=layer + "post_attention_layernorm.weight",
        gate=layer + "mlp.gate_proj.{part}",
        up=layer + "mlp.up_proj.{part}",
        down=layer + "mlp.down_proj.{part}",
    )


def _refuse_quantised(tensors: SafetensorsFolder) -> None:
    for name, dtype in tensors.stored_dtypes.items():
        if name.rsplit(".", 1)[-1] in QUANTISED_SUFFIXES:
            raise ValueError(
                f"{tensors.folder} has tensor {name!r}, a part of quantised weights, which are not supported; load "
                "the original checkpoint"
            )
        if dtype not in DTYPES:
            raise ValueError(
                f"{tensors.folder}: tensor {name!r} is {dtype}; supported: {', '.join(DTYPES)}. Quantised weights are "
                "not; load the original checkpoint"
            )


def _resolve_head(
    config: ModelConfig, tensors: SafetensorsFolder, names: layout.TensorNames
) -> tuple[ModelConfig, layout.TensorNames, set[str]]:
    """What a tied head and the tensors that are there come to, as in transformers; and the tensors to ignore."""
    # Frequencies that old Llama checkpoints hold; they follow from the configuration.
    ignored = {name for name in tensors.shapes if name.endswith(".rotary_emb.inv_freq")}
    has_embed, has_head = names.embed in tensors.shapes, names.lm_head in tensors.shapes
    if not config.tie_word_embeddings:
        if has_embed and not has_head:
            raise ValueError(
                f"{tensors.folder} lacks tensor {names.lm_head!r} and its config.json does not say "
                "tie_word_embeddings=true; if the model's head is its embedding, add that"
            )
        return config, names, ignored
    if has_head and not has_embed:
        return config, dataclasses.replace(names, embed=names.lm_head), ignored
    if has_head:
        if _same(tensors, names.embed, names.lm_head):
            return config, names, ignored | {names.lm_head}
        warnings.warn(
            f"{tensors.folder}: config.json ties the head to the embedding, but {names.lm_head!r} differs from "
            f"{names.embed!r}; both are used. Set tie_word_embeddings=false there to make it right",
            stacklevel=3,
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return config, names, ignored


def _same(tensors: SafetensorsFolder, first: str, second: str) -> bool:
    if tensors.shapes[first] != tensors.shapes[second]:
        return False
    return np.array_equal(tensors.read(first), tensors.read(second))
