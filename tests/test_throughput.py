"""benchmarks/throughput.py, startup.py, floor.py and attention.py: they measure what they say; their sums are right."""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
from typing import Any

import attention
import floor
import jax
import jax.numpy as jnp
import numpy as np
import products
import pytest
import startup
import throughput
from attention import Case, Rows
from flax import nnx
from floor import Floor, Machine, Step
from indirection import Shape
from products import Curve
from traces import Trace, TracedRequest

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams

VOCAB = 96
CONFIG = ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 16, 64, tie_word_embeddings=True)
LENGTHS = ((3, 20), (4, 17), (1, 22), (12, 14), (5, 1), (2, 10))  # prompt, output
HARNESS = ("peer", "dtype", "workload", "wall_s", "out_tok_per_s", "peak_rss_mb", "load1", "other_cpu", "threads")


def make_trace(name: str = "small", lengths: tuple[tuple[int, int], ...] = LENGTHS) -> Trace:
    rng = np.random.default_rng(0)
    return Trace(name, tuple(TracedRequest(tuple(rng.integers(0, VOCAB, p).tolist()), o) for p, o in lengths))


def write(trace: Trace, folder: pathlib.Path) -> str:
    path = folder / f"{trace.name}.json"
    requests = [{"prompt_token_ids": r.prompt_token_ids, "output_len": r.output_len} for r in trace.requests]
    path.write_text(json.dumps({"name": trace.name, "requests": requests}))
    return str(path)


@pytest.fixture(scope="module")
def llm() -> LLM:
    options: dict[str, Any] = {
        "max_model_len": 48,
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 4,
    }
    engine = LLM(Decoder(CONFIG, rngs=nnx.Rngs(0)), **options)
    throughput.warm_up(engine)
    return engine


# Throughput


