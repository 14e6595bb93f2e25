"""Stop strings: found wherever the text is cut, nothing of one shown, nothing else kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import small_tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.text import OutputText, StopStrings, Tokenizer, as_tokenizer, check_stop_strings

TOKENIZER = Tokenizer(small_tokenizers.byte_level())


def ids(text: str) -> list[int]:
    return list(text.encode())


def expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The rule, read off every prefix of the text: the first that ends with a stop string, the longest such."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
@example(["aa", "ab"], ["aab"], False)
@example(["abab", "ababb"], ["ababb"], True)
@example(["abcd"], ["bc", "abcd"], False)
@example(["abc"], ["c", "abc", "bc"], False)
def test_any_cut_gives_the_same(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include_stop=include)
    shown = "".join(matcher.push(piece).text for piece in pieces) + matcher.finish()
    assert (shown, matcher.stopped_by) == expected("".join(pieces), stops, include)


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = matcher.push(text).text
    if matcher.stopped_by is None:
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert shown == text[: len(text) - held]
        assert matcher.finish() == text[len(text) - held :]


def test_a_stop_string_across_pieces() -> None:
    matcher = StopStrings("DEFGHIJ")
    assert [matcher.push(piece) for piece in ("ABC", "DEF", "G", "HI", "J", "K")] == [
        ("ABC", None),
        ("", None),
        ("", None),
        ("", None),
        ("", "DEFGHIJ"),
        ("", "DEFGHIJ"),
    ]
    assert matcher.finish() == ""


def test_a_held_prefix_is_released_at_the_end() -> None:
    matcher = StopStrings(["DEFGHIJ"])
    assert matcher.push("ABCDEFG").text == "ABC"
    assert matcher.finish() == "DEFG"
    assert matcher.stopped_by is None


@pytest.mark.parametrize("stop", ["", ["a", ""], [b"a"], [3]])
def test_what_is_no_stop_string_is_refused(stop: object) -> None:
    with pytest.raises(ValueError, match="stop has"):
        check_stop_strings(stop)  # type: ignore[arg-type]


def test_one_string_is_not_a_list_of_characters() -> None:
    assert check_stop_strings("ab") == ("ab",)
    assert check_stop_strings(["b", "a", "b"]) == ("b", "a")


def test_a_stop_string_that_may_not_stop_yet_passes() -> None:
    matcher = StopStrings("aba")
    assert matcher.push("xaba", may_stop=False) == ("xab", None)  # its last "a" may begin another
    assert matcher.push("ba") == ("", "aba")


class TestOutputText:
    def test_text_until_a_stop_string_and_the_tokens_it_took(self) -> None:
        output = OutputText(TOKENIZER, stop=["DEFGHIJ"])
        assert output.push(ids("ABCD")) == ("ABC", None)
        assert output.push(ids("EFGHIJKLM")) == ("", "DEFGHIJ")
        assert (output.text, output.stopped_by, output.num_tokens) == ("ABC", "DEFGHIJ", 10)
        assert output.push(ids("more")) == ("", "DEFGHIJ")
        assert output.finish() == ""
        assert (output.text, output.num_tokens) == ("ABC", 10)

    def test_the_stop_string_may_be_included(self) -> None:
        output = OutputText(TOKENIZER, stop="C", include_stop=True)
        assert output.push(ids("ABCD")) == ("ABC", "C")

    def test_one_token_that_ends_in_the_middle_of_a_stop_and_goes_on(self) -> None:
        hell = TOKENIZER.encode("hell")
        assert len(hell) == 1
        output = OutputText(TOKENIZER, stop="e", include_stop=True)
        assert output.push(hell * 3) == ("he", "e")
        assert output.num_tokens == 1

    def test_finish_releases_a_held_prefix_and_an_unfinished_character(self) -> None:
        output = OutputText(TOKENIZER, stop="DEF")
        assert output.push([*ids("ABCD"), 0xE4]) == ("ABC", None)
        assert output.finish() == "D\ufffd"
        assert output.text == "ABCD\ufffd"

    def test_a_stop_string_in_text_that_only_the_end_releases(self) -> None:
        tokenizer = Tokenizer(small_tokenizers.byte_fallback())
        output = OutputText(tokenizer, stop="好")
        assert output.push([3 + byte for byte in "你好".encode()]) == ("", None)
        assert output.finish() == "你"
        assert output.stopped_by == "好"

    def test_a_stop_string_of_several_bytes_per_character(self) -> None:
        output = OutputText(TOKENIZER, stop="😀👩")
        assert output.push(ids("a😀😀👩b")) == ("a😀", "😀👩")
        assert output.num_tokens == 13

    @pytest.mark.parametrize(
        ("min_tokens", "text", "num_tokens"), [(0, "a", 2), (2, "a", 2), (3, "a.b", 4), (9, "a.b.c", 5)]
    )
    def test_a_stop_string_before_min_tokens_is_text(self, min_tokens: int, text: str, num_tokens: int) -> None:
        output = OutputText(TOKENIZER, stop=".", min_tokens=min_tokens)
        for token_id in ids("a.b.c"):
            output.push([token_id])
        output.finish()
        assert (output.text, output.num_tokens) == (text, num_tokens)

    @pytest.mark.parametrize("stop", [(), "!"])
    def test_skipped_special_tokens(self, stop: str | tuple[str, ...]) -> None:
        bos = TOKENIZER.backend.token_to_id(small_tokenizers.BOS)
        generated = [*ids("a"), bos, *ids("b")]
        output = OutputText(TOKENIZER, stop=stop)
        assert output.push(generated).text + output.finish() == "ab"
        output = OutputText(TOKENIZER, stop=stop, skip_special_tokens=False)
        assert output.push(generated).text + output.finish() == "a<s>b"
        assert output.num_tokens == 3

    def test_a_special_token_as_a_stop_string(self) -> None:
        eos = TOKENIZER.backend.token_to_id(small_tokenizers.EOS)
        output = OutputText(TOKENIZER, stop=small_tokenizers.EOS, skip_special_tokens=False)
        assert output.push([*ids("a<"), eos]) == ("a<", small_tokenizers.EOS)

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        output = OutputText(None)
        assert output.push([5, 6, 7]) == ("", None)
        assert output.finish() == ""
        assert (output.text, output.num_tokens) == ("", 3)
        with pytest.raises(ValueError, match="needs a tokenizer"):
            OutputText(None, stop="x")

    def test_tokens_that_the_tokenizer_refuses_are_not_taken(self) -> None:
        class Refusing:
            def encode(self, text: str) -> list[int]:
                return list(text.encode())

            def decode(self, token_ids: Sequence[int]) -> str:
                if 0 in token_ids:
                    raise RuntimeError("no such token")
                return bytes(token_ids).decode(errors="replace")

        for stop in ("", "x"):
            output = OutputText(as_tokenizer(Refusing()), stop=stop or ())
            output.push(b"ab")
            with pytest.raises(RuntimeError, match="no such token"):
                output.push([0])
            output.push(b"c")
            assert (output.text, output.num_tokens) == ("abc", 3)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 266), max_size=40), st.lists(st.integers(1, 9), max_size=40), st.booleans())
    def test_any_number_of_tokens_at_a_time(self, generated: list[int], sizes: list[int], with_stop: bool) -> None:
        output = OutputText(TOKENIZER, stop=["he", " ", "\n\n", "你"] if with_stop else ())
        pieces, start = [], 0
        for size in [*sizes, len(generated)]:
            pieces.append(output.push(generated[start : start + size]).text)
            start += size
        pieces.append(output.finish())
        whole = TOKENIZER.backend.decode(generated)
        assert "".join(pieces) == output.text
        assert (output.text, output.stopped_by) == expected(whole, output._stops.stops, include=False)
        if output.stopped_by is not None:
            needed = TOKENIZER.backend.decode(generated[: output.num_tokens])
            assert output.stopped_by in needed
