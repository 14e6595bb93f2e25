"""Replays a trace on an engine: once with the clock running, and once under observation, which is not timed.

What is observed is sampled an inner step at a time, before rows that end in it are released: rows, requests that wait,
live tokens, and slots that are taken.

N inner steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from traces import Trace
from variants import Variant

from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.plan import StepPlan, StepResult

NUM_LOGPROBS = 2  # the drawn token's and the next best one's: their difference is the margin


@dataclasses.dataclass(frozen=True)
class Served:
    """A request that has ended. Times are seconds after the start of the replay."""

    token_ids: list[int]
    margins: list[float]  # logprob of each drawn token less that of the next best; empty where the clock ran
    arrival: float  # as the trace has it, however late the engine was told
    started: float
    first_token: float
    finished: float


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A whole trace."""

    requests: list[Served]
    seconds: float

    def figures(self) -> dict[str, float]:
        """Tokens a second, and times of requests counted from the trace's arrivals."""
        queue = [r.started - r.arrival for r in self.requests]
        first = [r.first_token - r.arrival for r in self.requests]
        latency = [(r.finished - r.arrival) / len(r.token_ids) for r in self.requests]
        return {
            "seconds": self.seconds,
            "tokens_per_second": sum(len(r.token_ids) for r in self.requests) / self.seconds,
            "queue_time_p50": float(np.median(queue)),
            "queue_time_p95": float(np.percentile(queue, 95)),
            "time_to_first_token_p50": float(np.median(first)),
            "time_to_first_token_p95": float(np.percentile(first, 95)),
            "latency_per_token_mean": float(np.mean(latency)),
        }


