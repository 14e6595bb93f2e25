"""What paging buys at the same KV memory: the same model and trace, paged against contiguous rows, in one process.

Run it from the root of the repository:

    python benchmarks/paged_vs_contiguous.py --trace workload.json --out results

`--trace` is a workload file or the name of lognormal lengths (`traces.LENGTHS`). All variants have `--slots` tokens of
KV memory; contiguous ones have rows of `--row-len` slots, one variant each. Every variant first replays the trace under
observation (the timeline, and margins to judge differences by), then with the clock running, variants in turn. Prints
tables and writes results.json, kv_usage.png and with `--rates` latency.png, to `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import contiguous
import jax
import plots
import replay
import traces
import tuning
import variants
from replay import Replayed, Timeline
from traces import Trace
from variants import Model, Variant

from pagedjax import LLM, capacity

CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"
ROUNDING = 1e-3  # logprobs closer than this may change places where sums are taken in another order

# Columns of the two tables: heading, key, format.
SPEED = (
    ("tok/s", "tokens_per_second", ".1f"),
    ("seconds", "seconds", ".2f"),
    ("steps", "inner_steps", "d"),
    ("at least", "least_steps", ".0f"),
    ("rows", "running_mean", ".2f"),
    ("planned", "predicted_rows", ".2f"),
    ("by wall", "running_mean_wall", ".2f"),
    ("peak", "running_peak", "d"),
    ("TTFT p50", "time_to_first_token_p50", ".2f"),
    ("p95", "time_to_first_token_p95", ".2f"),
    ("queue p50", "queue_time_p50", ".2f"),
    ("p95", "queue_time_p95", ".2f"),
)
MEMORY = (
    ("live/taken", "live_of_allocated", ".1%"),
    ("taken/pool", "allocated_of_pool", ".1%"),
    ("live/pool", "live_of_pool", ".1%"),
    ("rows", "running_mean_waiting", ".2f"),
    ("preempted", "preemptions", "d"),
    ("recomputed", "recomputed_tokens", "d"),
    ("padded", "padded_places", "d"),
)


@dataclasses.dataclass(eq=False)
class Entry:
    """A variant, its engine, and what has been found."""

    variant: Variant
    llm: LLM
    step_seconds: dict[str, dict[int, float]]  # by places: full of one prompt, and on average in the trace
    observed: Replayed
    timeline: Timeline
    figures: dict[str, Any]
    runs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    by_rate: dict[float, dict[str, float]] = dataclasses.field(default_factory=dict)


def line_up(options: argparse.Namespace, most_len: int) -> list[Variant]:
    """All variants, with the same options where they have the same ones."""
    shared = {"max_num_batched_tokens": options.max_num_batched_tokens}
    blocks = {"block_size": options.block_size, "max_num_seqs": options.max_num_seqs, **shared}
    found = [
        variants.paged(options.slots, most_len, watermark=options.watermark, **blocks),
        variants.oracle(options.slots, most_len, **blocks),
    ]
    for row_len in options.row_len:
        found.append(variants.contiguous_rows(options.slots, row_len, **shared))
        found.append(variants.contiguous_rows(options.slots, row_len, start="static", **shared))
    return found


def chosen(lineup: list[Variant], names: list[str] | None) -> list[Variant]:
    """Those named, in the order of the line-up."""
    if names is None:
        return lineup
    unknown = set(names) - {variant.name for variant in lineup}
    if unknown:
        raise SystemExit(f"--only: no variant {sorted(unknown)}; there are {[variant.name for variant in lineup]}")
    return [variant for variant in lineup if variant.name in names]


def predicted_rows(variant: Variant, model: Model, trace: Trace) -> float | None:
    """The time-averaged running rows that `pagedjax.capacity` foresees; None for rules that it does not know."""
    if variant.reserved_len is not None or variant.start == "static":
        return None
    names = ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "watermark")
    given = {name: variant.options[name] for name in names if name in variant.options}
    pairs = [(request.prompt_len, request.output_len) for request in trace.requests]
    return capacity.plan(model.config, dtype="float32", trace=pairs, **given).mean_running


def prepare(variant: Variant, llm: LLM, model: Model, trace: Trace) -> Entry:
    """Replays the trace under observation."""
    seconds = variants.step_seconds(llm)
    observed, timeline = replay.observed(llm, variant, trace)
    llm.audit()
    figures = timeline.figures(trace) | {
        "least_steps": variant.least_steps(trace.num_output_tokens, trace.block_steps(llm.config.block_size)),
        "predicted_rows": predicted_rows(variant, model, trace),
    }
    times = {"one prompt": seconds, "in the trace": timeline.step_seconds()}
    for what, found in times.items():
        print(f"{variant.name}, {what}: " + ", ".join(f"step[{size}] {1e3 * t:.1f} ms" for size, t in found.items()))
    what = f"{observed.seconds:.1f} s, {figures['inner_steps']} inner steps, {figures['live_of_allocated']:.1%} live"
    print(f"{variant.name}, observed: {what}")
    sys.stdout.flush()
    return Entry(variant, llm, times, observed, timeline, figures)


def measure(entries: list[Entry], trace: Trace, repeats: int, rates: list[float]) -> None:
    """The clock runs: variants in turn, so that a change of the machine's speed meets all of them."""
    for _ in range(repeats):
        for entry in entries:
            entry.runs.append(replay.timed(entry.llm, entry.variant, trace).figures())
    for rate in rates:
        arriving = trace.poisson(rate)
        for entry in entries:
            entry.by_rate[rate] = replay.timed(entry.llm, entry.variant, arriving).figures()
    for entry in entries:
        runs = entry.runs or [entry.observed.figures()]
        entry.figures |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def speedups(entries: list[Entry]) -> dict[str, dict[str, float]]:
    """Of the variants with blocks over those with rows, in inner steps and in seconds."""
    found = {}
    for one in entries:
        for other in entries:
            if (
                other.variant.decoder is contiguous.ContiguousDecoder
                and one.variant.decoder is not other.variant.decoder
            ):
                found[f"{one.variant.name} / {other.variant.name}"] = {
                    key: other.figures[key] / one.figures[key] for key in ("inner_steps", "seconds")
                }
    return found


