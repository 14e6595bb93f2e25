"""The engine: requests in, outputs out, one step at a time.

It joins the scheduler (which decides), the runner (which computes) and text. The loop is `plan = schedule()`,
`result = run(plan)`, `update(plan, result)`; everything else is bookkeeping around requests. With
`async_scheduling` the next plan is made and started before the result is there, where the scheduler can tell what it
will be, so that the device goes from step to step without waiting for the host.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from pagedjax import block_table
from pagedjax.observer import Observer
from pagedjax.outputs import FinishReason
from pagedjax.part_results import Candidates, PartResults, logprob_entry, next_candidates
from pagedjax.plan import AT_LENGTH, NO_TOKEN, STOPPED, Scheduled, StepPlan, StepResult
from pagedjax.request import Request, Sequence
from pagedjax.runner import Runner
from pagedjax.scheduler import Scheduler

logger = logging.getLogger(__name__)


class _Running(NamedTuple):
    """A step, and how to wait for its result."""

    plan: StepPlan
    result: Callable[[], StepResult]


class Engine:
    """Runs requests to their end.

    Args:
        runner: the device side.
        scheduler: made for the same sizes.
        defragment_above: see `EngineConfig`.
        async_scheduling: see `EngineConfig`.
        observer: is told what happens to requests.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        defragment_above: float | None = None,
        async_scheduling: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.requests: dict[str, Request] = {}
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        self.observer = observer or Observer()
        self._defragment_above = defragment_above
        self._async_scheduling = async_scheduling
        self._running: _Running | None = None  # its result is still to be fetched
        self._failures = 0  # steps that failed in a row
        self._due: list[Request] = []  # that come out of the next step: they ended, or got a token, outside of one
        self._leaving: list[Request] = []  # what a step has returned while it still tells its events

    @property
    def leaving(self) -> list[Request]:
        """Requests that no caller of `step` has yet."""
        return [*self._leaving, *self._due]

    def add(self, request: Request) -> Request:
        """Queues a request; raises ValueError if its id is in use, or if it can never run."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request; choose another")
        if request.beams is not None:
            self.scheduler.add_beams(request)
        else:
            for sequence in request.sequences:
                self.scheduler.add(sequence)
        self.requests[request.request_id] = request
        self.observer.added(request)
        self.observer.deliver()
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; what it has so far comes out of the next `step`.

        Raises:
            KeyError: no unfinished request has this id.
        """
        if request_id not in self.requests:
            raise KeyError(f"no unfinished request has the id {request_id!r}")
        self._end(self.requests[request_id], "abort")
        if not self.requests:
            self._flush()
        self.observer.deliver()

    def discard(self, request_id: str) -> None:
        """Aborts a request of which nobody wants the output; an unknown id is fine."""
        if request_id in self.requests:
            self.abort(request_id)
        self._due = [request for request in self._due if request.request_id != request_id]

    def change_params(self, params: Any, *, recompute: bool) -> None:
        """Uses other weights from the next step on; see `LLM.update_params`."""
        self.wait()
        self.runner.params = params
        self.scheduler.change_weights(recompute=recompute)
        if not self.requests:
            self._flush()

    def defragment(self) -> int:
        """Moves the used blocks to the front of the pool, and returns how many were moved.

        The requests that run go on as if nothing had happened.
        """
        self.wait()
        try:
            return self._defragment()
        except BaseException as error:
            self._recover(error)
            raise

    def _defragment(self) -> int:
        moves = self.runner.defragment()
        self.scheduler.ledger.move(moves, self.scheduler.running)
        return len(moves)

    def kv_of(self, request_id: str, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LLM.export_kv`."""
        self.wait()
        if request_id not in self.requests:
            raise KeyError(f"no unfinished request has the id {request_id!r}")
        sequences = self.requests[request_id].sequences
        if not 0 <= index < len(sequences):
            raise ValueError(f"request {request_id!r} has {len(sequences)} samples, and none is number {index}")
        row = sequences[index].row
        if row is None:
            state = "has ended" if sequences[index].finished else "waits"
            raise ValueError(f"sample {index} of request {request_id!r} {state}: it has no K/V now")
        return self.runner.kv_of(row)

    def knows(self, request_id: str) -> bool:
        """Whether a request with this id is unfinished, or its last output has still to be handed out."""
        return request_id in self.requests or any(request.request_id == request_id for request in self._due)

    def has_unfinished(self) -> bool:
        return bool(self.requests or self._due)

    def step(self) -> list[Request]:
        """One plan, one run, one update.

        Returns:
            The requests that got a token or ended. Whoever wants to see one asks for its `output()`.

        Raises:
            ValueError: there are requests to compute, and the parameters are gone; nothing has changed.
            Whatever the device raised. The engine stays usable: its state is made anew and unfinished requests are
            computed again from their tokens; a failing step twice in a row ends the running ones with "error".
        """
        if self.observer.on_event is None:
            return self._step()
        leaving, touched = self._leaving, list[Request]()
        try:
            touched = self._step()
        finally:
            finished = {request for request in touched if request.finished}
            self._leaving = leaving + touched
            try:
                self.observer.deliver()
            finally:
                self._leaving = leaving
        # What an event's callback has ended meanwhile comes with the next step.
        return [request for request in touched if request in finished or not request.finished]

    def _step(self) -> list[Request]:
        if self.requests:
            self.runner.check_params()
        due, self._due = self._due, []
        if not self.requests:
            return due
        with self.runner.clock.step():
            try:
                touched = self._advance()
            except BaseException as error:
                self._due = due + self._due
                self._recover(error)
                raise
            if due:
                touched = list(dict.fromkeys(due + touched))
            if not self.requests:
                self._flush(touched)
        return touched

    def wait(self) -> None:
        """Waits for the step that the device is at, if any; what comes of it comes out of the next `step`."""
        try:
            touched = self._take(self._next())
        except BaseException as error:
            self._recover(error)
            raise
        self._due = list(dict.fromkeys(self._due + touched))

    def _advance(self) -> list[Request]:
        """Has a step computed, and the one after it started where that can be; what came of the first."""
        running = self._next() or self._start()
        if running is None:
            return []
        if self._async_scheduling and self.scheduler.runs_ahead(running.plan):
            self._running = self._start()
        return self._take(running)

    def _next(self) -> _Running | None:
        running, self._running = self._running, None
        return running

    def _start(self) -> _Running | None:
        """Plans a step, and has it started if others may be; None if there is nothing to compute."""
        plan = self.scheduler.schedule()
        self.observer.preempted(self.scheduler.take_preemptions(), self.requests)
        for admission in plan.admits:
            self.observer.started(admission)
        if not plan.parts:
            self.runner.change_rows(plan)
            return None
        if self._async_scheduling:
            return _Running(plan, self.runner.start(plan))
        return _Running(plan, functools.partial(self.runner.run, plan))

    def _take(self, running: _Running | None) -> list[Request]:
        """Waits for a step; the requests that got a token or ended."""
        if running is None:
            return []
        result = running.result()
        if not result.ok:
            raise RuntimeError("the device ran out of blocks that the scheduler had reserved")
        touched, closing = self._update(running.plan, result)
        self.num_steps += 1
        self._failures = 0
        for request in closing:
            self._close(request)
        return touched

    def audit(self) -> None:
        """Checks that an idle engine holds nothing but cached blocks: the device's table and the host's account.

        Raises:
            RuntimeError: it is not idle, or something leaked.
        """
        if self.requests:
            raise RuntimeError(f"{len(self.requests)} requests are unfinished; an audit needs an idle engine")
        table, ledger = self.runner.state.table, self.scheduler.ledger
        cached = ledger.cache.block_ids if ledger.cache is not None else []
        block_table.check(table, cached)
        free, usable = int(table.num_free_blocks), self.scheduler.num_usable_blocks
        if not free == ledger.num_free_blocks == usable - len(cached) or ledger.num_idle_blocks != len(cached):
            raise RuntimeError(
                f"leak: {free} blocks free on the device, {ledger.num_free_blocks} on the host, {len(cached)} cached "
                f"({ledger.num_idle_blocks} of them idle), {usable} in all"
            )

    # After a step

    def _update(self, plan: StepPlan, result: StepResult) -> tuple[list[Request], list[Request]]:
        """Takes a result apart; returns the requests that got a token or ended, and those that ended."""
        ledger, parts = self.scheduler.ledger, plan.parts
        of_parts = PartResults.of(plan, result, ledger.block_size)
        self.scheduler.settle(result.num_free_blocks)
        self.num_proposed_tokens += result.num_proposed_tokens
        self.num_accepted_tokens += result.num_accepted_tokens
        touched: dict[Request, None] = {}
        candidates: dict[Request, Candidates] = {}
        finished: list[Sequence] = []
        versions, windowed = [plan.weights_version] * len(result.tokens), ledger.window is not None
        columns = zip(parts.sequences, parts.epochs, of_parts.tokens, of_parts.goes_on, strict=True)
        for place, (sequence, epoch, tokens, goes_on) in enumerate(columns):
            if sequence.epoch != epoch:  # given up while the step ran
                ledger.discard(of_parts.block_ids[place])
                continue
            if goes_on and not windowed and sequence.wants_ids_only:  # almost all, so nothing more is asked
                output_ids = sequence.output_ids
                if not output_ids:
                    self.observer.drew(sequence.request, sequence.index)
                output_ids += tokens
                sequence.weights_versions += versions
                touched[sequence.request] = None
                self.num_generated_tokens += len(tokens)
                continue
            missing = of_parts.missing[place]
            if missing < 0:
                ledger.advance(sequence, sequence.num_computed - missing)
            if sequence.request.beams is None:
                part = parts.part(place)
                self._take_scores(part, result, of_parts.starts[place])
                if self._take_tokens(part, tokens, of_parts.finishes[place], result, plan.weights_version):
                    self.observer.drew(sequence.request, sequence.index)
                    touched[sequence.request] = None
                if sequence.finished:
                    ledger.take_back(sequence, max(missing, 0))
                    finished.append(sequence)
            elif tokens[0] != NO_TOKEN:
                row = int(parts.rows[place])
                candidates.setdefault(sequence.request, {})[sequence.index] = next_candidates(result, row)
            if block_ids := of_parts.block_ids[place]:
                ledger.fill(sequence, int(parts.first_positions[place]) // ledger.block_size, block_ids)
            if windowed:
                ledger.pass_window(sequence)
        for sequence in finished:  # after all windows: the account is what the device has before any release
            self.scheduler.finish(sequence)
        for request, of_beam in candidates.items():
            self._advance_beams(request, of_beam)
        may_have_ended = dict.fromkeys([*(sequence.request for sequence in finished), *candidates])
        closing = [request for request in may_have_ended if request.finished]
        return list(touched | dict.fromkeys(closing)), closing

    def _advance_beams(self, request: Request, candidates: Candidates) -> None:
        beams = request.beams
        assert beams is not None
        self.observer.drew(request, 0)
        parents = beams.advance([candidates[index] for index in range(len(beams.beams))])
        if parents:
            request.take_beams()
            self.scheduler.fork(request, parents)
            return
        request.take_completions()
        for sequence in request.sequences:
            self.scheduler.finish(sequence)
            self.num_generated_tokens += len(sequence.output_ids)

    def _take_tokens(
        self, part: Scheduled, tokens: list[int], finishes: list[int], result: StepResult, weights_version: int
    ) -> bool:
        """Gives a sequence what it drew, one by one until it ends; whether that was anything."""
        sequence, params, took = part.sequence, part.sequence.params, False
        for line, (token, finish) in enumerate(zip(tokens, finishes, strict=True)):
            if sequence.finished:
                break
            if token == NO_TOKEN:
                continue
            sequence.push(token, stopped=finish == STOPPED, at_length=finish == AT_LENGTH)
            self.num_generated_tokens += 1
            sequence.weights_versions.append(weights_version)
            if params.logprobs is not None:
                entry = logprob_entry(result.logprobs, (line, part.row), token, params.logprobs)
                sequence.logprobs.append(entry)
                sequence.cumulative_logprob += entry[token]
            if params.sampled_logprobs:
                sequence.sampled_logprobs.append(float(result.drawn.token[line, part.row]))
                sequence.kept_masses.append(float(result.drawn.kept_mass[line, part.row]))
            took = True
        return took

    def _take_scores(self, part: Scheduled, result: StepResult, start: int) -> None:
        """Stores the wanted logprobs of known tokens that follow the ones just computed, each once, in order."""
        sequence = part.sequence
        num_top = sequence.params.prompt_logprobs
        wanted = sequence.next_score
        if num_top is None or wanted is None:
            return
        given = sequence.given_ids
        for offset in range(part.num_tokens):
            position = part.first_position + offset + 1
            if wanted <= position < len(given):
                entry = logprob_entry(result.prompt_logprobs, (start + offset,), given[position], num_top)
                sequence.scores.append(entry)

    def _close(self, request: Request) -> None:
        """Forgets a request that has finished."""
        del self.requests[request.request_id]
        self.observer.finished(request)

    def _flush(self, touched: Iterable[Request] = ()) -> None:
        """Gives back the blocks of the last rows, and what has left the cache, for which no further step would come;
        and tidies the pool up, where that is wanted.

        If that fails, the requests that were about to be handed out come out of the next `step`.
        """
        try:
            self._take(self._next())  # started in vain
            if self.scheduler.has_changes:
                self.runner.change_rows(self.scheduler.schedule())
            if self._defragment_above is not None and self.scheduler.ledger.fragmentation > self._defragment_above:
                self._defragment()
        except BaseException as error:
            self._due = [*touched, *self._due]
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        """After a failed step: fresh device state, and every running request starts over from its tokens.

        A second failure in a row would come again, so the requests that were running end with "error". An interrupt is
        no failure. Requests whose last token was taken before the step failed still come out.
        """
        self._failures += isinstance(error, Exception)
        for sequence in [s for s in self.scheduler.running if s.finished]:
            self.scheduler.finish(sequence)
        if self._failures > 1:
            for request in dict.fromkeys(sequence.request for sequence in self.scheduler.running):
                logger.error("request %r ends with an error", request.request_id, exc_info=error)
                self._end(request, "error")
            self._failures = 0
        for request in [request for request in self.requests.values() if request.finished]:
            self._close(request)
            self._due.append(request)
        self._running = None
        self.scheduler.reset()
        self.runner.reset()

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request from outside; it comes out of the next `step`."""
        if request.beams is not None:
            request.show_beams()
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.finish(sequence, reason)
        self._close(request)
        self._due.append(request)
