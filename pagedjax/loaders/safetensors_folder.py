"""A folder of safetensors files as one mapping from tensor name to array, one file or many."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors looks up by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from pagedjax.hf_config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsFolder:
    """The tensors of a checkpoint: names, shapes and dtypes from the headers, values read from the mapped file.

    A context manager; the files are open within it.

    Raises:
        FileNotFoundError: no safetensors file, or a shard of the index is missing.
        ValueError: a file is truncated or corrupt, or the index and the shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}  # by tensor name
        self._stack = contextlib.ExitStack()
        if (folder / SINGLE_FILE).is_file():
            shards, index = [SINGLE_FILE], {}
        else:
            index = _read_index(folder)
            shards = sorted(set(index.values()))
        try:
            for shard in shards:
                self._add(folder / shard)
            if lost := [name for name, shard in index.items() if name not in self._files]:
                raise ValueError(f"{INDEX_FILE} lists tensor {lost[0]!r}, and {index[lost[0]]} does not have it")
        except BaseException:
            self._stack.close()
            raise
        slices = {name: file.get_slice(name) for name, file in self._files.items()}
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self.stored_dtypes: dict[str, str] = {name: part.get_dtype() for name, part in slices.items()}  # as in the file

    def _add(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="numpy"))
        except (SafetensorError, OSError, ValueError) as error:
            with path.open("rb") as content:
                pointer = content.read(len(_LFS_POINTER)) == _LFS_POINTER
            found = "is a Git LFS pointer, not the weights" if pointer else f"is truncated or corrupt ({error})"
            raise ValueError(f"{path} {found}; it has {path.stat().st_size} bytes, download it again") from error
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            if name in self._files:
                raise ValueError(f"tensor {name!r} is in two files of {self.folder}; remove the one that is left over")
            self._files[name] = file

    def read(self, name: str) -> np.ndarray:
        """One tensor, in an array of its own; its dtype must be one of DTYPES."""
        return self._files[name].get_tensor(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.clear()
        self._stack.close()


def _read_index(folder: Path) -> dict[str, str]:
    if not (folder / INDEX_FILE).is_file():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".gguf"))
        raise FileNotFoundError(
            f"neither {SINGLE_FILE} nor {INDEX_FILE} in {folder} (weights found: {others or 'none'}); "
            "only safetensors checkpoints are read"
        )
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map; download it again")
    for shard in index.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{folder / INDEX_FILE} names {shard!r}; shards lie beside their index")
    if missing := sorted(shard for shard in set(index.values()) if not (folder / shard).is_file()):
        raise FileNotFoundError(f"{INDEX_FILE} names {', '.join(missing)}, not in {folder}; download what is missing")
    return index