class Replay:
    """One pass of a trace through an engine.

    Args:
        llm: idle.
        variant: what it was built from.
        trace: what to ask.
        num_logprobs: None, or NUM_LOGPROBS for margins.
    """

    def __init__(self, llm: LLM, variant: Variant, trace: Trace, num_logprobs: int | None = None) -> None:
        self._llm, self._variant, self._trace = llm, variant, trace
        self._num_logprobs = num_logprobs
        self._unsent = deque(enumerate(trace.requests))
        self._start = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and have no row, those included that the engine has not been told of."""
        now = time.monotonic() - self._start
        return len(self._llm._engine.scheduler.waiting) + sum(r.arrival <= now for _, r in self._unsent)

    def run(self) -> Replayed:
        with self._variant.rules(self._llm):
            return self._run()

    def _run(self) -> Replayed:
        done: dict[str, RequestOutput] = {}
        self._start = time.monotonic()
        while self._unsent or self._llm.has_unfinished_requests():
            self._send()
            if self._llm.has_unfinished_requests():
                done |= {output.request_id: output for output in self._llm.step() if output.finished}
            else:
                time.sleep(max(0.0, self._start + self._unsent[0][1].arrival - time.monotonic()))
        seconds = time.monotonic() - self._start
        return Replayed([self._served(index, done[str(index)]) for index in range(len(done))], seconds)

    def _send(self) -> None:
        """Hands the engine what has arrived, and a static one a batch when it is idle."""
        room = len(self._unsent)
        if self._variant.start == "static":
            room = 0 if self._llm.has_unfinished_requests() else self._llm.config.max_num_seqs
        now = time.monotonic() - self._start
        while self._unsent and room and self._unsent[0][1].arrival <= now:
            index, request = self._unsent.popleft()
            params = SamplingParams(
                temperature=0.0, max_tokens=request.output_len, ignore_eos=True, logprobs=self._num_logprobs
            )
            self._llm.add_request(str(index), list(request.prompt_token_ids), params)
            room -= 1

    def _served(self, index: int, output: RequestOutput) -> Served:
        (sample,), metrics = output.outputs, output.metrics
        times = (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time)
        started, first_token, finished = (at - self._start for at in times if at is not None)
        margins = []
        for entry in sample.logprobs or []:
            best, second = list(entry.values())[:NUM_LOGPROBS]
            margins.append(best - second)
        arrival = self._trace.requests[index].arrival
        return Served(sample.token_ids, margins, arrival, started, first_token, finished)


class Timeline:
    """What an engine holds and does, by inner step, and what that comes to over a whole replay."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._lines: list[tuple[float, ...]] = []
        self.num_plans = self.num_computed = self.num_places = self.num_preemptions = 0

    def add(self, plan: StepPlan, seconds: tuple[float, float], num_waiting: int, llm: LLM, variant: Variant) -> None:
        """Takes in a plan that has run from one time to another, and whose results have not been taken apart."""
        block_size, parts = llm.config.block_size, list(plan.scheduled.values())
        duration = (seconds[1] - seconds[0]) / plan.num_steps
        places = next(size for size in llm.config.token_ladder if size >= plan.total_new_tokens)
        for step in range(plan.num_steps):
            lives = [part.first_position + part.num_tokens + step for part in parts]
            pairs = zip(parts, lives, strict=True)
            allocated = sum(variant.num_allocated(part.sequence, live, block_size) for part, live in pairs)
            start = seconds[0] + step * duration
            self._lines.append((start, duration, places, len(parts), num_waiting, sum(lives), allocated))
        self.num_plans += 1
        self.num_computed += plan.total_new_tokens + (plan.num_steps - 1) * len(parts)
        self.num_places += plan.num_steps * places
        self.num_preemptions += len(plan.preempted)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """f64[N] each: when an inner step began and how long it took, the places it was compiled for, rows, waiting
        requests, tokens with K/V, and slots that are taken."""
        lines = np.array(self._lines, np.float64).reshape(-1, 7)
        names = ("seconds", "duration", "places", "running", "waiting", "live", "allocated")
        return dict(zip(names, lines.T, strict=True))

    def step_seconds(self) -> dict[int, float]:
        """What an inner step of each number of places took, on average."""
        places, duration = self.columns["places"], self.columns["duration"]
        return {int(size): float(duration[places == size].mean()) for size in np.unique(places)}

    def figures(self, trace: Trace) -> dict[str, float]:
        """Means are over inner steps; shares are ratios of sums over those in which requests waited."""
        columns = self.columns
        busy = columns["waiting"] > 0
        live, allocated = columns["live"][busy].sum(), columns["allocated"][busy].sum()
        pool = self.num_slots * max(int(busy.sum()), 1)
        return {
            "inner_steps": len(busy),
            "plans": self.num_plans,
            "running_mean": float(columns["running"].mean()),
            "running_mean_wall": float(np.average(columns["running"], weights=columns["duration"])),
            "running_mean_waiting": float(columns["running"][busy].mean()) if busy.any() else 0.0,
            "running_peak": int(columns["running"].max()),
            "live_of_allocated": float(live / max(allocated, 1)),
            "allocated_of_pool": float(allocated / pool),
            "live_of_pool": float(live / pool),
            "recomputed_tokens": self.num_computed - trace.num_computed_tokens,
            "padded_places": self.num_places - self.num_computed,
            "preemptions": self.num_preemptions,
        }


@contextlib.contextmanager
def watched(llm: LLM, variant: Variant, replay: Replay) -> Iterator[Timeline]:
    """The timeline of what is run inside."""
    timeline, real, start = Timeline(variant.num_slots), llm._runner.run, time.monotonic()

    def run(plan: StepPlan) -> StepResult:
        before, num_waiting = time.monotonic() - start, replay.num_waiting
        result = real(plan)
        timeline.add(plan, (before, time.monotonic() - start), num_waiting, llm, variant)
        return result

    llm._runner.run = run  # type: ignore[method-assign]
    try:
        yield timeline
    finally:
        llm._runner.run = real  # type: ignore[method-assign]


def timed(llm: LLM, variant: Variant, trace: Trace) -> Replayed:
    return Replay(llm, variant, trace).run()


def observed(llm: LLM, variant: Variant, trace: Trace) -> tuple[Replayed, Timeline]:
    """With margins and a timeline; its clock says little."""
    replay = Replay(llm, variant, trace, NUM_LOGPROBS)
    with watched(llm, variant, replay) as timeline:
        replayed = replay.run()
    return replayed, timeline


def differences(reference: Replayed, other: Replayed) -> dict[str, Any]:
    """How many requests have other tokens, and the largest margin, in either, at a place where they part."""
    margins = []
    for one, two in zip(reference.requests, other.requests, strict=True):
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            margins.append(max(one.margins[place], two.margins[place]))
    return {"parted": len(margins), "largest_margin": max(margins, default=0.0)}
