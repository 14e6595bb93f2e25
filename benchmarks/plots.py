"""The two plots of `paged_vs_contiguous.py`: KV usage over time, and latency against load."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np


def kv_usage(path: pathlib.Path, timelines: Mapping[str, Mapping[str, np.ndarray]], num_slots: int) -> None:
    """A panel a variant: tokens with K/V, and slots that are taken, over time.

    Args:
        path: of the PNG.
        timelines: by variant, `Timeline.columns`.
        num_slots: of the pool.
    """
    import matplotlib  # the extra "benchmarks"; everything but the plots does without

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(timelines), 1, figsize=(8, 1.9 * len(timelines)), sharex=True, sharey=True, squeeze=False
    )
    for panel, (name, columns) in zip(panels[:, 0], timelines.items(), strict=True):
        seconds, end = columns["seconds"], columns["seconds"][-1:] + columns["duration"][-1:]
        for key, label, alpha in (("allocated", "taken", 0.3), ("live", "tokens with K/V", 1.0)):
            share = 100 * columns[key] / num_slots
            panel.fill_between(
                [*seconds, *end], [*share, *share[-1:]], step="post", alpha=alpha, color="tab:blue", label=label, lw=0
            )
        waits = columns["seconds"][columns["waiting"] > 0]
        if waits.size:
            panel.axvline(waits[-1], color="tab:gray", ls=":", lw=1, label="last request waits")
        panel.set_title(name, fontsize=9, loc="left")
        panel.set_ylabel("% of slots", fontsize=8)
        panel.set_ylim(0, 100)
    panels[0, 0].legend(fontsize=7, loc="upper right")
    panels[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def latency(path: pathlib.Path, curves: Mapping[str, Mapping[float, float]]) -> None:
    """Mean seconds of a request a token of its output, by variant and requests a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", label=name)
    axes.set_xlabel("requests a second (Poisson)")
    axes.set_ylabel("latency, s a token")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
