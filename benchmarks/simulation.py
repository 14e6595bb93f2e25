"""An engine on a simulated chip: requests arrive, run and end in simulated time, under the real scheduler.

Nothing of the host is simulated: `Engine.step` runs as it does for a model, but for outputs, which nobody reads. A
simulated second has no host time in it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as SequenceOf

import numpy as np
from simulated_chip import ChipModel, SimulatedChip
from tqdm import tqdm

from pagedjax.block_table import check
from pagedjax.engine import Engine
from pagedjax.observer import Observer
from pagedjax.outputs import RequestMetrics
from pagedjax.plan import Admission
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.text import OutputText

_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class ReservingScheduler(Scheduler):
    """Knows how long every sequence will be, and admits it only where all of that fits: nobody is ever preempted."""

    def reserved_len(self, sequence: Sequence) -> int:
        return sequence.end_len - 1  # the last token is never computed

    def owing(self) -> SequenceOf[Sequence]:
        return self.running


@dataclasses.dataclass(frozen=True)
class Setup:
    """A pool and how it is given out.

    Attributes:
        num_usable_blocks: of the pool, the null block not among them.
        block_size: tokens a block; with one block for the longest sequence, K/V is contiguous and pre-allocated.
        reserves: whether a sequence's final length is known, and kept free for it.
    """

    name: str
    num_usable_blocks: int
    max_num_seqs: int
    max_model_len: int
    block_size: int = 16
    watermark: float = 0.01
    reserves: bool = False
    max_num_batched_tokens: int = 2048
    decode_steps: int = 1

    @staticmethod
    def contiguous(num_slots: int, max_model_len: int) -> Setup:
        """A row of `max_model_len` slots for every sequence."""
        num_rows = num_slots // max_model_len
        return Setup(f"contiguous {max_model_len:,}", num_rows, num_rows, max_model_len, max_model_len, 0.0)


@dataclasses.dataclass(frozen=True)
class Finished:
    """A request that has ended; times are simulated seconds since the start."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival: float
    started: float
    first_token: float
    end: float
    num_preemptions: int

    @property
    def normalised_latency(self) -> float:
        """Seconds from arrival to the end, a token generated."""
        return (self.end - self.arrival) / self.num_output_tokens


class VirtualTimes(Observer):
    """Writes requests' times by the simulated clock, and remembers those that ended."""

    def __init__(self, chip: SimulatedChip) -> None:
        super().__init__()
        self.finished_requests: list[Finished] = []
        self._chip = chip

    def started(self, admission: Admission) -> None:
        metrics = admission.sequence.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = self._chip.now

    def drew(self, request: Request, index: int) -> None:
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = self._chip.now

    def finished(self, request: Request) -> None:
        metrics = request.metrics
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        ended = Finished(
            len(request.prompt_ids),
            len(request.sequences[0].output_ids),
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            self._chip.now,
            metrics.num_preemptions,
        )
        self.finished_requests.append(ended)


@dataclasses.dataclass
class Timeline:
    """One entry a step, of the time after it until the next one ends."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    num_running: list[int] = dataclasses.field(default_factory=list)
    num_waiting: list[int] = dataclasses.field(default_factory=list)
    num_kv_tokens: list[int] = dataclasses.field(default_factory=list)
    num_used_blocks: list[int] = dataclasses.field(default_factory=list)
    num_drawn: list[int] = dataclasses.field(default_factory=list)  # tokens
    host_seconds: list[float] = dataclasses.field(default_factory=list)  # CPU time of the thread, without the chip's

    def mean(self, name: str, *, while_waiting: bool = True) -> float:
        """Of a field, weighted by time; over the steps in which requests wait, unless there are none."""
        seconds = np.array(self.seconds)
        waits = np.array(self.num_waiting) > 0
        if while_waiting and waits.any():
            seconds = np.where(waits, seconds, 0.0)
        return float(np.average(getattr(self, name), weights=seconds))


class Simulation:
    """Runs requests of given lengths through an engine.

    Args:
        setup: the pool.
        model: how long steps take.
    """

    def __init__(self, setup: Setup, model: ChipModel) -> None:
        self.setup = setup
        num_blocks = setup.num_usable_blocks + 1
        self.chip = SimulatedChip(
            model,
            num_blocks=num_blocks,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
        )
        self.scheduler = (ReservingScheduler if setup.reserves else Scheduler)(
            num_blocks=num_blocks,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            decode_steps=setup.decode_steps,
            watermark=setup.watermark,
        )
        self.times = VirtualTimes(self.chip)
        self.engine = Engine(self.chip, self.scheduler, observer=self.times)  # type: ignore[arg-type]
        self.timeline = Timeline()
        self._prompts: dict[int, list[int]] = {}  # by length: nobody looks at the tokens
        self._num_added = 0

    def add(self, prompt_len: int, output_len: int, arrival: float = 0.0) -> None:
        """Queues a request of which exactly `output_len` tokens are generated, as far as `max_model_len` lets it."""
        prompt_ids = self._prompts.setdefault(prompt_len, [0] * prompt_len)
        request = Request(str(self._num_added), None, prompt_ids, _PARAMS, RequestMetrics(arrival))
        end_len = min(prompt_len + output_len, self.setup.max_model_len)
        request.sequences = [Sequence(request, 0, 0, frozenset(), end_len, OutputText(None))]
        self.engine.add(request)
        self._num_added += 1

    def step(self) -> None:
        """One step of the engine, and a line in the timeline."""
        began, chip_began, now = time.thread_time(), self.chip.cpu_seconds, self.chip.now
        self.engine.step()
        host_seconds = time.thread_time() - began - (self.chip.cpu_seconds - chip_began)
        line, chip = self.timeline, self.chip
        line.host_seconds.append(host_seconds)
        line.seconds.append(chip.now - now)
        line.num_running.append(chip.num_in_plan)
        line.num_waiting.append(len(self.scheduler.waiting))
        line.num_drawn.append(chip.num_drawn)
        line.num_kv_tokens.append(int(chip.seq_lens.sum()))
        line.num_used_blocks.append(self.setup.num_usable_blocks - chip.num_free_blocks)

    def run(
        self, lengths: SequenceOf[tuple[int, int]], arrivals: SequenceOf[float] | None = None
    ) -> SequenceOf[Finished]:
        """Runs requests to their end, and audits.

        Args:
            lengths: prompt and output tokens of each.
            arrivals: simulated seconds, ascending; None: all at the start.
        """
        times = [0.0] * len(lengths) if arrivals is None else arrivals
        progress = tqdm(total=len(lengths), desc=self.setup.name, unit=" requests", leave=False, mininterval=1.0)
        added = 0
        while added < len(lengths) or self.engine.has_unfinished():
            if not self.engine.has_unfinished():
                self.chip.now = max(self.chip.now, times[added])
            while added < len(lengths) and times[added] <= self.chip.now:
                self.add(*lengths[added], times[added])
                added += 1
            self.step()
            progress.update(len(self.times.finished_requests) - progress.n)
        progress.close()
        self.engine.audit()
        check(self.chip.state.table)
        return self.times.finished_requests
