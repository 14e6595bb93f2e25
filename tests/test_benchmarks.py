"""The benchmarks measure what they say: rows compute what blocks do, and what is counted is what there is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from itertools import pairwise

import contiguous
import jax.numpy as jnp
import numpy as np
import paged_vs_contiguous
import pytest
import replay
import traces
import tuning
import variants
from flax import nnx
from paged_vs_contiguous import Entry
from traces import Trace, TracedRequest

import pallas_kernels
from pagedjax import Decoder, ModelConfig
from pagedjax.plan import StepPlan, StepResult
from pallas_kernels import KVPages

VOCAB = 96
CONFIG = ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 16, 64)
BLOCK, ROW, SLOTS = 4, 32, 64  # 15 usable blocks of 4, or 2 rows of 32
LENGTHS = ((3, 20), (4, 18), (1, 22), (2, 18), (12, 14), (5, 1), (2, 10))  # prompt, output
OPTIONS = argparse.Namespace(
    slots=SLOTS, row_len=[ROW], block_size=BLOCK, max_num_batched_tokens=4, max_num_seqs=4, watermark=0.0
)
PAGED, ORACLE, ROWS, STATIC = range(4)  # in the line-up


def make_trace() -> Trace:
    rng = np.random.default_rng(0)
    return Trace("small", tuple(TracedRequest(tuple(rng.integers(0, VOCAB, p).tolist()), o) for p, o in LENGTHS))


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    model = variants.Model(CONFIG, nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0))))
    lineup = paged_vs_contiguous.line_up(OPTIONS, ROW)
    engines = variants.build(lineup, model)
    pairs = zip(lineup, engines, strict=True)
    found = [paged_vs_contiguous.prepare(variant, llm, model, make_trace()) for variant, llm in pairs]
    paged_vs_contiguous.measure(found, make_trace(), repeats=1, rates=[1000.0])
    return found


@pytest.mark.parametrize(("decode_only", "window"), [(True, None), (True, 100), (False, None)])
def test_contiguous_attention_is_the_reference(decode_only: bool, window: int | None) -> None:
    """Around the edges of tiles, rows that decode beside rows that prefill, the pool's rows in any order."""
    rng = np.random.default_rng(0)
    row_len, seq_lens = 384, np.array([1, 127, 128, 129, 0, 256, 384], np.int32)
    query_lens = np.minimum(seq_lens, 1) if decode_only else np.minimum(seq_lens, [1, 127, 1, 2, 0, 1, 70])
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    rows = 1 + rng.permutation(len(seq_lens)).astype(np.int32)[:, None]
    q = jnp.asarray(rng.normal(size=(starts[-1], 4, 16)), jnp.float32)
    pages = KVPages.zeros(2, len(seq_lens) + 1, row_len, 2, 16, jnp.float32)
    pages = dataclasses.replace(pages, pool=jnp.asarray(rng.normal(size=pages.pool.shape), jnp.float32))
    arguments, layer = (q, pages, jnp.asarray(rows), jnp.asarray(seq_lens), jnp.asarray(starts)), jnp.int32(1)
    options = {"layer": layer, "sliding_window": None if window is None else jnp.int32(window)}
    found = contiguous.attention(*arguments, **options, max_query_len=1 if decode_only else None)
    expected = pallas_kernels.paged_attention(*arguments, **options, implementation="reference")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_all_variants_answer_alike(entries: list[Entry]) -> None:
    answers = [[request.token_ids for request in entry.observed.requests] for entry in entries]
    assert [len(ids) for ids in answers[PAGED]] == [output_len for _, output_len in LENGTHS]
    assert len({tuple(ids) for ids in answers[PAGED]}) > 1
    for entry, found in zip(entries, answers, strict=True):
        assert replay.differences(entries[PAGED].observed, entry.observed)["largest_margin"] < 1e-3
        assert found == answers[PAGED]  # as it is with this seed


def test_differences_tell_where_answers_part(entries: list[Entry]) -> None:
    one = entries[PAGED].observed
    changed = dataclasses.replace(
        one.requests[1], token_ids=[*one.requests[1].token_ids[:3], VOCAB, *one.requests[1].token_ids[4:]]
    )
    other = dataclasses.replace(one, requests=[one.requests[0], changed, *one.requests[2:]])
    margin = one.requests[1].margins[3]
    assert margin > 0
    assert replay.differences(one, other) == {"parted": 1, "largest_margin": margin}


