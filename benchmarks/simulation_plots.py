"""Plots of a simulation's results; they need matplotlib, which `pip install pagedjax[benchmarks]` brings."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from host_overhead import HostCost
from load_curve import Run, Scenario
from matplotlib.figure import Figure

_LABELS = {
    "num_running": "running rows",
    "num_blocks": "blocks of the pool",
    "num_waiting": "requests waiting",
}


def plot_curve(scenario: Scenario, runs: Sequence[Run], path: pathlib.Path) -> None:
    """Latency and throughput against the rate of requests, a line a variant."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for setup in scenario.setups:
        points = [run for run in runs if run.setup == setup.name]
        rates = [run.rate for run in points]
        left.plot(rates, [run.latency for run in points], marker="o", label=setup.name)
        right.plot(rates, [run.tokens_per_second for run in points], marker="o", label=setup.name)
    left.set(xlabel="requests a second", ylabel="seconds a token, normalised", ylim=(0, scenario.most_latency))
    right.set(xlabel="requests a second", ylabel="generated tokens a second", ylim=(0, None))
    left.legend()
    figure.suptitle(f"{scenario.name}: simulated, {scenario.model}", fontsize=9)
    figure.savefig(path, dpi=120)


def plot_host_cost(costs: dict[str, list[HostCost]], path: pathlib.Path) -> None:
    """Microseconds a step against each thing that was varied."""
    figure = Figure(figsize=(4 * len(costs), 4), layout="constrained")
    axes = figure.subplots(1, len(costs), sharey=True)
    for axis, (name, points) in zip(axes, costs.items(), strict=True):
        sizes = [getattr(cost, name) for cost in points]
        for field, label in (("schedule_us", "schedule"), ("update_us", "update"), ("table_us", "block table")):
            axis.loglog(sizes, [getattr(cost, field) for cost in points], marker="o", label=label)
        axis.set(xlabel=_LABELS[name])
    axes[0].set(ylabel="microseconds a step, median")
    axes[0].legend()
    figure.savefig(path, dpi=120)
