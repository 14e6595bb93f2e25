"""pagedjax.llm on the mock model: text, streams, other people's requests, other weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import mock_engine
import mock_model
import numpy as np
import pytest
from mock_engine import GREEDY, Pieces, finish, generate, ids, use_tokenizer
from mock_model import VOCAB, Oracle

from pagedjax import LLM, SamplingParams


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


# Text

STOP_PROMPT = [2, 3]
STOP_IDS = Oracle(STOP_PROMPT, GREEDY).generate()
assert len({*STOP_IDS[:5]}) == 5
STOP_TEXT = dict(zip(STOP_IDS, ("ABC", "DEF", "G", "HI", "J"), strict=False))


@pytest.mark.parametrize(
    ("options", "text", "num_tokens", "stop_reason"),
    [
        ({"stop": "DEFGHIJ"}, "ABC", 5, "DEFGHIJ"),
        ({"stop": "DEFGHIJ", "include_stop_str_in_output": True}, "ABCDEFGHIJ", 5, "DEFGHIJ"),
        ({"stop": ["nowhere", "CD", "F"]}, "AB", 2, "CD"),
        ({"stop": "DEFX", "stop_token_ids": [STOP_IDS[2]]}, "ABCDEF", 3, STOP_IDS[2]),  # held back, then released
        ({"stop_token_ids": [STOP_IDS[2]], "include_stop_str_in_output": True}, "ABCDEFG", 3, STOP_IDS[2]),
        ({"stop": "DEFX", "max_tokens": 2}, "ABCDEF", 2, None),
        ({"stop": ["B", "H"], "min_tokens": 3}, "ABCDEFG", 4, "H"),
    ],
)
def test_stop_strings(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, options: dict[str, Any], text: str, num_tokens: int, stop_reason: Any
) -> None:
    use_tokenizer(monkeypatch, llm, Pieces(STOP_TEXT))
    params = dataclasses.replace(GREEDY, logprobs=0, **options)
    for decode_steps in (1, 8):
        mock_engine.pace(llm, decode_steps=decode_steps)
        (output,) = generate(llm, [STOP_PROMPT], params)
        (sample,) = output.outputs
        assert (sample.text, sample.token_ids) == (text, STOP_IDS[:num_tokens])
        assert sample.stop_reason == stop_reason
        assert sample.finish_reason == ("length" if stop_reason is None else "stop")
        assert sample.logprobs is not None
        assert len(sample.logprobs) == num_tokens


def test_text_prompts(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    use_tokenizer(monkeypatch, llm, Pieces())
    output, other = generate(llm, ["bcd", [1, 2, 3]])
    assert (output.prompt, other.prompt) == ("bcd", None)
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.outputs[0].text == Pieces().decode(ids(other)) != ""


def test_stream(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    use_tokenizer(monkeypatch, llm, Pieces())
    mock_engine.pace(llm, decode_steps=2)
    deltas = list(llm.stream([1, 2, 3], GREEDY))
    assert len(deltas) > 3
    assert all(deltas)
    assert "".join(deltas) == Pieces().decode(Oracle([1, 2, 3], GREEDY).generate())
    with pytest.raises(ValueError, match="n=2"):
        llm.stream([1], SamplingParams(n=2))


def test_streams_side_by_side(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Each one's steps also run the others: nothing is lost, whoever takes the step."""
    use_tokenizer(monkeypatch, llm, Pieces())
    longer = dataclasses.replace(GREEDY, max_tokens=24)
    slow, fast = llm.stream([1, 2, 3], longer), llm.stream([4], GREEDY)
    first = next(slow)
    llm.add_request("mine", [5], GREEDY)
    (between,) = generate(llm, [[6]], dataclasses.replace(GREEDY, max_tokens=20))
    assert ids(between) == Oracle([6], dataclasses.replace(GREEDY, max_tokens=20)).generate()
    assert ids(finish(llm)["mine"]) == Oracle([5], GREEDY).generate()
    assert "".join(fast) == Pieces().decode(Oracle([4], GREEDY).generate())
    assert first + "".join(slow) == Pieces().decode(Oracle([1, 2, 3], longer).generate())


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_closed_stream_is_aborted(monkeypatch: pytest.MonkeyPatch, llm: LLM, num_taken: int) -> None:
    use_tokenizer(monkeypatch, llm, Pieces())
    mock_engine.pace(llm, decode_steps=1)
    stream = llm.stream([1, 2, 3], GREEDY)
    for _ in range(num_taken):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.has_unfinished_requests()
    llm.audit()


