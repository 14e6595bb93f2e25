"""The engine's scheduler and block table at the size of a real server, with a model of the chip in place of one.

Run it from the root of the repository: `python benchmarks/simulate.py --out results`. Parts: `facts` (sequences at once
in 56 GiB), `full` (all requests at once: throughput, rows, utilization), `curve` (latency against load), `large`
(100,000 requests once) and `host` (microseconds a step). Simulated seconds are those of `simulated_chip`'s model; the
host's microseconds are measured. Prints tables and one line of JSON; `--out` takes the JSON and the plots (PNG).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from host_overhead import NUM_BLOCKS, RUNNING, WAITING, HostCost, host_costs
from load_curve import SCENARIOS, Run, curve, full_load, run, sharegpt_lengths
from simulated_chip import H100_8B
from simulation import Setup, Simulation

PARTS = ("facts", "full", "curve", "large", "host")

# 56 GiB of 2 MiB a block of 16 tokens; requests of 512 tokens in the end, almost all of them in the prompt, so that the
# rows that start are those that fit.
NUM_BLOCKS_56_GIB = 28_672
PROMPT_LEN, OUTPUT_LEN = 508, 4
S_MAX = 8192


def concurrency_facts(num_requests: int = 900) -> dict[str, int]:
    """Rows of 512 tokens that the scheduler has running at once."""
    num_usable = NUM_BLOCKS_56_GIB - 1
    paged = Setup("paged, watermark 0.01", num_usable, 1024, S_MAX)
    setups = (
        dataclasses.replace(
            paged, name="paged, null block beside the 56 GiB", num_usable_blocks=num_usable + 1, watermark=0.0
        ),
        dataclasses.replace(paged, name="paged", watermark=0.0),
        paged,
        Setup.contiguous(NUM_BLOCKS_56_GIB * 16, S_MAX),
    )
    found = {}
    for setup in setups:
        all_at_once = dataclasses.replace(setup, max_num_batched_tokens=num_requests * PROMPT_LEN)
        simulation = Simulation(all_at_once, H100_8B)
        for _ in range(num_requests):
            simulation.add(PROMPT_LEN, OUTPUT_LEN)
        while not simulation.times.finished_requests:
            simulation.step()
        found[setup.name] = max(simulation.timeline.num_running)
    return found


def print_runs(runs: Iterable[Run]) -> list[Run]:
    """Prints each as it comes, and returns them all."""
    print(
        f"{'variant':<30}{'requests/s':>11}{'s/token':>9}{'first s':>9}{'tokens/s':>10}{'full':>8}{'rows':>8}"
        f"{'planned':>9}{'live':>7}{'of pool':>8}{'preempted':>10}{'host us':>9}"
    )
    done = []
    for each in runs:
        done.append(each)
        rate = "at once" if each.rate is None else f"{each.rate:g}"
        planned = "" if each.num_running_planned is None else f"{each.num_running_planned:.1f}"
        print(
            f"{each.setup:<30}{rate:>11}{each.latency:>9.3f}{each.first_token:>9.2f}{each.tokens_per_second:>10,.0f}"
            f"{each.full_tokens_per_second:>8,.0f}{each.num_running_by_steps:>8.1f}{planned:>9}{each.live_share:>7.1%}"
            f"{each.pool_share:>8.1%}{each.num_preemptions:>10}{each.host_us:>9,.0f}",
            flush=True,
        )
    return done


def print_costs(costs: dict[str, list[HostCost]]) -> None:
    print(f"{'rows':>6}{'blocks':>11}{'waiting':>9}{'schedule us':>13}{'update us':>11}{'block table us':>16}")
    for name, points in costs.items():
        print(f"against {name}:")
        for cost in points:
            print(
                f"{cost.num_running:>6}{cost.num_blocks:>11,}{cost.num_waiting:>9,}{cost.schedule_us:>13,.0f}"
                f"{cost.update_us:>11,.0f}{cost.table_us:>16,.0f}"
            )


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts and prints each when it is there."""
    results: dict[str, Any] = {}
    if "facts" in options.parts:
        results["facts"] = concurrency_facts()
        print(f"sequences of {PROMPT_LEN + OUTPUT_LEN} tokens at once in {NUM_BLOCKS_56_GIB:,} blocks of 16:")
        for name, count in results["facts"].items():
            print(f"  {name:<40}{count:>5}")
    for part, make in (("full", full_load), ("curve", curve)):
        if part in options.parts:
            results[part] = {}
            for scenario in SCENARIOS:
                if options.only not in scenario.name:
                    continue
                lengths = sharegpt_lengths(options.requests or scenario.num_requests, options.seed)
                print(f"\n{scenario.name}, {len(lengths):,} requests ({scenario.model}):")
                results[part][scenario.name] = print_runs(make(scenario, lengths))
    if "large" in options.parts:
        scenario, start = SCENARIOS[0], time.perf_counter()
        many = sharegpt_lengths(options.large, options.seed)
        results["large"] = run(scenario, scenario.setups[0], many, None)
        print(f"\n{scenario.name}, {len(many):,} requests in {time.perf_counter() - start:,.0f} s of real time:")
        print_runs([results["large"]])
    if "host" in options.parts:
        results["host"] = host_costs(
            RUNNING, NUM_BLOCKS, [length for length in WAITING if length <= options.large], num_steps=options.steps
        )
        print("\nmicroseconds a step, medians:")
        print_costs(results["host"])
    return results


def save(results: dict[str, Any], folder: pathlib.Path) -> None:
    """Writes JSON and plots."""
    from simulation_plots import plot_curve, plot_host_cost  # matplotlib is wanted only here

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulate.json").write_text(json.dumps(results, default=dataclasses.asdict, indent=1))
    for number, scenario in enumerate(SCENARIOS):
        if scenario.name in results.get("curve", {}):
            plot_curve(scenario, results["curve"][scenario.name], folder / f"simulated_load_{number}.png")
    if "host" in results:
        plot_host_cost(results["host"], folder / "host_cost.png")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", default="", help="scenarios of `full` and `curve` whose name holds this text")
    parser.add_argument("--requests", type=int, help="of a run in `full` and `curve`; default: the scenario's")
    parser.add_argument("--large", type=int, default=100_000, help="requests of `large`, and longest queue of `host`")
    parser.add_argument("--steps", type=int, default=300, help="steps that a figure of `host` is the median of")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="folder for JSON and plots")
    options = parser.parse_args(arguments)
    results = simulate(options)
    if options.out is not None:
        save(results, options.out)
    print(json.dumps(results, default=dataclasses.asdict))
    return results


if __name__ == "__main__":
    main()
