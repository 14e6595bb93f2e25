"""Tokenizers from GGUF: a real file against ids made elsewhere, each way of splitting text, and what is refused."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import small_tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.loaders.gguf_file import GGUFFile
from pagedjax.text import OutputText, Tokenizer
from pagedjax.text.gguf_tokenizer import from_metadata

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # the specification's token types


@pytest.fixture(scope="module")
def reader(smollm2_path: Path) -> gguf.GGUFReader:
    return GGUFFile(smollm2_path).reader  # quicker than the package's own


@pytest.fixture(scope="module")
def smollm2(reader: gguf.GGUFReader) -> Tokenizer:
    return Tokenizer.from_gguf(reader)


class TestSmolLM2:
    def test_prompts_have_the_ids_of_transformers(self, smollm2: Tokenizer) -> None:
        for prompt in REFERENCE["prompts"]:
            assert smollm2.encode(prompt["prompt_text"]) == prompt["prompt_token_ids"], prompt["name"]
            if prompt.get("messages"):
                assert smollm2.apply_chat_template(prompt["messages"]) == prompt["prompt_token_ids"], prompt["name"]

    def test_outputs_have_the_text_of_transformers(self, smollm2: Tokenizer) -> None:
        for prompt in REFERENCE["prompts"]:
            output = OutputText(smollm2, skip_special_tokens=False)
            pieces = [output.push([token_id]).text for token_id in prompt["output_token_ids"]]
            assert "".join([*pieces, output.finish()]) == prompt["output_text"], prompt["name"]

    def test_each_digit_is_its_own_token(self, smollm2: Tokenizer) -> None:
        pieces = [smollm2.decode([token_id]) for token_id in smollm2.encode("13, 21, 144")]
        assert pieces == ["1", "3", ",", " ", "2", "1", ",", " ", "1", "4", "4"]

    def test_its_tokens(self, smollm2: Tokenizer) -> None:
        assert (smollm2.bos_id, smollm2.eos_ids, smollm2.pad_id, smollm2.unk_id) == (1, (2,), 2, 0)
        assert smollm2.vocab_size == 49152
        assert smollm2.special_ids == frozenset(range(17))
        assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)
        assert smollm2.encode("<|im_start|>hi")[0] == 1
        assert smollm2.decode([1, *smollm2.encode("hi"), 2]) == "hi"

    def test_it_can_be_saved_as_a_folder(self, smollm2: Tokenizer, tmp_path: Path) -> None:
        smollm2.save(tmp_path)
        again = Tokenizer.from_folder(tmp_path)
        for prompt in REFERENCE["prompts"]:
            assert again.encode(prompt["prompt_text"]) == prompt["prompt_token_ids"]
        assert again.apply_chat_template(REFERENCE["prompts"][0]["messages"])
        for name in ("special_tokens", "eos_ids", "bos_id", "chat_templates", "special_ids", "vocab_size"):
            assert getattr(again, name) == getattr(smollm2, name), name

    def test_random_text_against_the_algorithm(self, smollm2: Tokenizer, reader: gguf.GGUFReader) -> None:
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        merges = reader.fields["tokenizer.ggml.merges"].contents()
        ids = {token: i for i, token in enumerate(tokens)}
        ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

        @settings(max_examples=150, deadline=None)
        @given(st.text(st.sampled_from("aethe  \t\n\r\u00a0\u3000s'lvreTHE019²½٣.,!(-é你好ñЖ😀\u0301"), max_size=40))
        @example("they'll've 3.14²  \n\n x  'S 1 2")
        def check(text: str) -> None:
            expected = [ids[symbol] for piece in gpt2_pieces(text) for symbol in merge_bytes(piece, ranks)]
            assert smollm2.encode(text) == expected

        check()


WHITE_SPACE = {*map(chr, (*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)))}
WHITE_SPACE |= {*map(chr, (0x2028, 0x2029, 0x202F, 0x205F, 0x3000))}


def char_class(char: str) -> str:
    if char in WHITE_SPACE:
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")


def gpt2_pieces(text: str) -> Iterator[str]:
    """Numbers one by one, then GPT-2's pattern, by hand:
    's|'t|'re|'ve|'m|'ll|'d| ?letters| ?others|spaces before the last one of them|spaces."""
    part = ""
    for char in text:
        if char_class(char) == "number":
            yield from gpt2_part(part)
            yield char
            part = ""
        else:
            part += char
    yield from gpt2_part(part)