# Requests of several people


def test_generate_beside_added_requests(llm: LLM) -> None:
    llm.add_request("short", [1], GREEDY)
    llm.add_request("aborted", [2], GREEDY)
    llm.step()
    llm.abort("aborted")
    (output,) = generate(llm, [[3]], dataclasses.replace(GREEDY, max_tokens=30))
    assert ids(output) == Oracle([3], dataclasses.replace(GREEDY, max_tokens=30)).generate()
    assert llm.has_unfinished_requests()
    outputs = llm.step()  # both have ended meanwhile, and each comes out once
    assert sorted(output.request_id for output in outputs) == ["aborted", "short"]
    found = {output.request_id: output for output in outputs}
    assert ids(found["short"]) == Oracle([1], GREEDY).generate()
    assert found["aborted"].outputs[0].finish_reason == "abort"
    assert not llm.has_unfinished_requests()


def test_generate_leaves_an_id_that_looks_like_its_own_alone(llm: LLM) -> None:
    name = f"generate-{next(llm._ids) + 1}"
    llm.add_request(name, [1], GREEDY)
    generate(llm, [[2]], dataclasses.replace(GREEDY, max_tokens=1))
    assert ids(finish(llm)[name]) == Oracle([1], GREEDY).generate()


def test_a_refused_prompt_starts_nothing(llm: LLM) -> None:
    llm.add_request("mine", [1], GREEDY)
    with pytest.raises(ValueError, match=r"prompt 1: .*outside the vocabulary"):
        generate(llm, [[1], [VOCAB]])
    assert list(llm._engine.requests) == ["mine"]
    assert ids(finish(llm)["mine"]) == Oracle([1], GREEDY).generate()


def test_request_ids(llm: LLM) -> None:
    llm.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"):
        llm.add_request("a", [2], GREEDY)
    with pytest.raises(ValueError, match="must be a string, not int"):
        llm.add_request(7, [2], GREEDY)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="'b'"):
        llm.abort("b")
    assert ids(finish(llm)["a"]) == Oracle([1], GREEDY).generate()
    llm.add_request("a", [2], GREEDY)  # free again
    llm.abort("a")
    with pytest.raises(KeyError):
        llm.abort("a")
    (output,) = llm.step()
    assert (output.outputs[0].finish_reason, ids(output)) == ("abort", [])
    assert not llm.has_unfinished_requests()


def test_outputs_are_snapshots(llm: LLM) -> None:
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1], dataclasses.replace(GREEDY, logprobs=1))
    (first,) = llm.step()
    before = copy.deepcopy(first.outputs)
    finish(llm)
    assert first.outputs == before


# Weights


@pytest.fixture
def set_salt(llm: LLM) -> Iterator[Callable[..., None]]:
    """Changes the mock's parameter, and changes it back."""

    def change(salt: float, **options: Any) -> None:
        llm.update_params({"salt": jnp.float32(salt)}, **options)

    yield change
    change(0)


def with_old_kv(output: list[int], num_old: int) -> list[int]:
    """Greedy output of [1, 2] that goes on from `output` with salt 3, where K and V of the first tokens have salt 0."""
    tokens = [1, 2, *output]
    while len(tokens) < 2 + GREEDY.max_tokens:
        salts = [0 if place < num_old else 3 for place in range(len(tokens))]
        tokens.append(int(np.argmax(mock_model.raw_logits(tokens, salts, 3)[-1])))
    return tokens[2:]