def table(title: str, entries: list[Entry], columns: tuple[tuple[str, str, str], ...]) -> str:
    def cell(entry: Entry, key: str, form: str) -> str:
        value = entry.figures.get(key)
        return "-" if value is None else format(value, form)

    width = max(len(entry.variant.name) for entry in entries)
    lines = [title, " " * width + "".join(f"{heading:>11}" for heading, _, _ in columns)]
    for entry in entries:
        cells = "".join(f"{cell(entry, key, form):>11}" for _, key, form in columns)
        lines.append(f"{entry.variant.name:<{width}}{cells}")
    return "\n".join(lines)


def report(entries: list[Entry], trace: Trace, num_slots: int) -> dict[str, Any]:
    """Prints the tables; what the JSON file holds."""
    outputs = {e.variant.name: replay.differences(entries[0].observed, e.observed) for e in entries[1:]}
    ratios = speedups(entries)
    print(
        f"\n{trace.name}: {len(trace.requests)} requests, {trace.num_prompt_tokens:,} prompt and "
        f"{trace.num_output_tokens:,} output tokens, the longest {trace.longest:,}; {num_slots:,} slots each"
    )
    print(table("\nSpeed (rows: mean over inner steps; planned: pagedjax.capacity's prediction)", entries, SPEED))
    print(
        table("\nMemory while requests wait (live/taken is the paper's 96%: tokens over slots taken)", entries, MEMORY)
    )
    print("\nSpeed-up in inner steps and in seconds")
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio['inner_steps']:.2f}, {ratio['seconds']:.2f}")
    print(f"\nOutputs beside {entries[0].variant.name}'s (texts may part where margins are below {ROUNDING:g})")
    for name, found in outputs.items():
        verdict = "the same" if found["largest_margin"] < ROUNDING else "DIFFERENT"
        print(f"  {name}: {verdict}; {found['parted']} part, at margins up to {found['largest_margin']:.1e}")
    return {
        "trace": {"name": trace.name, "requests": len(trace.requests), "output_tokens": trace.num_output_tokens},
        "slots": num_slots,
        "variants": {entry.variant.name: _as_json(entry) for entry in entries},
        "speedups": ratios,
        "outputs": outputs,
    }


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "options": entry.variant.options,
        "step_seconds": entry.step_seconds,
        "figures": entry.figures,
        "runs": entry.runs,
        "by_rate": entry.by_rate,
    }


def draw(entries: list[Entry], folder: pathlib.Path, num_slots: int) -> None:
    plots.kv_usage(folder / "kv_usage.png", {e.variant.name: e.timeline.columns for e in entries}, num_slots)
    curves = {e.variant.name: {r: f["latency_per_token_mean"] for r, f in e.by_rate.items()} for e in entries}
    if any(curves.values()):
        plots.latency(folder / "latency.png", curves)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what LLM.load takes")
    parser.add_argument("--trace", default="sharegpt-short", help=f"a workload file, or one of {list(traces.LENGTHS)}")
    parser.add_argument("--requests", type=int, default=64, help="most requests of the trace")
    parser.add_argument("--slots", type=int, default=4096, help="tokens of KV memory, the paged null block included")
    parser.add_argument("--block-size", type=int, default=16, help="of the paged ones")
    parser.add_argument("--row-len", type=int, nargs="+", default=[2048, 1024], help="S_max of contiguous rows")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="of all variants")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of the paged ones")
    parser.add_argument("--watermark", type=float, default=0.01, help="of the paged one")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants by their names in the tables; default: all")
    parser.add_argument("--tune", action="store_true", help="find each variant's best options, and compare those too")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="timed replays of each variant, whose median counts; 0: the clock of the observed ones, logprobs and all",
    )
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[], help="requests a second, for latency against load"
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for results.json and plots (matplotlib)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="pagedjax-programs-") as folder:
        if CACHE_DIR not in os.environ:  # engines with as many rows find each other's programs
            jax.config.update("jax_compilation_cache_dir", folder)
        run(options)


def run(options: argparse.Namespace) -> None:
    model = Model.load(options.model)
    trace = traces.load(options.trace, options.requests, model.tokenizer.encode)
    lineup = chosen(line_up(options, max(options.row_len)), options.only)
    tried: dict[str, Any] = {}
    if options.tune:
        for variant in [v for v in lineup if v.start == "continuous"]:
            winner, tried[variant.name] = tuning.best(variant, model, trace)
            lineup.append(winner)
    engines = variants.build(lineup, model)
    entries = [prepare(variant, llm, model, trace) for variant, llm in zip(lineup, engines, strict=True)]
    measure(entries, trace, options.repeats, options.rates)
    results = report(entries, trace, options.slots) | {
        "tried": tried,
        "device": str(jax.devices()[0]),
        "jax": jax.__version__,
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(results, indent=1, default=float))
        draw(entries, options.out, options.slots)


if __name__ == "__main__":
    main()
