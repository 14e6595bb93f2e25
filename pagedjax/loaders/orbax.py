"""Checkpoints of this package: the parameters by Orbax, the model's configuration as JSON, and the tokenizer's files.

A folder holds `params/` (Orbax), `pagedjax.json` (the configuration; written last, so a folder without it is not a
finished checkpoint) and the tokenizer's files under their Hugging Face names. Arrays are restored onto whatever devices
the caller names, however they were sharded when they were saved.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.loaders.param_shapes import flatten, float_dtype, param_shapes

CONFIG_FILE = "pagedjax.json"
PARAMS_FOLDER = "params"
FORMAT = "pagedjax"
FORMAT_VERSION = 1


def save(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: dict[str, Any],
    extras: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Writes a checkpoint.

    Args:
        folder: where to; it must not exist, or be empty.
        config: the model.
        params: its parameters: NumPy or JAX arrays, sharded in any way.
        extras: files or folders to copy beside them under their own names: `tokenizer.json`, `chat_template.jinja`,
            `generation_config.json` and the like, which give the loaded model its text.

    Raises:
        ValueError: `folder` has something in it, or the parameters are not those of `config`; the key is named.
    """
    folder = pathlib.Path(folder).absolute()
    check_destination(folder)
    _check_shapes({name: np.shape(leaf) for name, leaf in flatten(params).items()}, config, "the params")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS_FOLDER, params)
    for extra in extras:
        extra = pathlib.Path(extra)
        (shutil.copytree if extra.is_dir() else shutil.copyfile)(extra, folder / extra.name)
    content = {"format": FORMAT, "version": FORMAT_VERSION, "config": dataclasses.asdict(config)}
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], dtype: Any = None, sharding: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a checkpoint written by `save`.

    Args:
        folder: the checkpoint.
        dtype: of every parameter; None keeps what was saved.
        sharding: a `jax.sharding.Sharding` for every parameter, or a tree of them shaped like the parameters. Each
            device then reads only its part. None: NumPy arrays on the host.

    Returns:
        The configuration and the parameters.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is not a finished checkpoint of this package, or its arrays are not those of its
            configuration; the key is named.
    """
    folder = pathlib.Path(folder).absolute()
    config = read_config(folder)
    dtype = None if dtype is None else float_dtype(dtype)
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = _saved_tree(checkpointer, folder / PARAMS_FOLDER)
        _check_shapes({name: tuple(leaf.shape) for name, leaf in flatten(saved).items()}, config, str(folder))
        arguments = _restore_args(saved, dtype, sharding)
        try:
            params = checkpointer.restore(folder / PARAMS_FOLDER, restore_args=arguments)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(
                f"{folder / PARAMS_FOLDER} can't be restored: {error}; it is damaged, or the sharding does not fit it"
            ) from error
    return config, params


def check_destination(folder: str | os.PathLike[str]) -> None:
    """A ValueError unless `save` may write to `folder`: it must not exist, or be an empty folder."""
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; save a checkpoint to a new one")


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` is a finished checkpoint of this package."""
    return (pathlib.Path(folder) / CONFIG_FILE).is_file()


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a checkpoint, without its arrays.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is not a finished checkpoint of this package, or of a version that this one can't read.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; give a checkpoint written by pagedjax.loaders.orbax.save"
        )
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {CONFIG_FILE}: it is not a checkpoint of pagedjax, or saving it was interrupted; "
            "save one with pagedjax.loaders.orbax.save or `python -m pagedjax.convert`"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    kind = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
    if kind != (FORMAT, FORMAT_VERSION):
        raise ValueError(
            f"{path} is of format {kind[0]!r}, version {kind[1]!r}; this package reads {FORMAT!r}, version "
            f"{FORMAT_VERSION}"
        )
    try:
        fields = dict(content["config"])
        windows = fields.pop("sliding_windows")
        return ModelConfig(
            **fields | {"rope": RopeConfig(**fields["rope"])},
            sliding_windows=None if windows is None else tuple(windows),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold a configuration this version of pagedjax knows: {error}") from error


def read_dtype(folder: str | os.PathLike[str]) -> str:
    """The widest dtype among the arrays of a checkpoint, from their metadata.

    Raises:
        ValueError: they can't be read.
    """
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = flatten(_saved_tree(checkpointer, pathlib.Path(folder).absolute() / PARAMS_FOLDER))
    return max((np.dtype(leaf.dtype) for leaf in saved.values()), key=lambda dtype: dtype.itemsize).name


def _saved_tree(checkpointer: ocp.PyTreeCheckpointer, folder: pathlib.Path) -> dict[str, Any]:
    """The metadata of every saved array, nested as the parameters are."""
    try:
        saved = checkpointer.metadata(folder).item_metadata
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} can't be read as an Orbax checkpoint: {error}") from error
    if saved is None:
        raise ValueError(f"{folder} can't be read as an Orbax checkpoint: a file of it is missing or damaged")
    return saved.tree


def _check_shapes(found: dict[str, tuple[int, ...]], config: ModelConfig, where: str) -> None:
    expected = flatten(param_shapes(config))
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        faults = [f"lack {', '.join(missing)}"] * bool(missing) + [f"have the unknown {', '.join(extra)}"] * bool(extra)
        raise ValueError(f"{where}: the parameters {' and '.join(faults)}; they are not those of the configuration")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{where}: {name} has shape {found[name]}, and the configuration makes it {shape}")


def _restore_args(saved: dict[str, Any], dtype: Any, sharding: Any) -> dict[str, Any]:
    def on_host(leaf: Any) -> ocp.RestoreArgs:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype if dtype is None else dtype)

    def on_devices(leaf: Any, leaf_sharding: jax.sharding.Sharding) -> ocp.RestoreArgs:
        return ocp.ArrayRestoreArgs(sharding=leaf_sharding, dtype=leaf.dtype if dtype is None else dtype)

    if sharding is None:
        return jax.tree.map(on_host, saved)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: on_devices(leaf, sharding), saved)
    return jax.tree.map(on_devices, saved, sharding)
