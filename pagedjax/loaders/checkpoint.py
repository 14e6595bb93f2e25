"""Checkpoints from wherever they are: one function that looks at a source, says what it is and loads it.

Text is no part of this: `pagedjax.text` reads the tokenizer from the `source_path` that a checkpoint names.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Literal

from pagedjax.config import ModelConfig
from pagedjax.loaders import hub

Kind = Literal["hf", "gguf", "orbax"]


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded model: what it is, its parameters, and where they came from."""

    config: ModelConfig
    params: dict[str, Any]  # NumPy arrays on the host
    source_path: pathlib.Path  # a folder, or a .gguf file; of an alias, the file it was fetched to
    kind: Kind


def load_checkpoint(source: str | os.PathLike[str], dtype: Any = None, *, progress: bool = True) -> Checkpoint:
    """Loads a model from an alias, a folder or a file.

    Args:
        source: an alias (`pagedjax.loaders.hub.ALIASES`; fetched on first use), a Hugging Face folder with safetensors,
            a .gguf file, or a checkpoint saved by this package. An alias wins over a path of the same name; write
            `./name` for the path.
        dtype: of every parameter; None keeps the stored one (float32 for a quantised GGUF).
        progress: whether long steps show a bar on stderr.

    Returns:
        The configuration, the parameters on the host, and where they came from.

    Raises:
        ValueError: the source is none of these, or can't be loaded; the message says why.
        pagedjax.loaders.hub.FetchError: an alias could not be fetched.
    """
    path, kind = resolve(source, progress=progress)
    # Imported when needed: Orbax alone takes more than a second.
    if kind == "gguf":
        from pagedjax.loaders import gguf

        config, params = gguf.load(path, dtype, progress=progress)
    elif kind == "orbax":
        from pagedjax.loaders import orbax

        config, params = orbax.load(path, dtype)
    else:
        from pagedjax.loaders import hf

        config, params = hf.load(path, dtype, progress=progress)
    return Checkpoint(config, params, path, kind)


def resolve(source: str | os.PathLike[str], *, progress: bool = True) -> tuple[pathlib.Path, Kind]:
    """Finds where a source is and what it is, without loading it; an alias is fetched.

    Args:
        source, progress: as for `load_checkpoint`.

    Returns:
        The path, and "hf", "gguf" or "orbax".

    Raises:
        As `load_checkpoint`.
    """
    if source in hub.ALIASES:
        return hub.fetch(str(source), progress=progress), "gguf"
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        return path, _folder_kind(path)
    if path.is_file():
        return path, _file_kind(path)
    raise ValueError(
        f"{str(source)!r} is neither a file or folder nor a known model name; the names are "
        f"{', '.join(sorted(hub.ALIASES))}"
    )


def _folder_kind(folder: pathlib.Path) -> Kind:
    if (folder / "pagedjax.json").is_file():
        return "orbax"
    if (folder / "config.json").is_file():
        return "hf"
    if files := sorted(folder.glob("*.gguf")):
        raise ValueError(f"{folder} is a folder with GGUF files; give the path of one: {files[0]}")
    if (folder / "_CHECKPOINT_METADATA").is_file() or (folder / "params").is_dir():
        raise ValueError(
            f"{folder} has Orbax arrays and no pagedjax.json, so the model they belong to is unknown; "
            "save it with pagedjax.loaders.orbax.save"
        )
    raise ValueError(
        f"{folder} is not a checkpoint: it has neither config.json (Hugging Face) nor pagedjax.json (saved by this "
        "package)"
    )


def _file_kind(path: pathlib.Path) -> Kind:
    from pagedjax.loaders.gguf_file import is_gguf

    if path.suffix == ".gguf" or is_gguf(path):
        return "gguf"
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} is one file of a checkpoint; give its folder, {path.parent}, with config.json in it")
    raise ValueError(f"{path} is not a GGUF file; give a .gguf file, or a checkpoint's folder")
