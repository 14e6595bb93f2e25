"""benchmarks/host_overhead.py and benchmarks/block_table.py: they measure what they say, and say it."""

from __future__ import annotations

import json

import block_table as block_table_benchmark
import host_overhead
import pytest


def test_a_case_holds_what_it_varies() -> None:
    cost = host_overhead.measure(2, 17, 7, num_steps=5)
    assert (cost.num_running, cost.num_blocks, cost.num_waiting) == (2, 17, 7)
    assert min(cost.schedule_us, cost.plan_us, cost.update_us, cost.table_us) > 0


def test_a_row_that_ends_leaves_no_room_for_a_moment() -> None:
    cost = host_overhead.measure(1, 257, 0, num_steps=host_overhead.OUTPUT_LEN + 4)
    assert min(cost.schedule_us, cost.plan_us, cost.update_us) > 0


def test_a_case_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    cases = host_overhead.main(["--rows", "2", "6", "--blocks", "16", "20", "--steps", "3"])
    assert [(case["num_running"], case["num_blocks"]) for case in cases] == [(2, 16), (2, 20), (6, 20)]  # that fit
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()[-3:]] == cases
    for case in cases:
        assert case["schedule_plan_update_us"] == pytest.approx(
            case["schedule_us"] + case["plan_us"] + case["update_us"]
        )
        assert min(case["apply_us"], case["fetch_us"]) > 0


def test_the_block_table_is_right_after_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = block_table_benchmark.main(["--blocks", "40", "--rows", "3", "--steps", "20"])
    assert case.per_second == pytest.approx(1e6 / case.append_us)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_blocks"] == 40
    assert min(case.call_a_row_us, case.lists_us) > 0
