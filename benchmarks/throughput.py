"""Offline throughput on workload files: all requests at once, greedy, exactly `output_len` tokens each.

Run it from the root of the repository:

    JAX_PLATFORMS=cpu python benchmarks/throughput.py --workload one.json two.json --dtype float32 --repeat 2

A workload is a file as `traces.read` takes it; arrivals in it count for nothing. The model is loaded and compiled once,
and a few requests of unrelated tokens have run before the first clock starts. Every run begins with an empty prefix
cache. Prints a line of JSON a run:

- `wall_s`, `out_tok_per_s`: from the first request in to the last token out, text included, as `LLM.generate` does it.
- `load_s`: loading, compiling and warming up. `peak_rss_mb`: the most that was resident until the end of the run.
- `shares` of wall time. `device` is waiting for a program and fetching its result; `dispatch` is the rest of
  `Runner.run`, from the plan to where the program's call has returned; `compile` is what is compiled meanwhile, 0 as
  long as the warm-up knows all programs; `host` is everything else: scheduling, requests, text.
- `steps`: programs run, each of one or more of the `inner_steps`. `computed_tokens`: token places with a token in them,
  `padded_places`: those without, which cost as much.
- `other_cpu`: cores that other processes have kept busy meanwhile; with more than a few hundredths, measure again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import traces
from startup import add_engine_options, peak_rss_mb
from traces import Trace

from pagedjax import LLM, SamplingParams
from pagedjax.engine_config import EngineConfig
from pagedjax.plan import NO_TOKEN, StepPlan, StepResult
from pagedjax.step import DeviceResult

PEER = "pagedjax"
WARMUP_REQUESTS, WARMUP_LEN, WARMUP_OUTPUT = 4, 48, 8
CPU_COLUMNS = (0, 1, 2, 5, 6)  # of /proc/stat that count as busy: user, nice, system, irq, softirq


@dataclasses.dataclass
class Account:
    """Where a run's time goes, in seconds, and what it computes."""

    run: float = 0.0  # inside Runner.run
    fetch: float = 0.0  # of that, after the program's call has returned
    compile: float = 0.0
    compile_in_run: float = 0.0
    steps: int = 0
    inner_steps: int = 0
    computed_tokens: int = 0
    places: int = 0

    def take(self, plan: StepPlan, result: StepResult, ladder: Sequence[int]) -> None:
        """Counts a plan that has run. The program leaves its loop where no row goes on, so inner steps that were
        planned and gave nothing have not been."""
        later = (result.tokens[1 : plan.num_steps] != NO_TOKEN).sum(axis=1)
        inner_steps = 1 + int((later > 0).sum())
        self.steps += 1
        self.inner_steps += inner_steps
        self.computed_tokens += plan.total_new_tokens + int(later.sum())
        self.places += inner_steps * next(size for size in ladder if size >= plan.total_new_tokens)

    def shares(self, wall: float) -> dict[str, float]:
        """Of wall time; they add up to 1."""
        seconds = {
            "host": wall - self.run - (self.compile - self.compile_in_run),
            "dispatch": self.run - self.fetch - self.compile_in_run,
            "device": self.fetch,
            "compile": self.compile,
        }
        return {part: spent / wall for part, spent in seconds.items()}


@dataclasses.dataclass(frozen=True)
class Run:
    """A workload, once."""

    token_ids: list[list[int]]  # in the order of the requests
    wall: float
    other_cpu: float | None
    account: Account


@contextlib.contextmanager
def watched(llm: LLM) -> Iterator[Account]:
    """The account of what is run inside."""
    runner, account = llm._runner, Account()
    real_run, real_fetch, compiled_before = runner.run, runner._fetch, runner.compile_seconds

    def run(plan: StepPlan) -> StepResult:
        start, compiled = time.perf_counter(), runner.compile_seconds
        result = real_run(plan)
        account.run += time.perf_counter() - start
        account.compile_in_run += runner.compile_seconds - compiled
        account.take(plan, result, llm.config.token_ladder)
        return result

    def fetch(plan: StepPlan, result: DeviceResult) -> StepResult:
        start = time.perf_counter()
        fetched = real_fetch(plan, result)
        account.fetch += time.perf_counter() - start
        return fetched

    runner.run, runner._fetch = run, fetch  # type: ignore[method-assign]
    try:
        yield account
    finally:
        account.compile = runner.compile_seconds - compiled_before
        runner.run, runner._fetch = real_run, real_fetch  # type: ignore[method-assign]


