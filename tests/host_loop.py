"""The engine's loop without jax: the scheduler, the device of `host_device`, and what the engine does between them.

The loop checks the scheduler's promises at every step: who runs, who may be overtaken, and that the host's account of
blocks is the device's.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

from host_device import NULL_BLOCK, Device, Result, next_token

from pagedjax.outputs import RequestMetrics
from pagedjax.plan import Scheduled, StepPlan
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.text import OutputText


class Loop:
    """A scheduler, which may cache prefixes, and its device; options are the scheduler's."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **options: Any) -> None:
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200, "watermark": 0.0}
        options = defaults | options
        self.scheduler = Scheduler(num_blocks=num_blocks, block_size=block_size, **options)
        self.ledger = self.scheduler.ledger
        self.device = Device(
            num_blocks - 1,
            block_size,
            retains=options.get("enable_prefix_caching", False),
            window=options.get("window"),
        )
        self.arrivals: list[Sequence] = []
        self.during: Callable[[], None] = lambda: None  # runs between the dispatch of a plan and its result
        self.ended: list[Sequence] = []
        self.host_stops: dict[Sequence, tuple[int, ...]] = {}  # tokens that end it, which the device does not know
        # Rows were given up while their plan was on the device: so many steps in which the bound may be too low.
        self._num_late = 0
        self.ahead = False  # whether plans are made before the result of the last one is there, where they can
        self._in_flight: tuple[StepPlan, Result] | None = None
        self._last_plan: StepPlan | None = None
        self._given_back: dict[int, int] = {}  # when a row last gave a block back: the place among all such events
        self._num_given_back = 0

    # What callers do

    def add(self, prompt: int | list[int], max_tokens: int = 10, stop_ids: tuple[int, ...] = ()) -> Sequence:
        (sequence,) = self.add_samples(prompt, 1, max_tokens, stop_ids)
        return sequence

    def add_samples(
        self,
        prompt: int | list[int],
        n: int,
        max_tokens: int = 10,
        stop_ids: tuple[int, ...] = (),
        *,
        cache_salt: str | None = None,
        scores: bool = False,
    ) -> list[Sequence]:
        """Queues a request; a prompt that is a number is as many tokens that no other request has."""
        number = len(self.arrivals) + 1
        ids = [number] * prompt if isinstance(prompt, int) else prompt
        params = SamplingParams(n=n, cache_salt=cache_salt, prompt_logprobs=0 if scores else None)
        request = Request(str(number - 1), None, ids, params, RequestMetrics(0.0))
        end_len = min(len(ids) + max_tokens, self.scheduler.max_model_len)
        stops = frozenset(stop_ids)
        request.sequences = [Sequence(request, index, 0, stops, end_len, OutputText(None)) for index in range(n)]
        if scores:
            request.sequences[0].scores_from = 1
        for sequence in request.sequences:
            self.scheduler.add(sequence)
            self.arrivals.append(sequence)
        return request.sequences

    def abort(self, sequence: Sequence) -> None:
        self._num_late = 2 if self._in_flight is not None else self._num_late
        self.scheduler.finish(sequence, "abort")
        self.ended.append(sequence)

    def change_weights(self, *, recompute: bool) -> None:
        self.scheduler.change_weights(recompute=recompute)
        self.device.version += 1

    def defragment(self) -> None:
        moves = self.device.defragment()
        self.ledger.move(moves, self.scheduler.running)
        moved = {dst: self._given_back[src] for src, dst in moves.items() if src in self._given_back}
        self._given_back |= moved

    def step(self) -> StepPlan:
        started, self._in_flight = self._in_flight or self._start(), None
        plan = started[0]
        if len(plan.parts):
            if self.ahead and self.scheduler.runs_ahead(plan):
                following = self._start()
                self._in_flight = following if len(following[0].parts) else None
            running = list(self.scheduler.running)
            self.during()
            late = any(sequence.row is None for sequence in running)
            self._update(*started)
            late |= self._in_flight is not None and any(sequence.row is None for sequence in running)
            # A plan in flight, whose result comes next, does not release them yet.
            self._num_late = 1 + self.ahead if late else max(self._num_late - 1, 0)
        self._check_state()
        return plan

    def _start(self) -> tuple[StepPlan, Result]:
        oldest = self.scheduler.running[:1]
        computed = [s.num_computed for s in oldest]
        cached = self._cached()
        is_ahead = bool(self.scheduler._in_flight)
        self._last_plan = self._last_plan if is_ahead else None
        plan = self.scheduler.schedule()
        self._check_plan(plan, is_ahead)
        self._last_plan = plan
        self._check_evictions(plan, cached)
        if oldest and not self._num_late and not is_ahead:
            assert oldest[0].num_computed > computed[0], "the oldest running sequence stands still"
        result = self.device.run(plan)
        assert self.ledger.num_free_blocks <= result.num_free_blocks, "the bound of a plan in flight is too high"
        return plan, result

    def run(self, max_steps: int = 1000) -> None:
        while self.scheduler.running or self.scheduler.waiting or self._in_flight is not None:
            max_steps -= 1
            assert max_steps >= 0, "no end in sight"
            self.step()
        self.step()  # the last releases and drops
        self.audit()

    def audit(self) -> None:
        """Nothing is held but by the cache, and the host's account is the device's."""
        assert not self.device.rows
        assert not self.scheduler.has_changes
        cached = self._cached()
        assert self.device.retained == cached
        assert self.ledger.num_idle_blocks == len(cached)
        assert self.ledger.num_free_blocks == len(self.device.free) == self.device.num_usable_blocks - len(cached)

    # After a step, as the engine does it

    def _update(self, plan: StepPlan, result: Result) -> None:
        self.scheduler.settle(result.num_free_blocks)
        for row, part in sorted(plan.scheduled.items()):
            sequence = part.sequence
            if sequence.epoch != part.epoch:
                self.ledger.discard(result.filled[row])
                continue
            missing = part.first_position + part.num_tokens + plan.num_steps - 1 - result.seq_lens[row]
            for position in range(part.first_position + 1, part.first_position + part.num_tokens + 1):
                if position == sequence.next_score:
                    sequence.scores.append({})
            self._take(sequence, result.sampled[row])
            assert missing == 0 or sequence.finished
            self.ledger.take_back(sequence, missing)
            self.ledger.fill(sequence, part.first_position // self.scheduler.block_size, result.filled[row])
            self.ledger.pass_window(sequence)
        # What the device has given back behind windows is in its count already; what ends now is not.
        for part in plan.scheduled.values():
            if part.sequence.finished and part.sequence.epoch == part.epoch:
                self.scheduler.finish(part.sequence)
                self.ended.append(part.sequence)

    def _take(self, sequence: Sequence, tokens: list[int]) -> None:
        host_stops = self.host_stops.get(sequence, ())
        for token in tokens:
            if sequence.finished:
                assert {*sequence.output_ids[-1:]} & {*host_stops}, "a token after the end"
                break
            at_length = sequence.num_tokens + 1 >= sequence.end_len
            sequence.push(token, stopped=token in sequence.stop_ids, at_length=at_length)
            if token in host_stops and not sequence.finished:
                sequence.finish("stop")

    # What has to hold

    def _check_plan(self, plan: StepPlan, is_ahead: bool) -> None:
        scheduler = self.scheduler
        assert plan.total_new_tokens <= scheduler.max_num_batched_tokens
        assert all(part.num_tokens > 0 for part in plan.scheduled.values())
        rows = {s.row for s in scheduler.running}
        assert rows >= set(plan.scheduled) if is_ahead else rows == set(plan.scheduled), (
            "a running sequence gets nothing"
        )
        assert not (is_ahead and plan.preempted), "somebody gives way before the result is there"
        assert not plan.preempted or not plan.admits
        assert plan.num_steps == 1 or all(part.num_tokens == 1 for part in plan.scheduled.values())
        for queue in (scheduler.running, list(scheduler.waiting)):
            assert queue == sorted(queue, key=lambda s: s.arrival)
        for waiting in scheduler.waiting:
            passed = any(admission.sequence.arrival > waiting.arrival for admission in plan.admits)
            samples = [other for other in waiting.request.sequences if other in scheduler.waiting]  # wait together
            assert not passed or any(self._is_held(other, plan) for other in samples), "somebody was overtaken"
        self._check_waits(plan)

    def _check_waits(self, plan: StepPlan) -> None:
        """Nobody goes on from cached blocks to one that somebody who came first, or was running, computes just now."""
        size, admitted = self.scheduler.block_size, [admission.sequence for admission in plan.admits]
        for place, admission in enumerate(plan.admits):
            sequence, next_block = admission.sequence, admission.num_tokens // size
            for part in [*plan.scheduled.values(), *self._parts_in_flight()]:
                other = part.sequence
                came_first = other not in admitted[place:]
                if admission.parent is None and came_first and self._may_share(other, sequence):
                    is_computed = part.first_position // size <= next_block < self._num_common(other, sequence) // size
                    assert not is_computed, "computes what somebody else is just computing"

    def _may_share(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether what one computes is of use to the other, as far as their tokens are the same."""
        current = other.weights_version == self.ledger.weights_version
        return self.ledger.cache is not None and current and other.params.cache_salt == sequence.params.cache_salt

    def _num_common(self, other: Sequence, sequence: Sequence) -> int:
        """Leading tokens that both know, of those that the sequence need not compute itself."""
        pairs = zip(other.token_ids, sequence.token_ids[: sequence.num_reusable], strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return min(other.num_tokens, sequence.num_reusable) if common is None else common

    def _check_evictions(self, plan: StepPlan, cached: set[int]) -> None:
        """What leaves the cache are the blocks that rows gave back longest ago; of one row, the last ones first."""
        for row in plan.releases:
            assert row in self.device.rows, "releases a row that is not taken"
            for block_id in reversed(self.device.rows[row].blocks):
                self._given_back[block_id] = self._num_given_back
                self._num_given_back += 1
        if self.ledger.window is not None:
            return  # blocks are given back in other places too
        rows = [state.blocks for row, state in self.device.rows.items() if row not in plan.releases]
        held = {block_id for blocks in rows for block_id in blocks}
        held |= {block_id for admission in plan.admits for block_id in admission.block_ids}
        evicted = [self._given_back[block_id] for block_id in cached - self._cached()]
        idle = self._cached() - held
        assert idle <= self._given_back.keys(), "takes a block for cached that no row has given back"
        stays = [self._given_back[block_id] for block_id in idle]
        assert max(evicted, default=-1) < min(stays, default=self._num_given_back), "evicts what was used later"

    def _cached(self) -> set[int]:
        return set(self.ledger.cache.block_ids) if self.ledger.cache is not None else set()

    def _is_held(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether somebody who came first, or was running, still computes a prefix that the sequence will share."""
        admitted = {admission.sequence for admission in plan.admits}
        size = self.scheduler.block_size
        for part in [*plan.scheduled.values(), *self._parts_in_flight()]:
            other = part.sequence
            came_first = other.arrival < sequence.arrival or other not in admitted
            if not came_first or other.weights_version != self.ledger.weights_version:
                continue
            num_cached = self._num_common(other, sequence) // size if self._may_share(other, sequence) else 0
            if num_cached > part.first_position // size:
                return True
            shared = len(sequence.request.prompt_ids) - 1
            is_sibling = other.request is sequence.request and shared <= sequence.num_reusable
            if is_sibling and (other in admitted or part.first_position < shared):
                return True
        return False

    def _parts_in_flight(self) -> Iterable[Scheduled]:
        """Of the plan whose result has not come when one is made."""
        return () if self._last_plan is None else self._last_plan.scheduled.values()

    def _check_state(self) -> None:
        assert len(set(self.ended)) == len(self.ended)
        truth = self.device.num_free_after(self.scheduler._releases, self.ledger.drops)
        bound = self.ledger.num_free_blocks
        if self._in_flight is not None:  # the device is ahead of the host
            assert bound <= truth, f"the bound is {bound}, the truth {truth}"
            return
        for sequence in self.scheduler.running:
            row = self.device.rows[sequence.row]  # type: ignore[index]
            assert (row.tokens, row.num_computed) == (sequence.token_ids, sequence.num_computed)
            published = [block for block in sequence.blocks if block is not None and block.key is not None]
            assert not published or row.version == self.device.version, "publishes what older weights have computed"
            passed = [block is None for block in sequence.blocks]
            assert passed == [i == NULL_BLOCK for i in row.blocks], "the host takes another block for passed"
            for block, block_id in zip(sequence.blocks, row.blocks, strict=True):
                assert block is None or block.block_id in (None, block_id), "the host takes another block for it"
        entries = [block for s in self.scheduler.running for block in s.blocks if block is not None]
        for block, count in collections.Counter(entries).items():
            assert block.num_rows == count, f"{count} rows hold a block, and {block.num_rows} are counted"
        retained = sorted([*self._cached(), *self.ledger.drops])
        assert sorted(self.device.retained) == retained, "the cache's references are not those the device holds"
        assert bound == truth or (bound < truth and self._num_late), f"the bound is {bound}, the truth {truth}"


def alone(prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = (), index: int = 0) -> list[int]:
    """What sample `index` generates if nothing comes between."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, index))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def assert_alone(sequences: list[Sequence]) -> None:
    """Each has ended by length, with the tokens it has alone."""
    for sequence in sequences:
        prompt = sequence.request.prompt_ids
        assert sequence.output_ids == alone(prompt, sequence.end_len - len(prompt), index=sequence.index)
