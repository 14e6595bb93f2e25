"""What a model is, from whatever names it: a value, a file or folder, with or without weights, or a known name.

Readers are imported when they are needed; that of a config.json needs no jax.
"""

from __future__ import annotations

import os
import pathlib

from pagedjax.capacity.kv_shape import PARAM_DTYPES, KVShape
from pagedjax.config import ModelConfig

Model = ModelConfig | KVShape | str | os.PathLike[str]


def read_model(model: Model, dtype: str | None) -> tuple[ModelConfig | KVShape, str]:
    """The sizes of a model, and the dtype that its weights have once they are loaded.

    Args:
        model: a `ModelConfig`, a `KVShape`; the path of a config.json, a Hugging Face folder (its weights may be
            missing), a GGUF file or a checkpoint of this package; or a name that `LLM.load` knows.
        dtype: instead of the stored one.

    Raises:
        ValueError: there is no such model, it can't be read, or its dtype is unknown and not given.
    """
    if dtype is not None and dtype not in PARAM_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {PARAM_DTYPES}")
    if isinstance(model, KVShape):
        return model, dtype or model.dtype
    if isinstance(model, ModelConfig):
        config, stored = model, None
    elif isinstance(model, (str, os.PathLike)):
        config, stored = _read_path(model)
    else:
        raise ValueError(
            f"model={model!r} is a {type(model).__name__}; give a ModelConfig, a KVShape, a path or a known name"
        )
    dtype = dtype or ("float32" if stored == "float64" else stored)
    if dtype is None:
        raise ValueError("the model does not say what dtype its weights have; give dtype='bfloat16' or another")
    return config, dtype


def _read_path(source: str | os.PathLike[str]) -> tuple[ModelConfig, str | None]:
    path = pathlib.Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _read_json(path)
    from pagedjax.loaders.checkpoint import resolve

    path, kind = resolve(source)
    if kind == "gguf":
        return _read_gguf(path)
    return _read_json(path / ("config.json" if kind == "hf" else "pagedjax.json"))


def _read_json(path: pathlib.Path) -> tuple[ModelConfig, str | None]:
    """A config.json, or the pagedjax.json of a checkpoint of this package."""
    from pagedjax import hf_config

    content = hf_config.read_json(path)
    if content.get("format") == "pagedjax":
        from pagedjax.loaders import orbax

        return orbax.read_config(path.parent), orbax.read_dtype(path.parent)
    read = hf_config.parse(content)
    return read.model, read.dtype


def _read_gguf(path: pathlib.Path) -> tuple[ModelConfig, str]:
    from pagedjax.loaders import gguf
    from pagedjax.loaders.gguf_config import read_config
    from pagedjax.loaders.gguf_file import GGUFFile

    file = GGUFFile(path)
    return read_config(file), gguf.default_dtype(file)
