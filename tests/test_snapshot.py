"""A saved state goes on, in this process or another, as if nothing had happened."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import mock_engine
import numpy as np
import padded_pool
import pytest
import test_speculation
import test_update_params
from flax import nnx
from killed_engine import TOKENIZER, add_requests, plain, rest, start, step
from mock_engine import GREEDY, SEEDED, finish, generate, ids, use_tokenizer
from mock_model import Oracle

from pagedjax import LLM, Decoder, SamplingParams, block_table
from pagedjax.events import Event
from pagedjax.snapshot import raw_blocks
from pallas_kernels import KVPages, gather_kv


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    for llm in mock_engine.idle():
        use_tokenizer(monkeypatch, llm, TOKENIZER)
        yield llm


def check_goes_on(llm: LLM, folder: pathlib.Path, add: Callable[[LLM], None], *steps: int, kv: bool) -> None:
    """An engine that is saved after so many steps, and so many more, goes on like one that was not, and so does each
    state in an idle engine."""
    start(llm, add)
    expected = rest(llm)
    start(llm, add)
    saved, early = [], {}
    for number, num_steps in enumerate(steps):
        early = early | step(llm, num_steps)
        llm.save_state(folder / str(number), include_kv=kv)
        saved.append((early, list(llm._engine.requests), arrivals(llm), llm.stats().num_used_blocks))
    num_made = llm._maker.num_made
    assert early | rest(llm) == expected
    for number, (early, unfinished, order, num_used) in enumerate(saved):
        llm._maker.num_made = 99
        assert llm.load_state(folder / str(number)) == unfinished
        assert (llm._maker.num_made, arrivals(llm)) == (num_made, order)
        if not kv or "searched" not in unfinished:  # beams leave their K/V behind
            assert llm.stats().num_used_blocks == (num_used if kv else 0)
        assert early | rest(llm) == expected


def arrivals(llm: LLM) -> list[tuple[str, int]]:
    """What runs and waits in the order in which it is served; of a search the first beam."""
    scheduler = llm._engine.scheduler
    sequences = {s for s in [*scheduler.running, *scheduler.waiting] if s.request.beams is None or s.index == 0}
    return [(s.request.request_id, s.index) for s in sorted(sequences, key=lambda s: s.arrival)]


WAYS = pytest.mark.parametrize("kv", [False, True], ids=["recomputed", "with K/V"])


@WAYS
def test_everything_goes_on(llm: LLM, tmp_path: pathlib.Path, kv: bool) -> None:
    """Also samples of which some have ended, half computed prompts, preempted sequences."""
    mock_engine.pace(llm, budget=7, decode_steps=2)
    num_preemptions = llm.stats().num_preemptions
    check_goes_on(llm, tmp_path, add_requests, 1, 3, 9, 20, kv=kv)
    assert llm.stats().num_preemptions > num_preemptions


@WAYS
def test_speculation_goes_on(tmp_path: pathlib.Path, kv: bool) -> None:
    llm = test_speculation.engine()  # on a model that repeats itself
    params = SamplingParams(temperature=0.5, max_tokens=20, logprobs=1)

    def add(llm: LLM) -> None:
        for index in range(3):
            llm.add_request(str(index), [7, 8] * (index + 1), dataclasses.replace(params, seed=index))

    before = llm.stats().num_accepted_tokens
    mock_engine.pace(llm, decode_steps=1)
    check_goes_on(llm, tmp_path, add, 3, kv=kv)
    mock_engine.pace(llm)
    assert llm.stats().num_accepted_tokens > before


@pytest.mark.parametrize("dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_decoder_goes_on(tmp_path: pathlib.Path, dtype: str) -> None:
    """In float32; of a quantised pool the blocks are saved as they are."""
    llm = LLM(
        Decoder(test_update_params.CONFIG, rngs=nnx.Rngs(0)),
        max_model_len=64,
        block_size=4,
        num_blocks=60,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        batch_invariant=True,
        kv_cache_dtype=dtype,
    )
    mock_engine.pace(llm, decode_steps=2)

    def add(llm: LLM) -> None:
        params = SamplingParams(n=2, temperature=0.8, max_tokens=16, logprobs=3, prompt_logprobs=0)
        for index in range(3):
            llm.add_request(str(index), [index, 50, 60] * (index + 2), params)

    for kv in (False, True):
        check_goes_on(llm, tmp_path / str(kv), add, 2, 3, kv=kv)
    start(llm, add)
    step(llm, 3)
    llm.save_state(tmp_path, include_kv=True)
    held = [llm.export_kv(str(index)) for index in range(2)]
    finish(llm)
    llm.load_state(tmp_path)
    for index, arrays in enumerate(held):
        for found, expected in zip(llm.export_kv(str(index)), arrays, strict=True):
            np.testing.assert_array_equal(found, expected)


# K/V


def test_kv_is_there_and_shared_as_before(llm: LLM, tmp_path: pathlib.Path) -> None:
    """Only what rows hold, at the front of the pool; no token is computed again."""
    generate(llm, [[1, 2, 3, 4]])  # leaves cached blocks
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [7] * 9, SamplingParams(n=3, seed=1, max_tokens=6))
    step(llm, 3)
    before = llm.stats()
    assert before.num_shared_blocks == 4
    llm.save_state(tmp_path, include_kv=True)
    after = llm.stats()
    assert after.num_cached_blocks == before.num_cached_blocks > 0
    expected = ids(finish(llm)["a"])
    llm.load_state(tmp_path)
    found, scheduler, table = llm.stats(), llm._engine.scheduler, llm._runner.state.table
    assert (found.num_used_blocks, found.num_shared_blocks) == (before.num_used_blocks, 4)
    assert found.num_cached_blocks == 0
    block_table.check(table)
    assert np.asarray(table.ref_counts)[1 : found.num_used_blocks + 1].min() > 0
    assert found.num_free_blocks == int(table.num_free_blocks)
    assert all(sequence.num_pending == 1 for sequence in scheduler.running)
    assert ids(finish(llm)["a"]) == expected == Oracle([7] * 9, SamplingParams(seed=1, max_tokens=6)).generate()


def test_older_weights_stay_with_their_kv(llm: LLM, tmp_path: pathlib.Path) -> None:
    """And publish nothing; the versions of the tokens are known on, and the engine's."""
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1] * 5, GREEDY)
    step(llm, 4)
    llm.update_params(llm.params, running="keep")
    llm.step()
    version = llm.weights_version
    llm.save_state(tmp_path, include_kv=True)
    finish(llm)
    llm.update_params(llm.params)
    llm.load_state(tmp_path)
    assert llm.weights_version == version
    (sample,) = finish(llm)["a"].outputs
    assert sample.weights_versions == [version - 1] * 4 + [version] * 8
    cache = llm._engine.scheduler.ledger.cache
    assert cache is not None
    assert not cache.block_ids


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        pytest.param({"block_size": 4, "num_blocks": 14, "max_num_seqs": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_with_other_options(
    llm: LLM, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    other = mock_engine.engine(**options)
    use_tokenizer(monkeypatch, other, TOKENIZER)
    mock_engine.pace(llm, decode_steps=2)
    start(llm, add_requests)
    early = step(llm, 12)
    llm.save_state(tmp_path, include_kv=True)
    expected = rest(llm)
    other.load_state(tmp_path, include_kv="block_size" not in options)
    assert rest(other) == expected
    assert early


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_blocks_of_every_pool(dtype: str, head_dim: int) -> None:
    """Values and scales, bit by bit, of the blocks asked for and in their order; more than one call takes."""
    num_blocks = raw_blocks.CHUNK + 9
    sizes = (2, num_blocks, 4, 2, head_dim, "float8_e4m3fn" if dtype == "fp8" else dtype)
    rng = np.random.default_rng(0)
    pages = jax.tree.map(lambda leaf: jnp.asarray(rng.integers(-99, 99, leaf.shape), leaf.dtype), KVPages.zeros(*sizes))
    block_ids = rng.permutation(np.arange(1, num_blocks))[: raw_blocks.CHUNK + 5].tolist()
    blocks = raw_blocks.read_blocks(pages, block_ids)
    written = raw_blocks.write_blocks(KVPages.zeros(*sizes), blocks)
    for found, expected in zip(jax.tree.leaves(written), jax.tree.leaves(pages), strict=True):
        found, expected = np.asarray(found.astype(jnp.float32)), np.asarray(expected.astype(jnp.float32))
        np.testing.assert_array_equal(found[:, 1 : len(block_ids) + 1], expected[:, block_ids])
        assert not found[:, 0].any()
        assert not found[:, len(block_ids) + 1 :].any()

    padded = raw_blocks.write_blocks(padded_pool.zeros(*sizes), blocks)
    assert padded.is_padded == (head_dim == 16 or dtype in ("int8", "fp8"))
    assert raw_blocks.layout(padded) == raw_blocks.layout(pages)
    again = raw_blocks.read_blocks(padded, list(range(1, len(block_ids) + 1)))
    for found, expected in zip(again, blocks, strict=True):
        np.testing.assert_array_equal(found, expected)
    found, expected = (
        gather_kv(pool, 1, jnp.array(ids), 8) for pool, ids in ((padded, [1, 2]), (pages, block_ids[:2]))
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 4}, r"'block_size': 2.*'block_size': 4"),
        ({"kv_cache_dtype": "int8"}, "'float32'.*'int8'"),
        ({"max_num_seqs": 2}, "3 rows, and there are 2; raise max_num_seqs"),
        ({"num_blocks": 14}, r"\d+ blocks, and there are 13; raise num_blocks"),
    ],
)
def test_kv_that_does_not_fit(llm: LLM, tmp_path: pathlib.Path, options: dict[str, Any], message: str) -> None:
    """Not compiled: the engines of other sizes take no step."""
    llm.add_request("a", [7] * 9, SamplingParams(n=3, seed=1, max_tokens=16))
    step(llm, 3)
    llm.save_state(tmp_path, include_kv=True)
    finish(llm)
    other = LLM(mock_engine.MockDecoder(), tokenizer=TOKENIZER, **mock_engine.OPTIONS | options)
    with pytest.raises(ValueError, match=message + ".*load the state with include_kv=False"):
        other.load_state(tmp_path)
    assert not other.has_unfinished_requests()
    assert other.load_state(tmp_path, include_kv=False) == ["a"]