def test_lines_have_the_harness_fields(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    asked: dict[str, Any] = {}

    def load(model: str, dtype: str, **options: Any) -> LLM:
        asked.update(options, model=model, dtype=dtype)
        return llm

    monkeypatch.setattr(LLM, "load", load)
    one = make_trace()
    out = tmp_path / "tokens.json"
    arguments = ["--workload", write(one, tmp_path), "--repeat", "2", "--model", "tiny", "--dtype", "float32"]
    lines = throughput.main([*arguments, "--out-tokens", str(out), "--block-size", "4", "--max-num-seqs", "4"])
    assert [json.loads(text) for text in capsys.readouterr().out.splitlines()] == lines
    assert len(lines) == 2
    for line in lines:
        assert tuple(line)[: len(HARNESS)] == HARNESS
        assert (line["peer"], line["dtype"], line["workload"]) == ("pagedjax", "float32", "small")
        assert line["out_tok_per_s"] == pytest.approx(one.num_output_tokens / line["wall_s"], rel=0.05)
        assert line["peak_rss_mb"] > 100
        assert set(line["shares"]) == {"host", "dispatch", "device", "compile"}
        assert sum(line["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert min(line["shares"]["host"], line["shares"]["dispatch"], line["shares"]["device"]) > 0
        assert line["shares"]["compile"] == 0
        assert line["computed_tokens"] == one.num_computed_tokens  # nothing from the run before
        assert line["jax"] == jax.__version__
    assert lines[0]["steps"] == lines[1]["steps"] < lines[0]["inner_steps"]
    assert asked["model"] == "tiny"
    assert asked["num_blocks"] == throughput.enough_blocks([one], argparse.Namespace(block_size=4, max_num_seqs=4))
    outputs = llm.generate(
        [list(request.prompt_token_ids) for request in one.requests],
        [SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True) for _, output_len in LENGTHS],
        use_tqdm=False,
    )
    assert json.loads(out.read_text()) == [output.outputs[0].token_ids for output in outputs]


def test_one_request_by_hand(llm: LLM) -> None:
    """11 prompt tokens in steps of 4, 4 and 3, then 9 more that are computed, in steps of 8 and 1 inner ones."""
    account = throughput.measure(llm, make_trace("one", ((11, 10),))).account
    assert (account.steps, account.inner_steps, account.computed_tokens) == (5, 12, 20)
    assert account.places == 3 * 4 + 9 * 1


def test_a_prefix_is_shared_within_a_run_only(llm: LLM) -> None:
    """The second request finds the first one's full blocks, and the next run finds nothing of either."""
    prompt = tuple(range(12))
    trace = Trace("twins", (TracedRequest(prompt, 2), TracedRequest((*prompt, 1), 2)))
    counts = [throughput.measure(llm, trace).account.computed_tokens for _ in range(2)]
    assert counts == [trace.num_computed_tokens - 12] * 2


def test_what_compiles_counts_for_itself(llm: LLM) -> None:
    del llm._runner._programs["step[1]"]
    before = llm._runner.compile_seconds
    run = throughput.measure(llm, make_trace("cold", ((3, 2),)))
    shares = run.account.shares(run.wall)
    assert shares["compile"] == pytest.approx((llm._runner.compile_seconds - before) / run.wall)
    assert shares["compile"] > 0.5
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0


def test_nothing_waits_with_enough_blocks() -> None:
    trace = make_trace("two", ((5, 4), (1, 2), (8, 8)))
    options = argparse.Namespace(block_size=4, max_num_seqs=2)
    num_blocks = throughput.enough_blocks([trace, make_trace("less", ((1, 1),))], options)
    assert num_blocks == 2 + math.ceil((4 + 3) / 0.99)  # the two largest of 3, 1 and 4 blocks


# Floor


def test_the_steps_of_a_workload() -> None:
    """Two rows and 4 tokens a step: 3 + 1 tokens of the first two prompts; the other 2 beside the first one's token;
    the third request starts where the first has ended."""
    found = floor.schedule(make_trace("three", ((3, 2), (3, 3), (2, 1))), 2, 4)
    assert found == [Step(4, 1, 3 + 1), Step(1 + 2, 2, 4 + 3), Step(1 + 2, 2, 4 + 2), Step(1, 1, 5)]


@pytest.mark.parametrize(("rows", "budget"), [(1, 1), (2, 2), (4, 8), (64, 512)])
def test_steps_compute_every_token_once(rows: int, budget: int) -> None:
    trace = make_trace()
    steps = floor.schedule(trace, rows, budget)
    assert sum(step.num_tokens for step in steps) == trace.num_computed_tokens
    assert sum(step.num_samples for step in steps) == trace.num_output_tokens
    assert max(step.num_tokens for step in steps) <= budget
    # A decoded token's step sees all tokens before it, whatever the schedule; how often a prompt is seen depends on it.
    decoded = sum(p + step for p, o in LENGTHS for step in range(1, o))
    prompts = [p * (p + 1) // 2 if budget == 1 else p for p, _ in LENGTHS]
    seen = sum(step.num_live for step in steps)
    assert seen == decoded + sum(prompts) if budget in (1, 512) else seen >= decoded + sum(prompts)


def test_no_more_rows_run_than_a_step_has_tokens() -> None:
    assert floor.schedule(make_trace("two", ((1, 2), (1, 1))), 2, 1) == [Step(1, 1, 1), Step(1, 1, 2), Step(1, 1, 1)]


def test_a_floor_by_hand() -> None:
    layers, head = Curve((1, 4, 16), (1.0, 2.5, 5.5), ("a",) * 3), Curve((1, 4, 16), (0.5, 0.5, 2.0), ("b",) * 3)
    trace = make_trace("two", ((10, 3), (4, 2)))
    steps = floor.schedule(trace, 2, 16)
    assert steps == [Step(14, 2, 14), Step(2, 2, 16), Step(1, 1, 12)]
    found = Floor.of(trace, steps, layers, head, kv_token_bytes=100, bandwidth=1000.0)
    products = (2.5 + 3.0 * 10 / 12) + 0.5 + (1.0 + 1.5 / 3) + 0.5 + 1.0 + 0.5
    assert found.products_s == pytest.approx(products)
    assert found.kv_s == pytest.approx((14 + 16 + 12) * 100 / 1000)
    assert found.total_s == pytest.approx(products + 4.2)
    assert found.tok_per_s == pytest.approx(5 / (products + 4.2))
    assert found.steps == 3


def test_the_fastest_arrangement_counts_for_fewer_rows_too() -> None:
    curve = Curve.fastest({"one": {1: 3.0, 4: 2.0, 16: 9.0}, "two": {1: 2.5, 4: 4.0, 16: 8.0}})
    assert curve == Curve((1, 4, 16), (2.0, 2.0, 8.0), ("one", "one", "two"))
    assert [curve.at(count) for count in (0, 1, 3, 10)] == [0.0, 2.0, 2.0, 5.0]
    with pytest.raises(ValueError, match="17 rows are more than the 16"):
        curve.at(17)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrangements_compute_the_same(dtype: str) -> None:
    """As numpy does, from the same matrices; and every number of the first product changes the last."""
    weights, tolerance = products.Weights.of(CONFIG, dtype), 1e-4 if dtype == "float32" else 0.1
    x = np.random.default_rng(1).normal(size=(3, CONFIG.hidden_size)).astype(np.float32)
    expected = x.astype(np.float64)
    for qkv, out, gate_up, down in zip(*(np.asarray(s, np.float64) for s in weights.stacks), strict=True):
        q, k, v = np.split(expected @ qkv, [64, 96], axis=1)
        gate, up = np.split((q + np.tile(k + v, 2)) @ out @ gate_up, 2, axis=1)
        expected = (gate + up) @ down
    for function, held in products.arrangements(weights).values():
        found = function(jnp.asarray(x, dtype), held, CONFIG.num_q_heads * CONFIG.head_dim)
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max())
    logits = x @ np.asarray(weights.embedding, np.float32).T
    for function, held in products.heads(weights).values():
        found = function(jnp.asarray(x, dtype), held)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, logits, atol=tolerance * np.abs(logits).max())


def test_a_machine_is_measured() -> None:
    machine = Machine.measure(CONFIG, "float32", (1, 4), repeats=1, read_bytes=2**16)
    sizes = 32 * (64 + 64) + 64 * 32 + 32 * 128 + 64 * 32  # qkv, out, gate and up, down
    assert machine.layer_weights == 2 * sizes
    assert machine.weights_bytes == 4 * (2 * sizes + VOCAB * 32)
    assert machine.kv_token_bytes == 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, their size, bytes
    assert machine.bandwidth == max(machine.summed_per_second, machine.streamed_per_second)
    assert machine.single_stream_s == pytest.approx(machine.weights_bytes / machine.bandwidth)
    assert json.loads(json.dumps(machine.figures()))["rows"] == [1, 4]
    found = machine.floor(make_trace(), 4, 4)
    assert found.total_s > 0
    assert str(machine).count("\n") == 3


# Startup


def started(seconds: tuple[float, ...], peak: float, weights: float, pool: float) -> dict[str, Any]:
    return {
        "seconds": dict(zip(startup.PARTS, seconds, strict=True)),
        "peak_after_mb": dict.fromkeys(startup.PARTS, 1.0) | {startup.PARTS[-1]: peak},
        "weights_mb": weights,
        "pool_mb": pool,
        "num_programs": 3,
        "jax": jax.__version__,
    }


def test_memory_is_compared_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    found, baseline = started((1.0, 2.0, 3.0, 0.5), 1300.0, 500.0, 300.0), started((1.0,) * 4, 400.0, 0.1, 0.1)
    line = {"model": "m", "dtype": "float32", "cache": "cold"} | startup.summary(found, baseline)
    assert line["ratio"] == pytest.approx(900 / 800)
    assert line["to_first_token_s"] == 5.0
    assert line["total_s"] == 6.5
    rows = startup.table([line]).splitlines()
    assert rows[-1].split() == ["cold", "1.00", "2.00", "3.00", "0.50", "5.00", "1,300", "400", "1.12"]


def test_a_baseline_starts_in_a_process_of_its_own(tmp_path: pathlib.Path) -> None:
    shape = {"num_layers": 1, "num_q_heads": 3, "num_kv_heads": 1}
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 32}
    found = startup.spawn({"model": shape, "dtype": "float32", "options": options}, tmp_path)
    assert found["shape"] == shape
    assert list(found["seconds"]) == list(startup.PARTS)
    assert min(found["seconds"].values()) > 0
    assert list(found["peak_after_mb"].values()) == sorted(found["peak_after_mb"].values())
    assert found["num_programs"] == 3  # rows, defragment, step[1]
    assert found["weights_mb"] + found["pool_mb"] < 0.1


