"""Incremental detokenization: joined deltas are the decoded whole, and nothing is given out too early or too late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import small_tokenizers
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.text import IncrementalDetokenizer, Tokenizer, as_tokenizer

KINDS = {
    "byte_level": Tokenizer(small_tokenizers.byte_level()),
    "byte_fallback": Tokenizer(small_tokenizers.byte_fallback()),
    "metaspace": Tokenizer(small_tokenizers.metaspace()),
}
TEXTS = st.text(alphabet=st.sampled_from("hello w\n é你😀👩‍👩‍👧𐍈�a"), max_size=40) | st.text(max_size=20)


def deltas(tokenizer: Any, groups: Sequence[Sequence[int]], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def in_groups(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    ends = [0, *itertools.takewhile(lambda end: end < len(ids), itertools.accumulate(sizes)), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(ends)]


@st.composite
def random_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A kind, and ids: any, or bytes mostly, or a text's; sometimes long enough that the window shrinks many times."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    tokenizer = KINDS[kind]
    any_id = st.integers(0, tokenizer.vocab_size + 1)
    byte_id = st.integers(3, 258) if kind == "byte_fallback" else st.integers(0, 255)
    likely_id = st.sampled_from(tokenizer.encode("hello wor 你好😀 �é"))
    part = st.one_of(
        st.lists(any_id, max_size=30),
        st.lists(byte_id, max_size=30),
        st.lists(likely_id | any_id, max_size=60),
        TEXTS.map(tokenizer.encode),
    )
    return kind, [i for ids in draw(st.lists(part, max_size=4)) for i in ids]


@settings(max_examples=200, deadline=None)
@given(random_ids(), st.booleans(), st.lists(st.integers(1, 5), max_size=80))
@example(("byte_level", [0xF0, 0x9F, 0x98] * 12), True, [1] * 36)
@example(("byte_level", [0xF0, 0x9F, 0x98, 0x80] * 12), True, [1] * 48)
@example(("byte_level", [0x98] * 60), True, [1] * 60)
@example(("byte_level", [0xE4, 265, 0xBD, 264, 0xA0] * 8), True, [1] * 40)
@example(("byte_fallback", [3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 3 + 0xE5, 261, 262]), True, [1] * 6)
@example(("byte_fallback", [1, 259, 260, 1, 259, 1, 259] * 6), True, [1] * 42)
@example(("byte_fallback", [3, 278, 131, 9999, 262]), True, [1] * 5)
@example(("metaspace", [2] * 40), True, [1] * 40)
@example(("metaspace", [3, *[99] * 20, 12]), True, [1] * 22)
def test_joined_deltas_are_the_decoded_whole(drawn: tuple[str, list[int]], skip: bool, sizes: list[int]) -> None:
    kind, ids = drawn
    whole = KINDS[kind].backend.decode(ids, skip_special_tokens=skip)
    pieces = deltas(KINDS[kind], in_groups(ids, sizes), skip_special_tokens=skip)
    assert "".join(pieces) == whole


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(random_ids(), st.booleans(), st.lists(st.integers(1, 5), max_size=80))
def test_joined_deltas_are_the_decoded_whole_long(drawn: tuple[str, list[int]], skip: bool, sizes: list[int]) -> None:
    kind, ids = drawn
    whole = KINDS[kind].backend.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(KINDS[kind], in_groups(ids, sizes), skip_special_tokens=skip)) == whole


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_long_random_sequences(kind: str) -> None:
    tokenizer = KINDS[kind]
    rng = random.Random(0)
    texts = ["hello world ", "h é", "你", "😀", "  "]
    for _ in range(20):
        ids = [i for _ in range(60) for i in tokenizer.encode(rng.choice(texts), add_special_tokens=False)]
        for _ in range(rng.randrange(5)):
            ids.insert(rng.randrange(len(ids)), rng.randrange(tokenizer.vocab_size))
        assert "".join(deltas(tokenizer, [[i] for i in ids])) == tokenizer.backend.decode(ids)


def test_a_character_is_given_out_with_its_last_byte() -> None:
    tokenizer = KINDS["byte_level"]
    ids = list("a你😀b".encode())
    assert deltas(tokenizer, [[i] for i in ids]) == ["a", "", "", "你", "", "", "", "😀", "b", ""]


def test_text_is_not_held_back_without_need() -> None:
    for tokenizer in KINDS.values():
        ids = tokenizer.encode("hello wor d hell he", add_special_tokens=False)
        pieces = deltas(tokenizer, [[i] for i in ids])
        shown = [tokenizer.backend.decode(ids[: n + 1]) for n in range(len(ids))]
        assert list(itertools.accumulate(pieces[:-1])) == shown
        assert pieces[-1] == ""


def test_an_unfinished_character_ends_as_the_decoder_ends_it() -> None:
    assert deltas(KINDS["byte_level"], [[ord("a")], [0xE4, 0xBD]]) == ["a", "", "\ufffd"]


def test_a_byte_run_waits_for_its_end() -> None:
    """The decoder makes all of a wrong run U+FFFD, the good characters in it too."""
    tokenizer = KINDS["byte_fallback"]
    good = [3 + byte for byte in "你".encode()]
    hell = tokenizer.backend.token_to_id("hell")
    assert deltas(tokenizer, [[i] for i in [hell, *good, hell]]) == ["hell", "", "", "", "你hell", ""]
    assert deltas(tokenizer, [[i] for i in [*good, 3 + 0xE5, hell]])[-2:] == ["\ufffd" * 4 + "hell", ""]


def test_a_space_after_skipped_tokens_is_kept() -> None:
    tokenizer = KINDS["byte_fallback"]
    hell, word = (tokenizer.backend.token_to_id(text) for text in ("▁hell", "▁w"))
    ids = [hell, *[1] * 40, word]
    assert "".join(deltas(tokenizer, [[i] for i in ids])) == "hell w"


class CountingTokenizer:
    """Counts how many tokens it has decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids, self.byte_ids = tokenizer.special_ids, tokenizer.byte_ids
        self.num_decoded = 0

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        ("byte_level", list("hello w你😀".encode())),
        ("byte_level", [0x98]),  # never valid
        ("byte_level", [0xF0, 0x9F, 0x98]),  # never finished
        ("byte_level", [265]),  # skipped, for ever
        ("byte_fallback", [259, 262, 263, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0]),
        ("byte_fallback", [3 + 0xE4]),  # one endless run
        ("metaspace", [3, 4, 2, 5]),
    ],
)
def test_the_cost_of_a_token_does_not_grow(kind: str, unit: list[int]) -> None:
    length = 600
    tokenizer = CountingTokenizer(KINDS[kind])
    ids = (unit * length)[:length]
    adapted = as_tokenizer(tokenizer)
    assert adapted is not None
    joined = "".join(deltas(adapted, [[i] for i in ids]))
    assert joined == KINDS[kind].backend.decode(ids)
    assert tokenizer.num_decoded < 40 * length


