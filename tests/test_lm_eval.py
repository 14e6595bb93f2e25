"""An evaluation's requests on the mock model, against its exact logits; the harness's class where that is installed."""

from __future__ import annotations

import importlib
import pathlib
import random
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import mock_engine
import mock_model
import numpy as np
import pytest
import small_tokenizers
from mock_model import VOCAB, Oracle
from test_imports import imports

from pagedjax import LLM, SamplingParams, evaluation
from pagedjax.evaluation import Pair
from pagedjax.outputs import Score
from pagedjax.text import Tokenizer

ROOT = pathlib.Path(__file__).parent.parent
BOS, EOS, MAX_LENGTH = 30, 31, 30


class Letters(mock_engine.Pieces):
    """One letter a token; "~" is BOS where it is written out."""

    bos_id, eos_ids = BOS, (EOS,)

    def __init__(self) -> None:
        super().__init__({token: chr(ord("a") + token) for token in range(VOCAB)}, special=(BOS, EOS))
        self.pieces[BOS] = "~"

    def encode(self, text: str) -> list[int]:
        return [BOS if char == "~" else ord(char) - ord("a") for char in text]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in token_ids)


@pytest.fixture
def tokenizer() -> Tokenizer:
    special = {"bos_token": small_tokenizers.BOS, "eos_token": small_tokenizers.EOS}
    return Tokenizer(small_tokenizers.byte_level(), special_tokens=special)


def logprob(context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    logits = mock_model.raw_logits([*context, *continuation])[len(context) - 1 : -1]
    found = mock_model.logprobs(logits)[range(len(continuation)), continuation]
    return float(found.sum()), bool(np.all(np.argmax(logits, axis=-1) == continuation))


# Pairs


@pytest.mark.parametrize("max_length", [4, 7, 8, 9, 20])
def test_a_pair_is_cut_to_what_the_model_sees(max_length: int) -> None:
    """The last token is only predicted, so all but it are max_length at most."""
    context, continuation = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    cut = Pair(context, continuation).cut(max_length)
    assert cut.continuation == continuation
    assert cut.context
    assert [*cut.context, *continuation[:-1]] == [*context, *continuation[:-1]][-max_length:]


def test_a_pair_that_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="no tokens of its own"):
        Pair([1], []).cut(4)
    with pytest.raises(ValueError, match="continuation of 5 tokens is longer than max_length=4"):
        Pair([1], [2] * 5).cut(4)


def test_pairs_of_one_context_are_scored_together() -> None:
    """Each context once as long as `most` allows, those that begin alike one after the other, each pair once."""
    rng = random.Random(0)
    contexts = [[1, 2], [3], [1, 2, 4], [1]]
    pairs = [Pair(rng.choice(contexts), [index]) for index in range(40)]
    calls: list[tuple[list[int], int]] = []
    told: list[int] = []

    def score_many(
        contexts: list[list[int]], continuations: list[list[list[int]]]
    ) -> Iterator[tuple[int, list[Score]]]:
        calls.extend((context, len(own)) for context, own in zip(contexts, continuations, strict=True))
        for index in reversed(range(len(contexts))):  # as they end
            yield index, [Score(-float(tokens[0]), False, [], tokens) for tokens in continuations[index]]

    found = evaluation.score_pairs(score_many, pairs, most=64, on_score=lambda index, _: told.append(index))
    assert [entry.logprob for entry in found] == [-float(index) for index in range(40)]
    assert sorted(told) == list(range(40))
    assert [context for context, _ in calls] == sorted(contexts)

    calls.clear()
    evaluation.score_pairs(score_many, pairs, most=3, on_score=lambda *_: None)
    assert max(size for _, size in calls) == 3
    assert sum(size for _, size in calls) == 40
    assert evaluation.score_pairs(score_many, [], most=3, on_score=lambda *_: None) == []