def test_paging_carries_more_in_fewer_steps(entries: list[Entry]) -> None:
    paged, oracle, rows, static = (entry.figures for entry in entries)
    assert rows["running_peak"] == static["running_peak"] == SLOTS // ROW
    assert paged["running_peak"] > SLOTS // ROW
    assert paged["inner_steps"] <= oracle["inner_steps"] <= rows["inner_steps"] < static["inner_steps"]
    assert paged["running_mean_waiting"] > oracle["running_mean_waiting"] >= rows["running_mean_waiting"]
    for figures in (paged, oracle, rows, static):
        assert figures["inner_steps"] >= figures["least_steps"]
    assert paged["preemptions"] > 0
    assert paged["recomputed_tokens"] > 0
    for figures in (oracle, rows, static):
        assert figures["preemptions"] == figures["recomputed_tokens"] == 0
    assert paged["live_of_allocated"] > max(oracle["live_of_allocated"], rows["live_of_allocated"])
    assert rows["live_of_allocated"] < 0.6
    assert rows["allocated_of_pool"] == 1.0  # a row is taken from the start to the end, and requests wait for it


@pytest.mark.parametrize("place", [PAGED, ROWS])
def test_a_timeline_is_what_stats_count(entries: list[Entry], monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Against `LLM.stats` while a plan runs, which counts all that its inner steps are to compute."""
    llm, variant = entries[place].llm, entries[place].variant
    real, num_steps, shares, running = llm._runner.run, [0], [], []

    def run(plan: StepPlan) -> StepResult:
        stats = llm.stats()
        shares.append(stats.tokens_per_slot)
        running.append(stats.num_running)
        num_steps.append(plan.num_steps)
        return real(plan)

    monkeypatch.setattr(llm._runner, "run", run)
    _, timeline = replay.observed(llm, variant, make_trace())
    columns, lasts = timeline.columns, np.cumsum(num_steps[1:]) - 1
    assert len(lasts) > 10
    assert (columns["live"] / columns["allocated"])[lasts].tolist() == pytest.approx(shares)
    assert columns["running"][lasts].tolist() == running


def test_one_request_by_hand(entries: list[Entry]) -> None:
    """5 prompt tokens in steps of 4, then 3 more that are computed: 5 inner steps, the last token never computed."""
    trace = Trace("one", (TracedRequest((1, 2, 3, 4, 5), 4),))
    taken = {PAGED: [4, 8, 8, 8, 8], ORACLE: [8] * 5, ROWS: [ROW] * 5, STATIC: [ROW] * 5}
    for place, allocated in taken.items():
        entry = entries[place]
        _, timeline = replay.observed(entry.llm, entry.variant, trace)
        columns = timeline.columns
        assert columns["live"].tolist() == [4, 5, 6, 7, 8]
        assert columns["allocated"].tolist() == allocated
        assert timeline.num_computed == trace.num_computed_tokens == 8
        assert timeline.num_places == 4 + 4 * 1
        assert not columns["waiting"].any()


def test_the_plan_foresees_the_rows(entries: list[Entry]) -> None:
    for place in (PAGED, ROWS):
        figures = entries[place].figures
        assert figures["predicted_rows"] == pytest.approx(figures["running_mean"], rel=0.1)


def test_only_the_oracle_reserves_lengths(entries: list[Entry]) -> None:
    """Paged and oracle share an engine here, whose scheduler is as it was after each replay."""
    assert entries[PAGED].llm is entries[ORACLE].llm
    assert "reserved_len" not in vars(entries[PAGED].llm._engine.scheduler)


def test_a_static_batch_starts_when_the_last_has_ended(entries: list[Entry]) -> None:
    for entry, overlaps in ((entries[STATIC], False), (entries[ROWS], True)):
        requests = entry.observed.requests
        batches = [requests[place : place + 2] for place in range(0, len(requests), 2)]
        early = [min(r.started for r in two) < max(r.finished for r in one) for one, two in pairwise(batches)]
        assert any(early) is overlaps


def test_times_count_from_the_traces_arrivals(entries: list[Entry]) -> None:
    late = dataclasses.replace(make_trace().requests[0], arrival=0.2)
    entry = entries[PAGED]
    found = replay.timed(entry.llm, entry.variant, Trace("late", (make_trace().requests[5], late)))
    assert found.requests[1].arrival == 0.2 <= found.requests[1].started < found.requests[1].first_token
    assert found.seconds >= found.requests[1].finished > 0.2
    assert found.figures()["queue_time_p95"] < 0.2


def test_the_report(entries: list[Entry], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = paged_vs_contiguous.report(entries, make_trace(), SLOTS)
    printed = capsys.readouterr().out
    assert printed.count("the same;") == len(entries) - 1
    ratio = results["speedups"][f"paged / contiguous {ROW}"]["inner_steps"]
    assert ratio == entries[ROWS].figures["inner_steps"] / entries[PAGED].figures["inner_steps"]
    assert 1000.0 in entries[PAGED].by_rate
    assert json.loads(json.dumps(results, default=float))["slots"] == SLOTS
    pytest.importorskip("matplotlib")
    paged_vs_contiguous.draw(entries, tmp_path, SLOTS)
    assert {path.name for path in tmp_path.iterdir()} == {"kv_usage.png", "latency.png"}


def test_a_tuned_variant_is_tried_with_all_of_the_grid() -> None:
    paged, rows = variants.paged(4096, 2048), variants.contiguous_rows(4096, 2048)
    budgets = {options["max_num_batched_tokens"] for options in tuning.grid(paged)}
    assert budgets == {options["max_num_batched_tokens"] for options in tuning.grid(rows)}
    assert len(list(tuning.grid(rows))) == len(budgets)
    assert {options["watermark"] for options in tuning.grid(variants.oracle(4096, 2048))} == {0.0}


@pytest.mark.parametrize("name", traces.LENGTHS)
def test_generated_lengths_are_as_stated(name: str) -> None:
    """Far from the clips, so that what is drawn has the mean that is stated."""
    for lengths in traces.LENGTHS[name]:
        wide = dataclasses.replace(lengths, least=0, most=10**6)
        drawn = np.array(wide.draw(100_000, np.random.default_rng(0)))
        assert drawn.mean() == pytest.approx(lengths.mean, rel=0.03)
        assert np.log(np.maximum(drawn, 1)).std() == pytest.approx(lengths.sigma, rel=0.05)
        clipped = np.array(lengths.draw(1000, np.random.default_rng(0)))
        assert clipped.min() >= lengths.least
        assert clipped.max() <= lengths.most
    trace = traces.generate(name, 50, range(700))
    assert trace == traces.generate(name, 50, range(700))
    assert trace != traces.generate(name, 50, range(700), seed=1)
    for request in trace.requests:
        assert all(two in (one + 1, 0) for one, two in pairwise(request.prompt_token_ids))  # a piece of the text


def test_arrivals() -> None:
    trace = traces.generate("alpaca", 4000, range(700)).poisson(8.0)
    arrivals = np.array([request.arrival for request in trace.requests])
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as exponential gaps have it


def test_block_steps() -> None:
    """The blocks of every step in which a request draws, counted one by one."""
    trace = make_trace()
    expected = 0
    for prompt_len, output_len in LENGTHS:
        held = prompt_len
        for _ in range(output_len):
            expected += math.ceil(held / BLOCK)
            held += 1
    assert trace.block_steps(BLOCK) == expected
    assert trace.num_computed_tokens == sum(p + o - 1 for p, o in LENGTHS)


def test_workload_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "workload.json"
    entry = {"id": "r0", "prompt_token_ids": [1, 2], "output_len": 3}
    path.write_text(json.dumps({"name": "two", "requests": [entry | {"arrival": 1.5}, entry]}))
    trace = traces.load(str(path), 64, lambda text: [])
    assert trace == Trace("two", (TracedRequest((1, 2), 3), TracedRequest((1, 2), 3, 1.5)))
    path.write_text(json.dumps({"name": "two", "requests": [{"id": "r0"}]}))
    with pytest.raises(ValueError, match="no workload"):
        traces.read(path)
    with pytest.raises(ValueError, match="neither a file nor one of"):
        traces.load("nowhere", 1, lambda text: [])


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="64 slots hold no row of 128"):
        contiguous.options(64, 128)