# Outputs nobody has yet


def test_outputs_on_their_way_are_saved(llm: LLM, tmp_path: pathlib.Path) -> None:
    """A callback saves in the midst of `generate`, whose caller will never get what it has."""
    llm.add_request("aborted", [9, 9], dataclasses.replace(SEEDED, logprobs=1))
    llm.step()
    llm.abort("aborted")
    prompts = [[1, 2], [3], [4, 5, 6]]
    lengths = [1, 3, 9]
    params = [dataclasses.replace(GREEDY, max_tokens=length, prompt_logprobs=0) for length in lengths]

    def on_event(event: Event) -> None:
        if event.name == "finished" and event.num_tokens == 3:
            llm.save_state(tmp_path)

    mock_engine.pace(llm, decode_steps=1)
    llm._engine.observer.on_event = on_event
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm._engine.observer.on_event = None
    aborted = finish(llm)["aborted"]
    assert len(llm.load_state(tmp_path)) == 1
    found = finish(llm)
    assert plain(found.pop("aborted")) == plain(aborted)
    assert [plain(found[output.request_id]) for output in outputs] == [plain(output) for output in outputs]
    assert len(found) == 3


def test_times_are_ages(llm: LLM, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock of another process has another beginning."""
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1], GREEDY)
    llm.add_request("ended", [2], GREEDY)
    llm.step()
    llm.abort("ended")
    metrics = [llm._engine.requests["a"].metrics, llm._engine.leaving[0].metrics]
    now, monotonic = time.monotonic(), time.monotonic
    llm.save_state(tmp_path)
    finish(llm)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() - 1e6)
    llm.load_state(tmp_path)
    found = [llm._engine.requests["a"].metrics, llm._outbox.held[0].metrics]
    for old, new in zip(metrics, found, strict=True):
        assert old.first_token_time is not None
        assert new.first_token_time is not None
        assert new.first_token_time - new.arrival_time == pytest.approx(old.first_token_time - old.arrival_time)
        assert time.monotonic() - new.arrival_time == pytest.approx(now - old.arrival_time, abs=5)
    assert found[1].finished_time is not None
    finish(llm)
