"""Reading the format: metadata as the package reads it, and files that are damaged in every way."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from gguf_files import VOCAB, metadata, random_weights, write

from pagedjax.loaders import gguf as loader
from pagedjax.loaders.gguf_file import GGUFFile


def test_a_type_that_has_no_dequantiser_names_the_tensor(tmp_path):
    weights = random_weights()
    weights["blk.1.attn_v.weight"] = weights["blk.1.attn_v.weight"].astype(np.int8)
    with pytest.raises(ValueError, match=r"'blk\.1\.attn_v\.weight' has type I8"):
        loader.load(write(tmp_path / "m.gguf", weights, metadata()))


def test_a_type_that_is_unknown_names_the_tensor(tmp_path):
    path = write(tmp_path / "m.gguf", random_weights(), metadata())
    data = bytearray(path.read_bytes())
    name = b"blk.1.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the name: number of dimensions, the dimensions, the type
    assert struct.unpack_from("<I", data, at) == (0,)
    struct.pack_into("<I", data, at, 999)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"'blk\.1\.attn_v\.weight' has the unknown type number 999"):
        loader.load(path)


def test_metadata_equals_the_package_reader(tmp_path):
    keys = metadata() | {
        "test.text": "naïve 🙂",
        "test.texts": ["", "a", "naïve 🙂"],
        "test.integers": [1, -2, 3],
        "test.floats": [0.5, -1.25],
        "test.flags": [True, False],
        "test.flag": True,
    }
    path = write(tmp_path / "m.gguf", random_weights(), keys, token_types=[1] * VOCAB)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    assert list(file) == list(reader.fields)
    for key, field in reader.fields.items():
        assert file.get(key) == field.contents(), key
        assert file.reader.fields[key].types == field.types, key
    assert file.get("test.texts") == ["", "a", "naïve 🙂"]
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        np.testing.assert_array_equal(file.read(tensor.name), tensor.data)


def test_truncated_anywhere(tmp_path):
    path = write(tmp_path / "m.gguf", random_weights(), metadata(), token_types=[1] * VOCAB)
    data = path.read_bytes()
    file = GGUFFile(path)
    end = max(tensor.data_offset + tensor.n_bytes for tensor in file.tensors.values())
    header = min(tensor.data_offset for tensor in file.tensors.values())
    cuts = {0, 1, 3, 4, 8, 16, 23, 24, 25, 100, header - 1, header, header + 1, end - 1}
    cuts |= set(np.random.default_rng(0).integers(24, header, 80).tolist())
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"m\.gguf is (truncated|not a GGUF file)"):
            loader.load(path)


def corrupt_bytes(tmp_path, count, seed):
    """Loads files with one header byte changed: anything but a result or a ValueError is a failure."""
    path = write(tmp_path / "m.gguf", random_weights(), metadata(), token_types=[1] * VOCAB)
    data = path.read_bytes()
    header = min(tensor.data_offset for tensor in GGUFFile(path).tensors.values())
    rng = np.random.default_rng(seed)
    refused = 0
    for at in rng.integers(0, header, count):
        changed = bytearray(data)
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            loader.load(path, progress=False)
        except ValueError:
            refused += 1
    return refused


def test_corrupt_headers(tmp_path):
    assert corrupt_bytes(tmp_path, 100, seed=0) > 50


@pytest.mark.slow
def test_corrupt_headers_long(tmp_path):
    assert corrupt_bytes(tmp_path, 5000, seed=1) > 2500


def test_files_that_are_not_gguf(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.gguf"):
        loader.load(tmp_path / "absent.gguf")
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(np.random.default_rng(0).bytes(1000))
    with pytest.raises(ValueError, match=r"is not a GGUF file: it starts with"):
        loader.load(garbage)
    garbage.write_bytes(b"GGUF" + np.random.default_rng(0).bytes(1000))
    with pytest.raises(ValueError, match=r"truncated or corrupt"):
        loader.load(garbage)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        loader.load(tmp_path)


def test_shards_and_the_other_byte_order_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf", random_weights(), metadata() | {"split.count": 3})
    with pytest.raises(ValueError, match=r"one of 3 shards; merge them"):
        loader.load(path)
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="the other byte order"):
        loader.load(tmp_path / "big.gguf")