# Generations


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 256}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 0.7, "do_sample": False}, {"temperature": 0.0}),
        ({"temperature": 0.0, "do_sample": True, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True, "top_p": 0.9, "top_k": 5, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}),
        ({"do_sample": None, "temperature": None, "until": None}, {"temperature": 0.0}),
        ({"max_new_tokens": 3, "max_gen_toks": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"until": "he"}, {"stop": ("he",)}),
        ({"until": ["\n\n", "", "he", "he"]}, {"stop": ("\n\n", "he")}),
    ],
)
def test_generation_arguments(tokenizer: Tokenizer, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    params = evaluation.generation_params(arguments, tokenizer, default_length=256)
    assert {name: getattr(params, name) for name in expected} == expected


def test_a_special_token_as_stop_string_stops_as_a_token(tokenizer: Tokenizer) -> None:
    params = evaluation.generation_params({"until": ["\n", small_tokenizers.TURN]}, tokenizer, default_length=4)
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (tokenizer.backend.token_to_id(small_tokenizers.TURN),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4, "until": "x"}, r"unknown gen_kwargs \['num_beams'\]; the known ones are .*'until'"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"until": [1]}, r"until is \[1\]"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"max_gen_toks": 0}, "max_tokens is 0"),
    ],
)
def test_wrong_generation_arguments(tokenizer: Tokenizer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation.generation_params(arguments, tokenizer, default_length=4)


def test_a_prompt_is_cut_to_leave_room() -> None:
    assert evaluation.cut_prompt([1, 2, 3, 4], max_length=6, max_tokens=3) == [2, 3, 4]
    assert evaluation.cut_prompt([1, 2, 3], max_length=6, max_tokens=3) == [1, 2, 3]
    with pytest.raises(ValueError, match="max_gen_toks=6 leaves no room for a context in max_length=6"):
        evaluation.cut_prompt([1], max_length=6, max_tokens=6)


# Chats

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
STRIPPING = PLAIN.replace("m.content", "m.content | trim")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "bot", "content": "so: "}]


@pytest.mark.parametrize(
    ("template", "messages", "is_asked", "expected"),
    [
        (PLAIN, CHAT[:2], True, "<system>s</><user>u</><bot>"),
        (PLAIN, CHAT, False, "<system>s</><user>u</><bot>so: "),
        (STRIPPING, CHAT, False, "<system>s</><user>u</><bot>so:"),
        (NO_SYSTEM, CHAT[:2], True, "<user>u</><bot>"),
    ],
)
def test_chats(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, str]], is_asked: bool, expected: str
) -> None:
    tokenizer.chat_templates["default"] = template
    assert evaluation.chat_text(tokenizer.render_chat, messages, add_generation_prompt=is_asked) == expected


def test_a_final_message_that_the_template_drops(tokenizer: Tokenizer) -> None:
    tokenizer.chat_templates["default"] = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="leaves out the final message"):
        evaluation.chat_text(tokenizer.render_chat, CHAT[1:], add_generation_prompt=False)


# Without the harness


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pagedjax.lm_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'pagedjax\[lm-eval\]'"):
        importlib.import_module("pagedjax.lm_eval")


def test_nothing_else_imports_the_harness() -> None:
    for path in sorted((ROOT / "pagedjax").rglob("*.py")):
        if path.parent.name != "lm_eval":
            assert "lm_eval" not in {part for name in imports(path) for part in name.split(".")}, path


# With it


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the harness's model around the shared mock engine."""
    with warnings.catch_warnings():  # of what the harness imports
        warnings.simplefilter("ignore")
        pytest.importorskip("lm_eval")
        from pagedjax.lm_eval import PagedJaxLM
    engines = mock_engine.idle()
    llm = next(engines)
    mock_engine.use_tokenizer(monkeypatch, llm, Letters())
    yield lambda **options: PagedJaxLM(llm, **{"max_length": MAX_LENGTH, **options})
    next(engines, None)


class Cache:
    def __init__(self) -> None:
        self.found: list[tuple[str, Any, Any]] = []

    def add_partial(self, attribute: str, request: Any, result: Any) -> None:
        self.found.append((attribute, request, result))


def requests(arguments: Sequence[Any]) -> list[Any]:
    return [types.SimpleNamespace(args=entry) for entry in arguments]


def random_text(rng: random.Random, length: int) -> str:
    return Letters().text([rng.randrange(26) for _ in range(length)])


