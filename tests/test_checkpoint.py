"""What a source is, and that each kind loads through the one function."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest
from gguf_files import metadata, random_weights, write

from pagedjax.loaders import hf, hub, load_checkpoint, orbax, resolve
from pagedjax.loaders.param_shapes import flatten

TINY = pathlib.Path(__file__).parent / "data" / "tiny" / "qwen2"


def same(found, expected):
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_hugging_face_folder_and_orbax(tmp_path):
    config, params = hf.load(TINY)
    checkpoint = load_checkpoint(str(TINY))
    assert (checkpoint.config, checkpoint.source_path, checkpoint.kind) == (config, TINY, "hf")
    same(checkpoint.params, params)

    orbax.save(tmp_path / "c", config, params, [TINY / "config.json"])  # ours, though config.json is there
    checkpoint = load_checkpoint(tmp_path / "c")
    assert (checkpoint.config, checkpoint.source_path, checkpoint.kind) == (config, tmp_path / "c", "orbax")
    same(checkpoint.params, params)


def test_gguf_under_any_name(tmp_path):
    path = write(tmp_path / "m.gguf", random_weights(), metadata())
    checkpoint = load_checkpoint(path, "bfloat16")
    assert (checkpoint.kind, checkpoint.source_path, checkpoint.config.family) == ("gguf", path, "llama")
    assert checkpoint.params["embed"]["embedding"].dtype.name == "bfloat16"
    assert resolve(path.rename(tmp_path / "weights.bin"))[1] == "gguf"


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(TINY, tmp_path / "model")
    assert resolve("~/model") == (tmp_path / "model", "hf")


def test_an_alias_is_fetched_and_wins_over_a_path(tmp_path, monkeypatch):
    fetched = write(tmp_path / "m.gguf", random_weights(), metadata())
    calls = []

    def fetch(alias, *, progress):
        calls.append((alias, progress))
        return fetched

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "smollm2-135m-instruct")
    checkpoint = load_checkpoint("smollm2-135m-instruct", progress=False)
    assert (checkpoint.kind, checkpoint.source_path) == ("gguf", fetched)
    assert calls == [("smollm2-135m-instruct", False)]
    assert resolve("./smollm2-135m-instruct")[1] == "hf"


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match=r"'smollm3' is neither .* the names are smollm2-135m-instruct"):
        load_checkpoint("smollm3")
    with pytest.raises(ValueError, match=r"absent\.gguf' is neither a file or folder nor a known model name"):
        load_checkpoint(tmp_path / "absent.gguf")


def test_folders_and_files_that_are_nothing_known(tmp_path):
    with pytest.raises(ValueError, match=r"has neither config\.json .* nor pagedjax\.json"):
        resolve(tmp_path)
    (tmp_path / "params").mkdir()
    with pytest.raises(ValueError, match=r"has Orbax arrays and no pagedjax\.json"):
        resolve(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"")
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"give the path of one: .*a\.gguf"):
        resolve(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is one file of a checkpoint; give its folder"):
        resolve(tmp_path / "model.safetensors")
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"model\.bin is not a GGUF file"):
        resolve(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"a\.gguf is not a GGUF file: it starts with b''"):
        load_checkpoint(tmp_path / "a.gguf")
