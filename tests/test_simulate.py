"""benchmarks/simulate.py: the facts it is there to show, and that its chip does what the tests' device does."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import load_curve
import pytest
import simulate
from host_loop import Loop
from simulated_chip import ChipModel
from simulation import Setup, Simulation

# 1 second a step, 1/4 a token and 1/16 a token with K/V.
MODEL = ChipModel("round", 1.0, 0.25, 0.0625, 1.0, 1.0)

PAGED = Setup("paged", 40, 16, 32, 4, max_num_batched_tokens=64)
SETUPS = (
    PAGED,
    dataclasses.replace(PAGED, name="oracle", reserves=True, watermark=0.0),
    Setup.contiguous(160, 32),
)
SCENARIO = load_curve.Scenario("small", MODEL, SETUPS, (0.05, 0.2, 0.8, 3.2), 2.0, 60)
LENGTHS = [(1 + 5 * i % 13, 1 + 7 * i % 17) for i in range(60)]


def test_as_many_sequences_at_once_as_the_arithmetic_says() -> None:
    found = simulate.concurrency_facts()
    # 28,672 blocks, 32 each; one less is usable; 1% of them kept free; rows of 512 blocks.
    assert list(found.values()) == [896, 895, 887, 56]


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_the_chip_does_what_the_device_of_the_tests_does(decode_steps: int) -> None:
    setup = dataclasses.replace(PAGED, decode_steps=decode_steps)
    simulation = Simulation(setup, MODEL)
    loop = Loop(
        41, 4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=32, watermark=0.01, decode_steps=decode_steps
    )
    for prompt_len, output_len in LENGTHS:
        simulation.add(prompt_len, output_len)
        loop.add(prompt_len, output_len)
    while simulation.engine.has_unfinished():
        simulation.step()
        plan = loop.step()
        line = simulation.timeline
        assert line.num_running[-1] == len(plan.scheduled)
        assert line.num_waiting[-1] == len(loop.scheduler.waiting)
        if simulation.engine.has_unfinished():  # else the last rows have been released already
            assert line.num_used_blocks[-1] == 40 - len(loop.device.free)
            assert line.num_kv_tokens[-1] == sum(row.num_computed for row in loop.device.rows.values())
    assert len(loop.ended) == len(simulation.times.finished_requests) == len(LENGTHS)
    assert simulation.scheduler.num_preemptions == loop.scheduler.num_preemptions > 0


def test_the_clock_goes_by_the_model() -> None:
    (request,) = Simulation(PAGED, MODEL).run([(5, 3)], [10.0])
    first = 10 + 1 + 5 / 4 + 5 / 16
    assert request.arrival == request.started == 10
    assert request.first_token == first
    assert request.end == first + 1 + 1 / 4 + 6 / 16 + 1 + 1 / 4 + 7 / 16
    assert request.normalised_latency == (request.end - 10) / 3


def test_a_step_updates_the_table_in_place() -> None:
    simulation = Simulation(PAGED, MODEL)
    simulation.add(5, 3)
    before = jax.tree.leaves(simulation.chip.state.table)
    simulation.step()
    assert all(leaf.is_deleted() for leaf in before)


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return {run.setup: run for run in load_curve.full_load(SCENARIO, LENGTHS)}


def test_paging_carries_more_rows_than_contiguous_memory(full: dict[str, Any]) -> None:
    paged, oracle, contiguous = full.values()
    assert contiguous.num_running == pytest.approx(5)
    assert paged.num_running > oracle.num_running > 5
    assert paged.full_tokens_per_second > contiguous.full_tokens_per_second
    assert oracle.num_preemptions == contiguous.num_preemptions == 0 < paged.num_preemptions
    assert paged.live_share > 0.8 > contiguous.live_share
    assert contiguous.live_share == pytest.approx(contiguous.pool_share)


def test_the_planner_foresees_the_rows_that_run(full: dict[str, Any]) -> None:
    for run in (full["paged"], full["contiguous 32"]):
        assert run.num_running_planned == pytest.approx(run.num_running_by_steps, rel=0.1)


def test_latency_rises_with_load() -> None:
    runs = list(load_curve.curve(SCENARIO, LENGTHS))
    highest = {}
    for setup in SETUPS:
        points = [run for run in runs if run.setup == setup.name]
        latencies = [run.latency for run in points]
        assert latencies == sorted(latencies)
        assert all(latency <= SCENARIO.most_latency for latency in latencies[:-1])
        highest[setup.name] = len(points)
    assert highest["paged"] >= highest["contiguous 32"]


def test_the_program_writes_json_and_plots(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate, "SCENARIOS", (SCENARIO,))
    for name, values in (("RUNNING", (2,)), ("NUM_BLOCKS", (17,)), ("WAITING", (1, 50))):
        monkeypatch.setattr(simulate, name, values)
    monkeypatch.setattr(simulate, "sharegpt_lengths", lambda num_requests, seed: LENGTHS[:num_requests])
    arguments = ["--parts", "curve", "large", "host", "--requests", "8", "--large", "9", "--steps", "2", "--out"]
    simulate.main([*arguments, str(tmp_path)])
    assert json.loads((tmp_path / "simulate.json").read_text())["curve"]["small"][0]["num_requests"] == 8
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["host_cost.png", "simulated_load_0.png"]