def test_loglikelihoods(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared, empty and too long contexts, and one that begins with BOS; in order, greedy ones found, all cached."""
    lm, rng, encode = make(), random.Random(1), Letters().encode
    first = random_text(rng, 5)
    greedy = Letters().text(Oracle(encode(first), SamplingParams(temperature=0.0, max_tokens=3)).generate())
    arguments = [
        (first, "abc"),
        ("", "xyz"),
        (random_text(rng, 40), "hello"),
        (first, greedy),
        ("~" + first, "abc"),
        ("", "~yz"),
        (first, "q"),
    ]
    cache = Cache()
    lm.set_cache_hook(cache)
    contexts: list[list[int]] = []
    score_many = LLM.score_many
    monkeypatch.setattr(
        LLM, "score_many", lambda llm, prompts, *args: contexts.extend(prompts) or score_many(llm, prompts, *args)
    )
    found = lm.loglikelihood(requests(arguments), disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(arguments, found, strict=True):
        ids = encode(continuation)
        ids = ids[1:] if ids[0] == BOS else ids
        expected, expected_greedy = logprob((encode(context) or [BOS])[-(MAX_LENGTH + 1 - len(ids)) :], ids)
        assert value == pytest.approx(expected, abs=1e-4)
        assert is_greedy == expected_greedy
    assert found[3][1]
    assert len(contexts) == 4
    assert sorted(cache.found) == sorted(("loglikelihood", *each) for each in zip(arguments, found, strict=True))


def test_rolling_loglikelihoods(make: Any) -> None:
    """Every token once; a text's last window sees as many tokens as the model can."""
    lm, rng = make(), random.Random(2)
    texts = [random_text(rng, length) for length in (1, MAX_LENGTH, MAX_LENGTH + 13)]
    cache = Cache()
    lm.set_cache_hook(cache)
    found = lm.loglikelihood_rolling(requests([(text,) for text in (*texts, "")]), disable_tqdm=True)
    for text, value in zip(texts, found, strict=False):
        ids = Letters().encode(text)
        expected = logprob([BOS], ids[:MAX_LENGTH])[0]
        if rest := ids[MAX_LENGTH:]:
            expected += logprob(ids[-MAX_LENGTH - 1 : -len(rest)], rest)[0]
        assert value == pytest.approx(expected, abs=1e-4)
    assert found[3] == 0.0
    assert [request for _, request, _ in cache.found] == [(text,) for text in (*texts, "")]


def test_generations(make: Any) -> None:
    lm, rng, letters = make(max_gen_toks=6), random.Random(7), Letters()
    texts = [random_text(rng, length) for length in (8, 3, 40, 5)]
    wanted = []
    for text, room in zip(texts, (24, 24, 24, 28), strict=True):
        max_tokens = MAX_LENGTH - room
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=(BOS,))
        ids = Oracle(letters.encode(text)[-room:], params).generate()
        wanted.append(letters.text([token for token in ids if token not in (BOS, EOS)]))
    stop = wanted[0][2:4]
    assert len(stop) == 2
    arguments = [
        (texts[0], {"until": [stop, "~"]}),
        (texts[1], {"until": "~"}),
        (texts[2], {"until": "~"}),
        (texts[3], {"until": "~", "max_gen_toks": 2}),
    ]
    cache = Cache()
    lm.set_cache_hook(cache)
    found = lm.generate_until(requests(arguments), disable_tqdm=True)
    assert found == [wanted[0].partition(stop)[0], *wanted[1:]]
    assert sorted(cache.found, key=str) == sorted(
        (("generate_until", *each) for each in zip(arguments, found, strict=True)), key=str
    )


def test_begin_tokens(make: Any) -> None:
    assert make().tok_encode("ab") == [0, 1]
    assert make(add_bos_token=True).tok_encode("ab") == [BOS, 0, 1]
    assert make(add_bos_token=True).tok_encode("~ab") == [BOS, 0, 1]
    assert make(add_bos_token=True).tok_encode("ab", add_special_tokens=False) == [0, 1]
    assert (make().prefix_token_id, make(prefix_token_id=7).prefix_token_id, make().eot_token_id) == (BOS, 7, EOS)


def test_wrong_options(make: Any) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching: the LLM that was given is made already"):
        make(enable_prefix_caching=False)
    with pytest.raises(ValueError, match="JAX_PLATFORMS"):
        make(device="abacus:1")
    with pytest.raises(ValueError, match=r"pagedjax\.text\.Tokenizer"):
        make().apply_chat_template([{"role": "user", "content": "hello"}])
    from pagedjax.lm_eval import PagedJaxLM

    with pytest.raises(ValueError, match="give max_length"):
        PagedJaxLM("nowhere", max_model_len=7)
    with pytest.raises(ValueError, match=r"unknown engine options \['nm_blocks'\]"):
        PagedJaxLM("nowhere", nm_blocks=7)


def test_the_command_knows_the_model(make: Any) -> None:
    run = subprocess.run([sys.executable, "-m", "pagedjax.lm_eval", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Evaluation Harness" in run.stdout
    from lm_eval.api.registry import get_model

    assert get_model("pagedjax").__name__ == "PagedJaxLM"
    assert get_model("dummy")