class Wrapped:
    """A tokenizer that can encode and decode, and says nothing else about itself."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return self._decode(token_ids)


def test_an_unknown_decoder_with_one_mark_for_an_unfinished_character() -> None:
    tokenizer = as_tokenizer(Wrapped(lambda ids: bytes(ids).decode(errors="replace")))
    text = "hello 你好 😀 " * 5
    pieces = deltas(tokenizer, [[i] for i in text.encode()])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unknown_decoder_with_a_mark_for_each_of_its_bytes() -> None:
    tokenizer = as_tokenizer(Wrapped(KINDS["byte_fallback"].backend.decode))
    hell = KINDS["byte_fallback"].backend.token_to_id("hell")
    ids = [hell, *(3 + byte for byte in "😀".encode()), hell] * 5
    pieces = deltas(tokenizer, [[i] for i in ids])
    assert "".join(pieces) == "hell😀hell" * 5


def test_an_unknown_decoder_that_looks_far_back() -> None:
    """Its first token decides the case of all that follow, so the window may not be cut."""

    def decode(ids: list[int]) -> str:
        text = bytes(ids).decode()
        return text[1:].upper() if text.startswith("^") else text

    assert "".join(deltas(as_tokenizer(Wrapped(decode)), [[i] for i in b"^" + b"abcd" * 20])) == "ABCD" * 20


def test_the_small_vocabulary_is_what_it_says() -> None:
    backend = small_tokenizers.byte_level()
    assert isinstance(backend, tokenizers.Tokenizer)
    assert bytes(backend.encode("\x00 ~\x7f\u00ad").ids) == "\x00 ~\x7f\u00ad".encode()