# Attention


SHAPE = Shape(num_layers=2, num_kv_heads=2, group_size=3, head_dim=16)
ROWS = (Rows(2, 1, 19), Rows(1, 5, 5), Rows(2, 3, 20))


def test_the_cost_of_a_case_by_hand() -> None:
    case = Case("some", ROWS, SHAPE)
    pairs = 2 * 19 + (1 + 2 + 3 + 4 + 5) + 2 * (18 + 19 + 20)
    assert case.flops == pairs * 2 * (2 * 3) * (
        2 * 16 + 2 * 16
    )  # layers, heads, a multiply and an add of either product
    assert case.live_bytes == (2 * 19 + 5 + 2 * 20) * 2 * 2 * 2 * 16 * 4  # layers, heads, K and V, float32
    np.testing.assert_array_equal(case.lengths, ([1, 1, 5, 3, 3], [19, 19, 5, 20, 20]))


def test_all_ways_attend_as_numpy_does() -> None:
    case = Case("some", ROWS, SHAPE)
    inputs = attention.Inputs.of(case)
    q = np.asarray(inputs.q, np.float64)
    expected = q
    for layer in inputs.dense:
        found = []
        kv = [(np.asarray(k)[row], np.asarray(v)[row]) for k, v in layer for row in range(len(k))]
        for row, (k, v) in enumerate(kv):
            mine = expected[inputs.query_start_loc[row] : inputs.query_start_loc[row + 1]]
            for place, x in enumerate(mine):
                end = k.shape[1] - len(mine) + place + 1
                scores = np.einsum("hd,hkd->hk", x, np.repeat(k, 3, axis=0)[:, :end]) / math.sqrt(16)
                weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
                found.append(np.einsum("hk,hkd->hd", weights, np.repeat(v, 3, axis=0)[:, :end]))
        expected = q + np.stack(found)
    paged = (functools.partial(attention.paged, name) for name in ("cpu", "xla"))
    for way in (*paged, attention.dense):
        np.testing.assert_allclose(way(case, inputs)(), expected, atol=1e-5)


def test_attention_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(attention, "CASES", {"some": ROWS[:1]})
    monkeypatch.setattr(attention, "PRODUCT_SIZE", 16)
    (line,) = attention.main(["--layers", "1", "--repeats", "1"])
    machine, head, cells, found = capsys.readouterr().out.splitlines()
    assert floor.cpu() in machine
    assert jax.__version__ in machine
    assert json.loads(found) == line
    assert cells.split() == ["some", *(f"{line[name]:.2f}" for name in attention.COLUMNS)]
    assert min(line[name] for name in attention.COLUMNS) > 0
    assert line["of_limit"] == max(line["read_ms"], line["product_ms"]) / line["cpu_ms"]
    assert line["gflop_per_s"] * line["product_ms"] * 1e6 == pytest.approx(line["flops"])
    assert head.split()[:2] == ["cpu_ms", "xla_ms"]