def gpt2_part(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        contraction = next(
            (c for c in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(c, start)), None
        )
        first = start + (text[start] == " " and start + 1 < len(text) and char_class(text[start + 1]) != "space")
        kind = char_class(text[first])
        end = first + 1
        while end < len(text) and char_class(text[end]) == kind:
            end += 1
        if contraction is not None:
            end = start + len(contraction)
        elif kind == "space" and end < len(text) and end - start > 1:
            end -= 1
        yield text[start:end]
        start = end


def merge_bytes(piece: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    """Byte-pair encoding: joins the pair that was learned first, until none is known."""
    alphabet = small_tokenizers.byte_level_alphabet()
    symbols = [alphabet[byte] for byte in piece.encode()]
    while len(symbols) > 1:
        pairs = list(itertools.pairwise(symbols))
        at = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], 10**9))
        if pairs[at] not in ranks:
            break
        symbols[at : at + 2] = ["".join(pairs[at])]
    return symbols


def metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF file's keys: bytes 0-255, "he", " he", "hello" (no merge makes it), special tokens. None removes a key."""
    tokens = [*small_tokenizers.byte_level_alphabet(), "he", "Ġhe", "hello"]
    types = [NORMAL] * len(tokens)
    for token, kind in (("<s>", CONTROL), ("</s>", CONTROL), ("<eot>", CONTROL), ("<tool>", USER_DEFINED)):
        tokens.append(token)
        types.append(kind)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["h e", "Ġ he"],
        "bos_token_id": 259,
        "eos_token_id": 260,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def build(**changes: Any) -> Tokenizer:
    return Tokenizer._from_parts(from_metadata(metadata(**changes)))


TEXT = "I'LLama she'll 12345²  x\n\n y!?\n  Fooé 你好"
PIECES = {
    "gpt-2": ["I", "'", "LLama", " she", "'ll", " 12345²", " ", " x", "\n\n", " y", "!?", "\n ", " Fooé", " 你好"],
    "smollm": [
        *["I", "'", "LLama", " she", "'ll", " ", "1", "2", "3", "4", "5", "²", " ", " x", "\n\n", " y", "!?"],
        *["\n ", " Fooé", " 你好"],
    ],
    "llama-bpe": [
        *["I", "'LL", "ama", " she", "'ll", " ", "123", "45²", " ", " x", "\n\n", " y", "!?\n", " ", " Fooé", " 你好"],
    ],
    "qwen2": [
        *["I", "'LL", "ama", " she", "'ll", " ", "1", "2", "3", "4", "5", "²", " ", " x", "\n\n", " y", "!?\n"],
        *[" ", " Fooé", " 你好"],
    ],
    "tekken": [
        *["I", "'LLama", " she", "'ll", " ", "1", "2", "3", "4", "5", "²", " ", " x", "\n\n", " y", "!?\n"],
        *[" ", " Fooé", " 你好"],
    ],
}
SAME = {"starcoder": "smollm", "refact": "smollm", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "dbrx": "llama-bpe"}


class TestPreTokenizers:
    @pytest.mark.parametrize("pre", [*PIECES, *SAME])
    def test_text_is_split_as_the_name_says(self, pre: str) -> None:
        backend = build(pre=pre).backend
        assert backend.pre_tokenizer is not None
        split = backend.pre_tokenizer.pre_tokenize_str(TEXT)
        assert [TEXT[start:end] for _, (start, end) in split] == PIECES[SAME.get(pre, pre)]

    def test_camel_case_is_cut_by_tekken(self) -> None:
        backend = build(pre="tekken").backend
        assert backend.pre_tokenizer is not None
        assert [p for p, _ in backend.pre_tokenizer.pre_tokenize_str("fooBarHTTPServer//\n")] == [
            *["foo", "Bar", "HTTPServer", "//Ċ"]
        ]

    @pytest.mark.parametrize(
        ("pre", "ids"), [("gpt-2", [256, *b"llo"]), ("llama-bpe", [259, 258]), ("dbrx", [256, *b"llo"])]
    )
    def test_whether_a_whole_word_goes_before_the_merges(self, pre: str, ids: list[int]) -> None:
        assert build(pre=pre).encode("hello") == ids

    def test_composition_is_of_qwen2_alone(self) -> None:
        assert build(pre="qwen2").encode("e\u0301") == list("é".encode())
        assert build(pre="llama-bpe").encode("e\u0301", add_special_tokens=False) == list("e\u0301".encode())

    def test_every_byte_comes_back(self) -> None:
        text = "".join(map(chr, range(0x300))) + "你😀"
        for pre in PIECES:
            tokenizer = build(pre=pre)
            expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
            assert tokenizer.decode(tokenizer.encode(text)) == expected, pre

    @pytest.mark.parametrize("pre", [None, "default", "kimi-k2", "SMOLLM"])
    def test_an_unknown_or_missing_name_is_an_error(self, pre: str | None) -> None:
        with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.pre is {'missing' if pre is None else repr(pre)}"):
            build(pre=pre)