def test_other_weights(llm: LLM, set_salt: Callable[..., None]) -> None:
    set_salt(3)
    (output,) = generate(llm, [[1, 2]])
    assert ids(output) == with_old_kv([], 0)
    assert ids(output) != Oracle([1, 2], GREEDY).generate()


@pytest.mark.parametrize(("running", "num_old"), [("recompute", 0), ("keep", 2 + 4 - 1)])
def test_weights_of_running_requests(llm: LLM, set_salt: Callable[..., None], running: str, num_old: int) -> None:
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1, 2], GREEDY)
    for _ in range(4):
        llm.step()
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        set_salt(3)
    set_salt(3, running=running)
    # The last known token has no K and V yet.
    assert ids(finish(llm)["a"]) == with_old_kv(Oracle([1, 2], GREEDY).generate()[:4], num_old)
    assert with_old_kv([], 0)[4:] != with_old_kv([], 5)[4:]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, r"missing \['salt'\]"),
        ({"salt": jnp.float32(0), "pepper": jnp.float32(0)}, r"unexpected \['pepper'\]"),
        ({"salt": jnp.zeros(2)}, r"salt is float32\[2\]; the engine has float32\[\]"),
        ({"salt": jnp.int32(0)}, "salt is int32"),
    ],
)
def test_weights_that_do_not_match(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.update_params(params)
    assert ids(generate(llm, [[1]])[0]) == Oracle([1], GREEDY).generate()


def test_update_params_modes(llm: LLM) -> None:
    with pytest.raises(ValueError, match="running='maybe'"):
        llm.update_params({"salt": jnp.float32(0)}, running="maybe")  # type: ignore[arg-type]


def test_names_of_requests_do_not_collide_with_outputs_on_their_way(llm: LLM) -> None:
    """An aborted request's output is still to come; generate makes up a name of its own."""
    upcoming = llm._new_id("generate")
    upcoming = f"generate-{int(upcoming.removeprefix('generate-')) + 1}"
    llm.add_request(upcoming, [9, 9, 9], GREEDY)
    llm.abort(upcoming)
    mock_engine.pace(llm, budget=2)
    (output,) = generate(llm, [[1, 2, 3, 4, 5, 6]])
    assert ids(output) == Oracle([1, 2, 3, 4, 5, 6], GREEDY).generate()
    assert [o.outputs[0].finish_reason for o in llm.step()] == ["abort"]


# Figures


def test_stats_and_metrics(llm: LLM) -> None:
    before = llm.stats()
    llm.add_request("a", [1, 2, 3], dataclasses.replace(GREEDY, max_tokens=20))
    llm.add_request("b", [1], dataclasses.replace(GREEDY, n=7))
    llm.step()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (6, 2)
    assert stats.num_free_blocks + stats.num_cached_blocks == 19 - 2 - 5
    assert stats["kv_usage"] == pytest.approx(7 / 19)
    assert stats.num_steps == before.num_steps + 1
    outputs = finish(llm)
    assert llm.stats().num_generated_tokens == before.num_generated_tokens + 20 + 7 * 12
    assert (llm.stats().kv_usage, llm.stats().num_running) == (0.0, 0)
    metrics = outputs["a"].metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(times)  # type: ignore[type-var]


def test_what_model_and_tokenizer_say_is_united() -> None:
    class Small(Pieces):
        eos_ids, vocab_size = (5,), 30

    model = mock_model.MockDecoder()
    model.config = dataclasses.replace(mock_model.CONFIG, num_tokens=None)  # 40 rows, padding unnamed
    llm = LLM(model, None, Small(), end_ids=[7], **mock_engine.OPTIONS)
    assert llm._maker.end_ids == {5, 7}
    assert (llm._maker.vocab_size, llm._runner._num_vocab_tokens) == (30, 30)
    with pytest.raises(ValueError, match="ids go from 0 to 29"):
        llm.add_request("a", [30])
