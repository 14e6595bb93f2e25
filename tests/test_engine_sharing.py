"""The engine on the mock model where blocks are shared: prefix hits, forks, copies, windows, and what is given back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import mock_engine
import mock_model
import numpy as np
import pytest
import windowed_mock
from mock_engine import GREEDY, SEEDED, finish, generate, ids
from mock_model import Oracle

import pallas_kernels
from pagedjax import LLM, SamplingParams
from pagedjax.plan import StepPlan, StepResult

SIZE = mock_engine.OPTIONS["block_size"]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
PROBED = dataclasses.replace(GREEDY, logprobs=5)

_salts = itertools.count()


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from mock_engine.idle()


def off() -> LLM:
    """An engine without a prefix cache."""
    return windowed_mock.engine("local and global", enable_prefix_caching=False)


def cold(params: SamplingParams) -> SamplingParams:
    """The same request, for which the cache has nothing."""
    return dataclasses.replace(params, cache_salt=f"cold {next(_salts)}")


def cached_ids(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Where the published blocks of a prompt lie."""
    llm.add_request("probe", prompt, params)
    (sequence,) = llm._engine.requests["probe"].sequences
    ledger = llm._engine.scheduler.ledger
    assert ledger.cache is not None
    blocks = ledger.cache.match(ledger.keys(sequence, len(prompt) // SIZE))
    llm.abort("probe")
    finish(llm)
    return [block.block_id for block in blocks if block.block_id is not None]


def stored(llm: LLM, block_ids: list[int]) -> list[np.ndarray]:
    """K and V of these blocks in every layer."""
    pages = llm._runner.state.kv_pages
    return [
        np.asarray(part)
        for layer in range(mock_model.NUM_LAYERS)
        for part in pallas_kernels.gather_kv(pages, layer, jnp.asarray(block_ids), len(block_ids) * SIZE)
    ]


def test_a_full_hit_leaves_a_token_to_run_and_touches_nothing(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    params = cold(PROBED)
    (first,) = generate(llm, [PROMPT], params)
    block_ids = cached_ids(llm, PROMPT, params)
    assert len(block_ids) == len(PROMPT) // SIZE
    before, counts = stored(llm, block_ids), np.asarray(llm._runner.state.table.ref_counts)
    num_new: list[int] = []
    run = llm._runner.run

    def count(plan: StepPlan) -> StepResult:
        num_new.append(plan.total_new_tokens)
        return run(plan)

    monkeypatch.setattr(llm._runner, "run", count)
    (again,) = generate(llm, [PROMPT], params)
    assert num_new[0] == SIZE  # of the last block one token must be run, and blocks are shared whole
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(PROMPT) - SIZE)
    assert again.outputs == first.outputs
    assert ids(again) == Oracle(PROMPT, GREEDY).generate()
    for old, new in zip(before, stored(llm, block_ids), strict=True):
        np.testing.assert_array_equal(new, old)
    np.testing.assert_array_equal(llm._runner.state.table.ref_counts, counts)


@pytest.mark.parametrize("budget", [None, 6])
def test_a_block_is_hit_only_once_it_is_written(llm: LLM, budget: int | None) -> None:
    mock_engine.pace(llm, budget=budget)
    prompt, params = [*PROMPT, 13], cold(GREEDY)
    for request_id in ("a", "b"):
        llm.add_request(request_id, prompt, params)
    starts = []
    while llm.stats().num_waiting:
        llm.step()
        starts.append(llm.stats().num_running)
    assert starts == ([1] if budget is None else [1, 1]) + [2]
    outputs = finish(llm)
    assert [ids(outputs[i]) for i in ("a", "b")] == [Oracle(prompt, GREEDY).generate()] * 2
    assert [outputs[i].num_cached_tokens for i in ("a", "b")] == [0, len(PROMPT)]


def test_cached_tokens_are_counted(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    scheduler = llm._engine.scheduler
    for name in ("num_cached_tokens", "num_prompt_tokens"):
        monkeypatch.setattr(scheduler, name, 0)
    params = cold(dataclasses.replace(GREEDY, max_tokens=1))
    hits = [generate(llm, [prompt], params)[0].num_cached_tokens for prompt in (PROMPT[:5], PROMPT, PROMPT, [6])]
    assert hits == [0, 4, 6, 0]
    assert llm.stats().prefix_hit_rate == 10 / (5 + 8 + 8 + 1)
    (output,) = generate(llm, [PROMPT], dataclasses.replace(params, n=3))  # counts once, whatever the samples share
    assert output.num_cached_tokens == 6
    assert llm.stats().prefix_hit_rate == 16 / 30
    assert llm.stats().num_cached_blocks >= 4


def test_a_continued_conversation_hits_what_was_generated(llm: LLM) -> None:
    params = cold(dataclasses.replace(GREEDY, max_tokens=8))
    (first,) = generate(llm, [PROMPT], params)
    prompt = [*PROMPT, *ids(first), 3]
    (second,) = generate(llm, [prompt], params)
    assert second.num_cached_tokens == 14  # of 15 that have K and V; the last one that was drawn has none
    assert ids(second) == Oracle(prompt, params).generate()


def test_salts_do_not_share(llm: LLM) -> None:
    salted, other = cold(GREEDY), cold(GREEDY)
    hits = [generate(llm, [PROMPT], params)[0].num_cached_tokens for params in (salted, other, salted, other)]
    assert hits == [0, 0, 6, 6]


def test_without_a_cache_nothing_is_kept_and_samples_still_fork() -> None:
    llm = off()
    for _ in range(2):
        (output,) = generate(llm, [PROMPT], GREEDY)
        assert output.num_cached_tokens == 0
        assert ids(output) == windowed_mock.greedy(PROMPT, windowed_mock.WINDOWS["local and global"], GREEDY.max_tokens)
    stats = llm.stats()
    assert (stats.num_cached_blocks, stats.prefix_hit_rate) == (0, 0)
    assert stats.num_free_blocks == llm.plan.num_usable_blocks
    llm.add_request("a", PROMPT, dataclasses.replace(GREEDY, n=4))
    llm.step(), llm.step()
    tables = np.asarray(llm._runner.state.table.block_tables)[:, : len(PROMPT) // SIZE - 1]
    assert len(np.unique(tables[tables > 0])) == len(PROMPT) // SIZE - 1
    samples = finish(llm)["a"].outputs
    assert [sample.token_ids for sample in samples] == [ids(output)] * 4
    llm.audit()


# Weights


def test_update_params_frees_what_is_cached(llm: LLM) -> None:
    generate(llm, [PROMPT])
    assert llm.stats().num_cached_blocks > 0
    llm.update_params(llm._runner.params)
    assert llm.stats().num_cached_blocks == 0
    assert llm.stats().num_free_blocks == int(llm._runner.state.table.num_free_blocks) == llm.plan.num_usable_blocks
    assert generate(llm, [PROMPT])[0].num_cached_tokens == 0


def test_kv_of_older_weights_is_never_found(llm: LLM) -> None:
    generate(llm, [PROMPT])
    try:
        llm.update_params({"salt": jnp.float32(3)})
        (output,) = generate(llm, [PROMPT])
        tokens = list(PROMPT)
        for token in ids(output):
            assert token == np.argmax(mock_model.raw_logits(tokens, 3, 3)[-1])
            tokens.append(token)
    finally:
        llm.update_params({"salt": jnp.float32(0)})
    (output,) = generate(llm, [PROMPT])
    assert (ids(output), output.num_cached_tokens) == (Oracle(PROMPT, GREEDY).generate(), 0)


def test_a_row_that_keeps_older_kv_publishes_nothing(llm: LLM) -> None:
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", PROMPT, dataclasses.replace(GREEDY, max_tokens=20))
    for _ in range(4):
        llm.step()
    llm.update_params(llm._runner.params, running="keep")
    llm.add_request("b", PROMPT, GREEDY)
    outputs = finish(llm)
    assert outputs["b"].num_cached_tokens == 0
    assert llm.stats().num_cached_blocks == (len(PROMPT) + GREEDY.max_tokens - 1) // SIZE  # b's
    assert ids(outputs["a"])[:12] == ids(outputs["b"]) == Oracle(PROMPT, GREEDY).generate()


# Forks and copies


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_shared_tail_is_copied_in_every_layer(kv_cache_dtype: str) -> None:
    """The mock reads K and V of every layer, with their scales, so that a copy that misses one changes the tokens."""
    llm = mock_engine.engine() if kv_cache_dtype == "auto" else mock_engine.engine(kv_cache_dtype=kv_cache_dtype)
    mock_engine.pace(llm, decode_steps=1)
    params = cold(dataclasses.replace(SEEDED, n=4, max_tokens=4))
    prompt = PROMPT[:4]  # the samples start from 3 tokens: a block and a half
    llm.add_request("a", prompt, params)
    llm.step()
    llm.step()
    rows = [sequence.row for sequence in llm._engine.requests["a"].sequences]
    assert None not in rows
    table = np.asarray(llm._runner.state.table.block_tables)[np.array(rows)]
    assert len(set(table[:, 0])) == 1
    assert len(set(table[:, 1])) == 4
    whole = jax.tree.map(np.asarray, llm._runner.state.kv_pages)
    for layer in range(mock_model.NUM_LAYERS):
        firsts = [pallas_kernels.gather_kv(whole, layer, jnp.asarray([block_id]), SIZE - 1) for block_id in table[:, 1]]
        for k, v in firsts[1:]:
            np.testing.assert_array_equal(k, firsts[0][0])
            np.testing.assert_array_equal(v, firsts[0][1])
    for sample in finish(llm)["a"].outputs:
        assert sample.token_ids == Oracle(prompt, params, index=sample.index).generate()
    mock_engine.pace(llm)
    llm.audit()


def test_eight_samples_of_a_long_prompt_take_little_more_than_one() -> None:
    llm, prompt = off(), [*range(30), 7, 8]
    shared = len(prompt[:-1]) // SIZE  # full blocks of what all begin with
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", prompt, dataclasses.replace(GREEDY, n=8, max_tokens=14))
    most_rows = 0
    while llm.has_unfinished_requests():
        llm.step()
        lens = [int(length) for length in llm._runner.state.table.seq_lens if length]
        least = sum(-(-length // SIZE) - shared for length in lens) + shared * bool(lens)
        assert least <= windowed_mock.num_used(llm) <= least + len(lens)
        most_rows = max(most_rows, len(lens))
    assert most_rows == 8
    mock_engine.pace(llm)
    llm.audit()


def test_more_samples_than_rows(llm: LLM) -> None:
    params = cold(dataclasses.replace(SEEDED, n=8, max_tokens=6))
    (output,) = generate(llm, [PROMPT], params)
    assert [s.token_ids for s in output.outputs] == [Oracle(PROMPT, params, index=i).generate() for i in range(8)]
    assert output.num_cached_tokens == 0


def test_a_preempted_row_hits_its_own_old_blocks(llm: LLM) -> None:
    mock_engine.pace(llm, decode_steps=1)
    for preempt_at in (1, 2, 5):
        params = cold(GREEDY)
        llm.add_request("a", PROMPT[:4], params)
        while not (outputs := llm.step()) or len(ids(outputs[0])) < preempt_at:
            pass
        (sequence,) = llm._engine.requests["a"].sequences
        llm._engine.scheduler.preempt_all("weights")
        llm.step()
        # Every full block but the one of the token that has to be run.
        assert sequence.num_computed == sequence.num_tokens - 1 == 4 + preempt_at
        (output,) = finish(llm).values()
        assert ids(output) == Oracle(PROMPT[:4], GREEDY).generate()
        assert output.num_cached_tokens == 0