class TestMetadata:
    def test_token_types(self) -> None:
        tokenizer = build()
        assert tokenizer.encode("<s>he<tool></s>") == [259, 256, 262, 260]
        assert tokenizer.decode([259, 256, 262, 260]) == "he<tool>"
        assert tokenizer.special_ids == {259, 260, 261}

    def test_unused_tokens_are_not_part_of_the_vocabulary(self) -> None:
        data = metadata()
        tokens = [*data["tokenizer.ggml.tokens"], "[PAD263]", "[PAD264]"]
        tokenizer = build(tokens=tokens, token_type=[*data["tokenizer.ggml.token_type"], UNUSED, UNUSED])
        assert tokenizer.vocab_size == 263
        assert tokenizer.decode([256, 263]) == "he"

    @pytest.mark.parametrize(
        ("changes", "ids"),
        [
            ({}, [256]),
            ({"add_bos_token": True}, [259, 256]),
            ({"add_bos_token": True, "add_eos_token": True}, [259, 256, 260]),
            ({"pre": "llama-bpe"}, [259, 256]),
            ({"pre": "llama-bpe", "add_bos_token": False}, [256]),
        ],
    )
    def test_begin_and_end_tokens_are_added_where_the_file_says(self, changes: dict[str, Any], ids: list[int]) -> None:
        assert build(**changes).encode("he") == ids
        assert build(**changes).encode("he", add_special_tokens=False) == [256]

    def test_every_kind_of_end_token_counts(self) -> None:
        assert build().eos_ids == (260,)
        assert build(eot_token_id=261).eos_ids == (260, 261)
        assert build(eot_token_id=260, eom_token_id=261, eos_token_id=None).eos_ids == (260, 261)

    def test_named_chat_templates(self) -> None:
        data = {**metadata(), "tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
        assert from_metadata(data).chat_templates == {"default": "a", "tool_use": "b"}
        assert from_metadata(metadata()).chat_templates == {}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama'"),
            ({"model": None}, r"tokenizer\.ggml\.model is None"),
            ({"model": "bert"}, "from_folder"),
            ({"tokens": None}, "tokens is missing"),
            ({"merges": None}, "merges is missing"),
            ({"merges": ["h e", "hel"]}, "merges has 'hel'"),
            ({"merges": ["h zz"]}, "merges does not fit"),
            ({"token_type": None}, "token_type has 0 entries for 263 tokens"),
            ({"token_type": [1, 1]}, "token_type has 2 entries for 263 tokens"),
            ({"eos_token_id": 263}, r"eos_token_id is 263, but the vocabulary has ids 0 \.\. 262"),
            ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' twice"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build(**changes)


def test_a_file_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = metadata(add_bos_token=True)
    writer.add_tokenizer_model(values["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(values["tokenizer.ggml.pre"])
    writer.add_token_list(values["tokenizer.ggml.tokens"])
    writer.add_token_types(values["tokenizer.ggml.token_type"])
    writer.add_token_merges(values["tokenizer.ggml.merges"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)
    writer.add_eot_token_id(261)
    writer.add_add_bos_token(True)
    writer.add_chat_template([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for source in (path, str(path)):
        tokenizer = Tokenizer.from_gguf(source)
        assert tokenizer.encode(" he") == [259, 257]
        assert tokenizer.eos_ids == (260, 261)
        assert tokenizer.chat_templates == {"default": "a", "tool_use": "b"}
