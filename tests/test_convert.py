"""`python -m pagedjax.convert`: the result loads as the source does, text included."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
from gguf_files import metadata, random_weights, write

from pagedjax import convert
from pagedjax.loaders import load_checkpoint
from pagedjax.loaders.param_shapes import flatten
from pagedjax.text import Tokenizer

TINY = pathlib.Path(__file__).parent / "data" / "tiny"


def assert_same_model(first, second):
    first, second = load_checkpoint(first), load_checkpoint(second)
    assert first.config == second.config
    expected = flatten(second.params)
    for name, leaf in flatten(first.params).items():
        assert leaf.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def gguf_with_text(path):
    keys = metadata() | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|im_end|>", *[chr(ord("a") + i) for i in range(26)], "ab", *"0123456789", "Ġ"],
        "tokenizer.ggml.token_type": [3] + [1] * 38,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }
    return write(path, random_weights(), keys)


def test_gguf_with_its_tokenizer(tmp_path, capsys):
    path = gguf_with_text(tmp_path / "m.gguf")
    assert convert.main([str(path), str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "M parameters" in err
    assert f"done: {tmp_path / 'c'}" in err
    assert load_checkpoint(tmp_path / "c").kind == "orbax"
    assert_same_model(tmp_path / "c", path)
    old, new = Tokenizer.from_gguf(path), Tokenizer.from_folder(tmp_path / "c")
    assert new.encode("abc 12") == old.encode("abc 12") == [27, 3, 38, 29, 30]
    assert new.eos_ids == old.eos_ids == (0,)
    messages = [{"role": "user", "content": "ab"}]
    assert new.apply_chat_template(messages) == old.apply_chat_template(messages) == [27, 0]

    assert convert.main([str(tmp_path / "c"), str(tmp_path / "d"), "--dtype", "bfloat16", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    again = load_checkpoint(tmp_path / "d")
    assert again.params["embed"]["embedding"].dtype.name == "bfloat16"
    assert Tokenizer.from_folder(tmp_path / "d").encode("abc 12") == [27, 3, 38, 29, 30]


def test_folder_without_a_tokenizer(tmp_path, capsys):
    source = TINY / "llama_llama3"
    assert convert.main([str(source), str(tmp_path / "c")]) == 0
    assert "takes token ids only" in capsys.readouterr().err
    assert_same_model(tmp_path / "c", source)
    for name in ("config.json", "generation_config.json"):  # the end tokens
        assert (tmp_path / "c" / name).read_bytes() == (source / name).read_bytes()


def test_errors_are_one_line_and_a_status(tmp_path, capsys):
    shutil.copytree(TINY / "qwen2", tmp_path / "source")
    assert convert.main([str(tmp_path / "source"), str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path} exists and is not an empty folder; save a checkpoint to a new one\n"
    )
    assert convert.main(["smollm", str(tmp_path / "c")]) == 1
    assert capsys.readouterr().err.startswith("error: 'smollm' is neither")
    assert not (tmp_path / "c").exists()