def warm_up(llm: LLM) -> None:
    """Compiles everything, and generates from tokens that no workload has."""
    llm.warmup()
    rng, longest = random.Random(7), llm.config.max_model_len - WARMUP_OUTPUT
    lengths = [max(1, min(WARMUP_LEN + 8 * index, longest)) for index in range(WARMUP_REQUESTS)]
    prompts = [[rng.randrange(llm.num_vocab_tokens) for _ in range(length)] for length in lengths]
    llm.generate(prompts, greedy(WARMUP_OUTPUT), use_tqdm=False)


def greedy(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def measure(llm: LLM, trace: Trace) -> Run:
    """Runs a workload on an idle engine, after its prefix cache was emptied.

    Raises:
        RuntimeError: a request has another number of tokens than it should.
    """
    llm.update_params(llm.params)  # other weights, as far as the prefix cache knows
    prompts = [list(request.prompt_token_ids) for request in trace.requests]
    params = [greedy(request.output_len) for request in trace.requests]
    with watched(llm) as account:
        busy, start = others_seconds(), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall, busy_after = time.perf_counter() - start, others_seconds()
    token_ids = [output.outputs[0].token_ids for output in outputs]
    for index, (request, ids) in enumerate(zip(trace.requests, token_ids, strict=True)):
        if len(ids) != request.output_len:
            raise RuntimeError(f"request {index} of {trace.name} has {len(ids)} tokens, not {request.output_len}")
    other_cpu = None if busy is None or busy_after is None else max(0.0, busy_after - busy) / wall
    return Run(token_ids, wall, other_cpu, account)


def others_seconds() -> float | None:
    """Seconds of CPU time that all other processes have had since the machine was started; None but on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    columns = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    busy = sum(int(columns[place]) for place in CPU_COLUMNS) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:2])


def enough_blocks(workloads: Sequence[Trace], options: argparse.Namespace) -> int:
    """Blocks with which no request of any workload waits for one, the null block included."""
    needed = 0
    for trace in workloads:
        each = sorted(math.ceil(request.end_len / options.block_size) for request in trace.requests)
        needed = max(needed, sum(each[-options.max_num_seqs :]))
    return 2 + math.ceil(needed / (1 - EngineConfig.watermark))  # an admission leaves the watermark's share free


def line(llm: LLM, trace: Trace, run: Run, dtype: str, load_seconds: float) -> dict[str, Any]:
    """The line of JSON."""
    account, config = run.account, llm.config
    return {
        "peer": PEER,
        "dtype": dtype,
        "workload": trace.name,
        "wall_s": round(run.wall, 3),
        "out_tok_per_s": round(trace.num_output_tokens / run.wall, 2),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "load1": round(os.getloadavg()[0], 2),
        "other_cpu": None if run.other_cpu is None else round(run.other_cpu, 2),
        "threads": os.cpu_count(),
        "load_s": round(load_seconds, 1),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "shares": {part: round(share, 4) for part, share in account.shares(run.wall).items()},
        "steps": account.steps,
        "inner_steps": account.inner_steps,
        "computed_tokens": account.computed_tokens,
        "padded_places": account.places - account.computed_tokens,
        "block_size": config.block_size,
        "num_blocks": llm.plan.num_blocks,
        "decode_steps": config.decode_steps,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", nargs="+", required=True, type=pathlib.Path, metavar="FILE", help="one after another"
    )
    add_engine_options(parser)
    parser.add_argument("--num-blocks", type=int, help="of the pool; default: enough that no request waits for any")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each workload")
    parser.add_argument(
        "--out-tokens",
        type=pathlib.Path,
        metavar="FILE",
        help="write the token ids of the last run here, a JSON list a request, to compare with another engine's",
    )
    options = parser.parse_args(arguments)
    if options.out_tokens is not None and len(options.workload) > 1:
        parser.error("--out-tokens is for one workload")
    return options


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    workloads = [traces.read(path) for path in options.workload]
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "decode_steps")
    engine_options = {name: getattr(options, name) for name in names}
    num_blocks = options.num_blocks or enough_blocks(workloads, options)
    start = time.perf_counter()
    llm = LLM.load(options.model, options.dtype, num_blocks=num_blocks, **engine_options)
    warm_up(llm)
    load_seconds = time.perf_counter() - start
    lines = []
    for trace in workloads:
        for _ in range(options.repeat):
            run = measure(llm, trace)
            lines.append(line(llm, trace, run, options.dtype, load_seconds))
            print(json.dumps(lines[-1]), flush=True)
    if options.out_tokens is not None:
        options.out_tokens.write_text(json.dumps(run.token_ids))
    return lines


if __name__ == "__main__":
    main()
