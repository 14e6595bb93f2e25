"""Tokenizers from folders and from users: ids, end tokens, special tokens, and errors that say what to provide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_tokenizers
import tokenizers
from small_tokenizers import BOS, EOS, TURN
from tokenizers import AddedToken

from pagedjax.text import TextTokenizer, Tokenizer, as_tokenizer

HELLO = [257 + 1, ord("o")]  # "hell", "o"; merges are numbered from 256


def make_folder(path: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    """A checkpoint folder with a tokenizer.json and JSON files by the part of their name before the dot."""
    path.mkdir(exist_ok=True)
    (backend or small_tokenizers.byte_level()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    config = {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}, "pad_token": None}
    return Tokenizer.from_folder(make_folder(tmp_path / "model", tokenizer_config=config))


def id_of(text: str) -> int:
    token_id = small_tokenizers.byte_level().token_to_id(text)
    assert token_id is not None
    return token_id


def test_text_to_ids_and_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello") == HELLO
    assert tokenizer.encode("") == []
    assert tokenizer.encode(f"{BOS}hello{TURN}") == [id_of(BOS), *HELLO, id_of(TURN)]
    assert tokenizer.decode([id_of(BOS), *HELLO, id_of(TURN)]) == "hello"
    assert tokenizer.decode([id_of(BOS), *HELLO], skip_special_tokens=False) == "<s>hello"
    assert tokenizer.decode(np.array(HELLO)) == "hello"
    assert tokenizer.decode([*HELLO, 99_999]) == "hello"
    assert tokenizer.decode([]) == ""


def test_what_it_knows(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 256 + 7 + 3
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (id_of(BOS), (id_of(EOS),))
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.special_ids == {id_of(BOS), id_of(EOS), id_of(TURN)}
    assert tokenizer.byte_ids == frozenset()
    assert isinstance(tokenizer, TextTokenizer)


@pytest.mark.parametrize("text", [None, 5, b"hello", ["hello"], "\ud83d"])
def test_only_text_can_be_encoded(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(ValueError, match=r"encode takes text|not valid Unicode"):
        tokenizer.encode(text)


@pytest.mark.parametrize("wrong", [-1, 2**63])
def test_only_ids_can_be_decoded(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"{wrong} is no token id: ids are 0 \.\. 265"):
        tokenizer.decode([5, wrong])


@pytest.mark.parametrize(
    ("model", "generation", "tokenizer_eos", "eos_ids"),
    [
        (None, None, EOS, [EOS]),
        (TURN, None, EOS, [EOS, TURN]),
        ([TURN, EOS], None, EOS, [EOS, TURN]),
        (None, [TURN], EOS, [EOS, TURN]),
        (BOS, TURN, None, [BOS, TURN]),
        ([BOS], [TURN, BOS], EOS, [EOS, BOS, TURN]),
        (None, None, None, []),
    ],
)
def test_end_tokens_are_united(
    tmp_path: Path, model: Any, generation: Any, tokenizer_eos: str | None, eos_ids: list[str]
) -> None:
    def as_ids(value: Any) -> Any:
        return [id_of(v) for v in value] if isinstance(value, list) else value and id_of(value)

    folder = make_folder(
        tmp_path / "model",
        tokenizer_config={"eos_token": tokenizer_eos},
        config={"eos_token_id": as_ids(model)},
        generation_config={"eos_token_id": as_ids(generation)},
    )
    assert Tokenizer.from_folder(folder).eos_ids == tuple(map(id_of, eos_ids))


def test_end_tokens_of_a_nested_text_config(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", config={"text_config": {"eos_token_id": [5]}})
    assert Tokenizer.from_folder(folder).eos_ids == (5,)


@pytest.mark.parametrize("value", ["</s>", [5, None], -1, True, 2.0])
def test_a_wrong_end_token_names_its_file(tmp_path: Path, value: Any) -> None:
    folder = make_folder(tmp_path / "model", generation_config={"eos_token_id": value})
    with pytest.raises(ValueError, match=r"eos_token_id in .*generation_config\.json"):
        Tokenizer.from_folder(folder)


def test_an_end_token_outside_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer_config={"eos_token": "<none>"})
    with pytest.raises(ValueError, match="eos_token '<none>' is not in the vocabulary"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("in_tokenizer_json", "config", "begins", "ends"),
    [
        (False, {}, False, False),
        (True, {}, True, False),
        (True, {"add_bos_token": None}, True, False),
        (True, {"add_bos_token": True}, True, False),
        (False, {"add_bos_token": True}, True, False),
        (True, {"add_bos_token": False}, False, False),
        (False, {"add_bos_token": True, "add_eos_token": True}, True, True),
        (False, {"add_eos_token": True}, False, True),
    ],
)
def test_a_begin_token_is_added_where_the_checkpoint_says(
    tmp_path: Path, in_tokenizer_json: bool, config: dict[str, Any], begins: bool, ends: bool
) -> None:
    backend = small_tokenizers.byte_level()
    if in_tokenizer_json:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", pair=None, special_tokens=[(BOS, id_of(BOS))]
        )
    config = {"bos_token": BOS, "eos_token": EOS, **config}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "model", backend, tokenizer_config=config))
    first, last = [id_of(BOS)] * begins, [id_of(EOS)] * ends
    assert tokenizer.encode("hi") == [*first, *b"hi", *last]
    assert tokenizer.encode("") == [*first, *last]
    assert tokenizer.encode("hi", add_special_tokens=False) == list(b"hi")
    # A begin token that the text brings is the only one, but what the text repeats is kept.
    assert tokenizer.encode(f"{BOS}hi") == [id_of(BOS), *b"hi", *last]
    assert tokenizer.encode(f"{BOS}{BOS}hi", add_special_tokens=False) == [id_of(BOS)] * 2 + list(b"hi")
    if not begins:
        assert tokenizer.encode(f"{BOS}{BOS}hi") == [*[id_of(BOS)] * 2, *b"hi", *last]


def test_a_begin_token_outside_the_vocabulary_cannot_be_added(tmp_path: Path) -> None:
    config = {"bos_token": "<none>", "add_bos_token": True}
    with pytest.raises(ValueError, match="'<none>' is to be added to every text"):
        Tokenizer.from_folder(make_folder(tmp_path / "model", tokenizer_config=config))


def test_settings_of_a_training_run_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "model", backend))
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == list(b"a")


def test_special_tokens_named_only_beside_tokenizer_json(tmp_path: Path) -> None:
    """Ordinary tokens there, special by tokenizer_config.json or the older special_tokens_map.json."""
    backend = small_tokenizers.byte_level()
    backend.add_tokens(["<think>", "<tool>", "<extra>", "<plain>", "<listed>"])
    folder = make_folder(
        tmp_path / "model",
        backend,
        tokenizer_config={
            "eos_token": "<think>",
            "additional_special_tokens": [{"content": "<tool>"}],
            "added_tokens_decoder": {"270": {"content": "<listed>", "special": True}},
        },
        special_tokens_map={"eos_token": EOS, "cls_token": {"content": "<extra>"}},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"eos_token": "<think>", "cls_token": "<extra>"}
    ids = tokenizer.encode("a<think><tool><extra><plain><listed>")
    assert ids == [ord("a"), 266, 267, 268, 269, 270]
    assert tokenizer.decode(ids) == "a<plain>"
    assert tokenizer.special_ids == {*map(id_of, (BOS, EOS, TURN)), 266, 267, 268, 270}
    assert tokenizer.eos_ids == (266,)


def test_tokens_listed_only_in_the_configuration(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "model",
        added_tokens={"<b>": 267},
        tokenizer_config={"added_tokens_decoder": {"266": {"content": "<a>", "special": True, "normalized": False}}},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<a><b>") == [266, 267]
    assert tokenizer.decode([266, 267]) == "<b>"
    assert tokenizer.vocab_size == 268


def test_files_of_different_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", added_tokens={"<b>": 300})
    with pytest.raises(ValueError, match=r"'<b>' has id 266 .* and 300"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json", None])
def test_a_missing_tokenizer_json_says_what_to_provide(tmp_path: Path, name: str | None) -> None:
    if name:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"no tokenizer\.json.*{name or 'no tokenizer files'}.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_folder(folder)


def test_where_chat_templates_are_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer_config={"chat_template": "in the config"})
    assert Tokenizer.from_folder(folder).chat_template == "in the config"
    named = [{"name": "default", "template": "first"}, {"name": "rag", "template": "second"}]
    make_folder(folder, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "first", "rag": "second"}
    (folder / "chat_template.jinja").write_text("of its own\n", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("third", encoding="utf-8")
    templates = {"default": "of its own\n", "rag": "second", "tool_use": "third"}
    assert Tokenizer.from_folder(folder).chat_templates == templates


@pytest.mark.parametrize(
    "kind", [small_tokenizers.byte_level, small_tokenizers.byte_fallback, small_tokenizers.metaspace]
)
def test_a_saved_tokenizer_comes_back(tmp_path: Path, kind: Any) -> None:
    backend = kind()
    if kind is small_tokenizers.byte_level:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", pair=None, special_tokens=[(BOS, id_of(BOS))]
        )
    backend.add_tokens([AddedToken("<plain>", special=False)])
    tokenizer = Tokenizer(
        backend,
        special_tokens={"eos_token": EOS, "unk_token": "<unk>", "cls_token": "not in the vocabulary"},
        eos_ids=[7, 5],
        chat_templates={"default": "{{ messages }}\r\n", "tool_use": "é"},
    )
    folder = make_folder(tmp_path / "model", generation_config={"temperature": 0.5, "eos_token_id": 3})
    (folder / "chat_template.jinja").write_text("old")
    tokenizer.save(folder)
    again = Tokenizer.from_folder(folder)
    for text in ("hello wor 你好😀", f"{EOS}<plain> h", ""):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    for name in ("special_tokens", "eos_ids", "bos_id", "chat_templates", "special_ids", "byte_ids", "vocab_size"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"temperature": 0.5, "eos_token_id": list(tokenizer.eos_ids)}


class TestUsersTokenizers:
    """The protocol: what an object with encode and decode is made into."""

    def test_the_least_there_can_be(self) -> None:
        class Bytes:
            def encode(self, text: str) -> list[int]:
                return list(text.encode())

            def decode(self, token_ids: Sequence[int]) -> str:
                return bytes(token_ids).decode()

        tokenizer = as_tokenizer(Bytes())
        assert isinstance(tokenizer, TextTokenizer)
        assert (tokenizer.encode("hi"), tokenizer.decode(np.array([104, 105]))) == ([104, 105], "hi")
        assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == ((), None, None)
        assert as_tokenizer(tokenizer) is tokenizer
        with pytest.raises(ValueError, match="Bytes has no apply_chat_template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])

    def test_one_like_those_of_transformers(self) -> None:
        calls: list[dict[str, Any]] = []

        class Fast:
            eos_token_id, bos_token_id, all_special_ids, vocab_size = 265, 263, [263, 264], 256
            backend_tokenizer = small_tokenizers.byte_fallback()

            def __len__(self) -> int:
                return 266

            def get_vocab(self) -> dict[str, int]:
                return {"a": 0, "<with ids left out before it>": 300}

            def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> np.ndarray:
                return np.array([263] * add_special_tokens + list(text.encode()))

            def decode(
                self, token_ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
            ) -> str:
                calls.append({"skip": skip_special_tokens, "clean": clean_up_tokenization_spaces})
                return f"{token_ids}"

            def apply_chat_template(
                self, messages: Any, tokenize: bool = False, return_dict: bool = True, **options: Any
            ) -> Any:
                calls.append({"tokenize": tokenize, "return_dict": return_dict, **options})
                return [1, 2]

        tokenizer = as_tokenizer(Fast())
        assert tokenizer is not None
        assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == ((265,), 263, 301)
        assert tokenizer.special_ids == {0, 1, 2, 263, 264}  # named by it, and those of its backend
        assert tokenizer.byte_ids == set(range(3, 259))
        assert tokenizer.encode("hi") == [263, 104, 105]
        assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
        assert tokenizer.decode([1], skip_special_tokens=True) == "[1]"
        assert tokenizer.apply_chat_template([], enable_thinking=False) == [1, 2]
        assert calls == [
            {"skip": True, "clean": False},
            {"tokenize": True, "return_dict": False, "add_generation_prompt": True, "enable_thinking": False},
        ]

    def test_special_ids_are_taken_out_for_one_that_cannot_skip(self) -> None:
        class Words:
            special_ids, eos_ids, vocab_size = [0], [0, 9], 10

            def encode(self, text: str) -> list[int]:
                return []

            def decode(self, token_ids: Sequence[int]) -> str:
                return " ".join(map(str, token_ids))

            def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> str:
                return "prompt"

        tokenizer = as_tokenizer(Words())
        assert tokenizer is not None
        assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((0, 9), 10)
        assert tokenizer.decode([1, 0, 2]) == "1 2"
        assert tokenizer.decode([1, 0, 2], skip_special_tokens=False) == "1 0 2"
        assert tokenizer.apply_chat_template([]) == []

    def test_the_library_s_own(self) -> None:
        tokenizer = as_tokenizer(small_tokenizers.byte_level())
        assert isinstance(tokenizer, Tokenizer)
        assert tokenizer.encode("hello") == HELLO
        assert as_tokenizer(tokenizer) is tokenizer
        assert as_tokenizer(None) is None

    def test_what_is_no_tokenizer_is_refused(self) -> None:
        with pytest.raises(ValueError, match="str without decode"):
            as_tokenizer("gpt2")  # type: ignore[arg-type]

    def test_wrong_ids_are_named(self) -> None:
        class Wrong:
            def encode(self, text: str) -> Any:
                return {"input_ids": [1]}

            def decode(self, token_ids: Sequence[int]) -> str:
                return ""

        tokenizer = as_tokenizer(Wrong())
        assert tokenizer is not None
        with pytest.raises(ValueError, match=r"Wrong returned .*expected a list of token ids"):
            tokenizer.encode("hi")

    def test_a_begin_token_is_not_added_twice(self) -> None:
        class Adding:
            bos_token_id = 1

            def encode(self, text: str) -> list[int]:
                return [1, *[1] * text.startswith("<s>"), *text.removeprefix("<s>").encode()]

            def decode(self, token_ids: Any) -> str:
                return bytes(token_ids).decode()

            def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> str:
                return "<s>" + messages[0]["content"]

        tokenizer = as_tokenizer(Adding())
        assert tokenizer is not None
        assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == [1, *b"Hi"]
        assert tokenizer.encode("<s>Hi") == tokenizer.encode("Hi") == [1, *b"Hi"]


def test_one_token_may_begin_and_end(tmp_path: Path) -> None:
    config = {"bos_token": EOS, "eos_token": EOS}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "a", tokenizer_config=config))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (id_of(EOS), (id_of(EOS),))
    assert tokenizer.encode("hi") == list(b"hi")
    adding = Tokenizer.from_folder(make_folder(tmp_path / "b", tokenizer_config={**config, "add_bos_token": True}))
    assert adding.encode("hi") == adding.encode(f"{EOS}hi") == [id_of(EOS), *b"hi"]
