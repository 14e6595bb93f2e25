"""A GGUF file opened for reading: metadata as plain values, tensors as memory-mapped bytes that dequantise on demand.

The `gguf` package parses the format; this module adds what a loader of files from anywhere needs: every read is
checked against the file's length (so a truncated or corrupt file is an error, never a hang or a silent short read), and
errors name the file and the tensor.
"""

from __future__ import annotations

import math
import os
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

MAGIC = b"GGUF"
ROWS_AS_ONE = 16  # at most, in a tensor that is dequantised
MIN_FILE_BYTES = 24  # magic, version, tensor count, metadata count


class _CheckedReader(gguf.GGUFReader):
    """The package's reader, with reads past the end of the file and unknown tensor types refused by name."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if type(self.data) is not np.ndarray:  # the same mapping; slicing a np.memmap is three times slower
            self.data: Any = np.asarray(self.data)
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        self._check_end(end)
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """As the package's, with arrays read in one go: vocabularies have 100,000s of entries."""
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start = orig_offs + item_type.nbytes + count.nbytes
        kind = gguf.GGUFValueType(int(item_type[0]))
        if kind == gguf.GGUFValueType.STRING:
            items, end = self._strings(start, int(count[0]))
        elif kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], int(count[0]))
            items, end = list(values[:, None]), start + values.nbytes
        else:
            raise ValueError(f"it has an array of {kind.name} at byte {orig_offs}; only plain arrays are supported")
        types = [gguf.GGUFValueType.ARRAY, kind]
        return end - orig_offs, [item_type, count, *items], list(range(2, 2 + len(items))), types

    def _strings(self, offset: int, count: int) -> tuple[list[np.ndarray], int]:
        swapped = self.byte_order == "S"
        length_of = struct.Struct(">Q" if swapped == (sys.byteorder == "little") else "<Q").unpack_from
        strings: list[np.ndarray] = []
        for _ in range(count):
            self._check_end(offset + 8)
            end = offset + 8 + length_of(self.data, offset)[0]
            self._check_end(end)
            strings.append(self.data[offset + 8 : end])
            offset = end
        return strings, offset

    def _check_end(self, end: int) -> None:
        if end > self.data.size:
            raise ValueError(f"it has {self.data.size} bytes and its header points at byte {end}")

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        known = {int(kind) for kind in gguf.GGMLQuantizationType}
        for field in fields:
            raw_type = int(field.parts[4][0])
            if raw_type not in known:
                raise ValueError(
                    f"tensor {field.name!r} has the unknown type number {raw_type}; a newer gguf package may know it"
                )
        super()._build_tensors(start_offs, fields)


class GGUFFile:
    """An open GGUF file.

    Args:
        path: the file; it is memory-mapped, so it must stay where it is while this object is used.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not GGUF, is truncated or corrupt, is one shard of several, or is big-endian.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        _check_magic(self.path)
        try:
            reader = _CheckedReader(self.path)
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            raise ValueError(f"{self.path} is truncated or corrupt: {error}; fetch or convert it again") from error
        if reader.byte_order != "I":
            raise ValueError(f"{self.path} is a GGUF file of the other byte order; convert it for this machine")
        self.reader: gguf.GGUFReader = reader  # for code that works with the package's own type
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        shards = self.integer("split.count", 1)
        if shards > 1:
            raise ValueError(f"{self.path} is one of {shards} shards; merge them first (llama-gguf-split --merge)")

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        """The metadata keys, in file order."""
        return iter(self._fields)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key` as a Python value (arrays as lists), or `default` if the file has none."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The metadata value of `key`; a file without it is a ValueError naming the key."""
        if key not in self._fields:
            raise ValueError(f"{self.path} has no metadata key {key!r}; the file is incomplete, convert it again")
        return self.get(key)

    def number(self, key: str, default: float | None = None) -> float:
        """The metadata value of `key` as a float; without `default` it is required."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.path} has {key!r} = {value!r}; it must be a number")
        # The shortest decimal of what is stored as float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value)))

    def integer(self, key: str, default: int | None = None) -> int:
        """The metadata value of `key` as an int >= 0; without `default` it is required.

        A list, one entry a layer, is accepted if all entries are the same.
        """
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise ValueError(f"{self.path} has {key!r} = {value}: layers that differ in it are not supported")
            value = value[0]
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.path} has {key!r} = {value!r}; it must be an integer >= 0")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`, in NumPy order: a matrix is [out, in] (GGUF writes it the other way round)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def type_name(self, name: str) -> str:
        """The storage type of tensor `name`, for example "Q4_1"."""
        return self.tensors[name].tensor_type.name

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` dequantised to float32, shaped as `shape(name)`."""
        tensor = self.tensors[name]
        data = tensor.data
        if data.ndim > 1:  # the package works on 16 rows at a time: few long ones take half as long as many short ones
            data = data.reshape(data.shape[0] // math.gcd(data.shape[0], ROWS_AS_ONE), -1)
        try:
            return gguf.quants.dequantize(data, tensor.tensor_type).reshape(self.shape(name))
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {tensor.tensor_type.name}, which the gguf package can't "
                "dequantise; use a file quantised to another type (Q8_0, Q6_K, Q4_0, ...)"
            ) from error


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a file that starts with the GGUF magic."""
    path = pathlib.Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _check_magic(path: pathlib.Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give the path of a .gguf file")
    with path.open("rb") as file:
        start = file.read(MIN_FILE_BYTES)
    if start[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it starts with {start[: len(MAGIC)]!r}, not {MAGIC!r}")
    if len(start) < MIN_FILE_BYTES:
        raise ValueError(f"{path} is truncated: {len(start)} bytes, and a GGUF header alone has {MIN_FILE_BYTES}")
