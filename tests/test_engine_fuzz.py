"""The whole engine on the mock model, fed at random: every token of every request is what the oracle says.

Pools are short, so that sequences are preempted all the time; requests are aborted wherever they happen to be. Prompts
begin like earlier ones, repeat them, or go on where they ended. Some are searched with beams. Weights are exchanged for
the same ones, or for others: then the oracle is told which weights everything was computed with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import mock_engine
import mock_model
import numpy as np
import pytest
import test_beam_search
from random_requests import END_IDS, random_params, random_search
from weight_history import WeightHistory

from pagedjax import LLM, BeamSearchParams, RequestOutput, SamplingParams, block_table
from pagedjax.plan import StepPlan
from pagedjax.request import Sequence as Sample


class Driver:
    """Feeds an engine and checks what comes out.

    Args:
        history: of the engine's weights.
        seed: of everything random.
        salts: the weights to choose from.
        change: how often weights change, a step.
        search: the share of searches among the requests.
    """

    def __init__(
        self, history: WeightHistory, seed: int, *, salts: Sequence[int] = (0,), change: float, search: float
    ) -> None:
        self.history, self.salts, self.change, self.search = history, salts, change, search
        self.llm, self.engine, self.rng = history.llm, history.llm._engine, random.Random(seed)
        self.usable = self.engine.scheduler.num_usable_blocks
        self.params: dict[str, SamplingParams | BeamSearchParams] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.latest: dict[str, RequestOutput] = {}
        self.num_tokens = self.num_doubtful = 0
        self.num_ahead = 0  # steps that came out while the next one ran
        self.prefixes = [self._tokens(self.rng.randint(0, 30)) for _ in range(2)]
        self.prompts: list[list[int]] = []

    def run(self, num_requests: int) -> None:
        first = len(self.params)
        while len(self.params) < first + num_requests or self.llm.has_unfinished_requests():
            if len(self.params) < first + num_requests and self.rng.random() < 0.7:
                self.add()
            if self.rng.random() < 0.04 and self.engine.requests:
                self.llm.abort(self.rng.choice(list(self.engine.requests)))
            if self.rng.random() < self.change:
                self.update_params()
            self.step()
        assert self.ended.keys() == self.params.keys()
        self.llm.audit()

    def prompt(self) -> list[int]:
        rng = self.rng
        kind = rng.choice(["new", "prefix", "prefix", "again", "continued"])
        if kind == "again" and self.prompts:
            return rng.choice(self.prompts[-8:])
        start = rng.choice(self.prefixes) if kind == "prefix" else []
        if kind == "continued" and self.latest:
            earlier = rng.choice(list(self.latest.values())[-8:])
            start = earlier.prompt_token_ids + rng.choice(earlier.outputs).token_ids
        return [*start, *self._tokens(rng.choice([1, rng.randint(1, 6), rng.randint(1, 15)]))]

    def update_params(self) -> None:
        """The same weights or others; what is cached or goes on with older K/V must not be found again."""
        salt = self.rng.choice(self.salts)
        modes: list[Literal["refuse", "recompute", "keep"]] = ["refuse", "recompute", "keep"]
        running = self.rng.choice(modes)
        if running == "refuse" and self.engine.requests:
            with pytest.raises(ValueError, match="requests are unfinished"):
                self.history.change(salt, running)
            return
        self.history.change(salt, running)
        cache = self.engine.scheduler.ledger.cache
        assert cache is None or not cache.block_ids

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(mock_model.VOCAB) for _ in range(count)]

    def add(self) -> None:
        prompt, request_id = self.prompt(), str(len(self.params))
        searched = self.rng.random() < self.search
        params = random_search(self.rng) if searched else random_params(self.rng)
        if not self.fits(len(prompt), params):
            with pytest.raises(ValueError, match="raise"):
                self.queue(request_id, prompt, params)
            return
        self.queue(request_id, prompt, params)
        self.params[request_id] = params
        self.prompts.append(prompt)
        self.samples[request_id] = self.engine.requests[request_id].sequences

    def queue(self, request_id: str, prompt: list[int], params: SamplingParams | BeamSearchParams) -> None:
        if isinstance(params, SamplingParams):
            self.llm.add_request(request_id, prompt, params)
        else:
            self.engine.add(self.llm._maker.searched(request_id, None, prompt, params))

    def fits(self, num_tokens: int, params: SamplingParams | BeamSearchParams) -> bool:
        """Whether it can run alone: a search needs rows for all its beams, and their own blocks for each."""
        size, max_len = self.llm.config.block_size, self.llm.config.max_model_len
        most = -(-(min(num_tokens + params.max_tokens, max_len) - 1) // size)
        if isinstance(params, BeamSearchParams):
            if params.width > self.engine.scheduler.max_running:
                return False
            most += (params.width - 1) * (most - num_tokens // size)
        return most <= self.usable and num_tokens < max_len

    def step(self) -> None:
        for output in self.llm.step():
            assert output.request_id not in self.ended, "an output after the last one"
            if (before := self.latest.get(output.request_id)) is not None:
                for old, new in zip(before.outputs, output.outputs, strict=True):
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
            self.latest[output.request_id] = output
            if output.finished:
                self.ended[output.request_id] = output
                self.check(output)
        table, scheduler = self.engine.runner.state.table, self.engine.scheduler
        ledger = scheduler.ledger
        counts = np.array(table.ref_counts)  # as the next plan's releases and drops will leave them
        np.subtract.at(counts, np.asarray(table.block_tables)[scheduler._releases], 1)
        np.subtract.at(counts, np.array(ledger.drops, int), 1)
        truth = np.sum(counts[1:] == 0)
        if self.engine._async_scheduling:  # what was given up while a plan was in flight counts from the next result on
            assert ledger.num_free_blocks <= truth
            self.num_ahead += self.engine._running is not None
        else:
            assert ledger.num_free_blocks == truth, "nothing is in flight, and the bound is not the truth"
        if self.engine._running is not None:
            return
        if self.rng.random() < 0.02:
            cached = ledger.cache.block_ids if ledger.cache is not None else []
            block_table.check(table, [*cached, *ledger.drops])

    def check(self, output: RequestOutput) -> None:
        params, samples = self.params[output.request_id], self.samples[output.request_id]
        assert [sample.index for sample in output.outputs] == list(range(len(samples)))
        if isinstance(params, BeamSearchParams):
            self.check_search(output, params, samples[0])
            return
        prompt = output.prompt_token_ids
        for found, sample in zip(output.outputs, samples, strict=True):
            oracle = mock_model.Oracle(prompt, params, seed=sample.seed, index=sample.index, end_ids=END_IDS)
            logits = self.history.drawn_from(sample, len(prompt), prompt + found.token_ids)
            assert len(self.history.draws[sample]) == len(found.token_ids)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(mock_model, "raw_logits", lambda tokens, logits=logits: logits)
                self.num_doubtful += oracle.check(found)
            self.num_tokens += len(found.token_ids)
        self.check_prompt_logprobs(output, params, samples[0])

    def check_prompt_logprobs(self, output: RequestOutput, params: SamplingParams, sample: Sample) -> None:
        found, prompt = output.prompt_logprobs, output.prompt_token_ids
        assert (found is None) == (params.prompt_logprobs is None)
        if found is not None:
            aborted = any(sample.finish_reason == "abort" for sample in output.outputs)
            assert found[0] is None
            assert aborted or len(found) == len(prompt)
            logits = self.history.scored_from(sample, prompt)
            assert len(logits) == len(found) - 1
            mock_model.check_logprobs(found[1:], params.prompt_logprobs, logits, prompt[1 : len(found)])

    def check_search(self, output: RequestOutput, params: BeamSearchParams, first: Sample) -> None:
        """Its beams go on together, so that all have K and V of the same weights, and logits of their last token's."""
        prompt, kv, raw_logits = output.prompt_token_ids, self.history.kv.get(first, []), mock_model.raw_logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mock_model, "raw_logits", lambda ids: raw_logits(ids, kv[: len(ids)], kv[len(ids) - 1]))
            for found in output.outputs:
                tokens = prompt + found.token_ids
                logits = [mock_model.raw_logits(tokens[:place])[-1] for place in range(len(prompt), len(tokens))]
                logits = np.reshape(logits, (-1, mock_model.VOCAB))
                mock_model.check_logprobs(found.logprobs, 0, logits, found.token_ids)
                total = sum(entry[token] for entry, token in zip(found.logprobs or (), found.token_ids, strict=True))
                assert found.cumulative_logprob == pytest.approx(total)
            if output.outputs[0].finish_reason == "abort":
                return
            expected = [ids for _, ids in test_beam_search.search(prompt, params, END_IDS)]
        assert [found.token_ids for found in output.outputs] == expected
        reasons = ["stop" if ids[-1] in END_IDS else "length" for ids in expected]
        assert [found.finish_reason for found in output.outputs] == reasons


class Starts:
    """Counts how sequences start, from the plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.hits = self.forks = self.beams = self.drops = 0
        self._schedule = llm._engine.scheduler.schedule
        monkeypatch.setattr(llm._engine.scheduler, "schedule", self._count)

    def _count(self) -> StepPlan:
        plan = self._schedule()
        self.hits += sum(bool(admission.block_ids) for admission in plan.admits)
        forks = [admission.sequence.request for admission in plan.admits if admission.parent is not None]
        self.forks += sum(request.beams is None for request in forks)
        self.beams += sum(request.beams is not None for request in forks)
        self.drops += len(plan.drops)
        return plan


def drive(
    monkeypatch: pytest.MonkeyPatch,
    llm: LLM,
    seed: int,
    paces: Sequence[tuple[int, int]],
    requests: int,
    **shares: Any,
) -> Driver:
    """Runs that many requests at each pace: tokens a step, inner steps."""
    monkeypatch.setattr(llm._maker, "end_ids", frozenset(END_IDS))
    starts = Starts(monkeypatch, llm)
    driver = Driver(WeightHistory(monkeypatch, llm), seed, **{"change": 0.02, "search": 0.15} | shares)
    before = llm.stats().num_preemptions
    for budget, decode_steps in paces:
        mock_engine.pace(llm, budget=budget, decode_steps=decode_steps)
        driver.run(requests)
    mock_engine.pace(llm)
    assert set(llm._runner.compiled) <= set(llm.plan.programs)
    assert driver.num_doubtful < 0.05 * driver.num_tokens
    assert llm.stats().num_preemptions - before > len(driver.params) // 20
    reasons = [sample.finish_reason for output in driver.ended.values() for sample in output.outputs]
    assert {*reasons} == {"stop", "length", "abort"}
    cached = [output.num_cached_tokens for output in driver.ended.values()]
    if llm.config.enable_prefix_caching:
        assert sum(count > 0 for count in cached) > len(cached) // 20  # new weights empty the cache
        assert starts.hits > len(cached) // 4
        assert starts.drops > len(cached)
    else:
        assert (starts.hits, starts.drops, sum(cached)) == (0, 0, 0)
    # Of blocks of one token the cache has all that a fork could share, but of sequences that were kept at an update.
    forks = not llm.config.enable_prefix_caching or llm.config.block_size > 1
    num_sampled = sum(isinstance(params, SamplingParams) for params in driver.params.values())
    if not forks:
        assert starts.forks < num_sampled // 20
    elif requests > 40:  # in a short run chance may leave them out
        assert starts.forks > num_sampled // 40
    assert starts.beams > len(cached) // 4
    return driver


def test_random_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, mock_engine.engine(), 0, [(4, 1), (7, 8), (32, 8)], 60)


def test_random_requests_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mock_engine.engine()
    monkeypatch.setattr(llm._engine, "_async_scheduling", True)
    before = llm.stats().num_steps
    driver = drive(monkeypatch, llm, 1, [(7, 1), (32, 1), (32, 8)], 60, salts=range(4))
    assert driver.num_ahead > (llm.stats().num_steps - before) // 4
    llm.update_params({"salt": jnp.float32(0)})


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "budget"), [(1, 34, 4), (2, 20, 16), (4, 10, 32)], ids=["1", "2", "4"]
)
def test_many_random_requests(
    monkeypatch: pytest.MonkeyPatch, block_size: int, num_blocks: int, budget: int, caching: bool
) -> None:
    llm = mock_engine.engine(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        batch_invariant=False,
        enable_prefix_caching=caching,
    )
    paces = [(budget, 1), (max(budget // 2, 4), 8), (budget, 8)]
    drive(monkeypatch, llm, block_size, paces, 240 if caching else 80)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("requests", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_other_weights_while_requests_run(monkeypatch: pytest.MonkeyPatch, caching: bool, requests: int) -> None:
    """Beams and samples that keep older K and V, or are computed anew, are exactly what that gives."""
    llm = mock_engine.engine() if caching else mock_engine.engine(enable_prefix_caching=False)
    try:
        driver = drive(monkeypatch, llm, requests, [(7, 1), (32, 8)], requests, salts=range(4), change=0.2, search=0.4)
    finally:
        llm.update_params({"salt": jnp.float32(0)}, running="recompute")
    changed = [
        isinstance(params, BeamSearchParams)
        for request_id, params in driver.params.items()
        if any(driver.history.has_changed(sample) for sample in driver.samples[request_id])
    ]
    assert sum(changed) > requests // 20  # searches
    assert len(changed) - sum(changed) > requests // 10


def test_beams_that_start_with_older_kv_publish_nothing() -> None:
    """Weights change between prompt and first fork: beams that get their rows under the new ones have old K/V."""
    llm = mock_engine.engine()
    try:
        llm.update_params({"salt": jnp.float32(0)})  # empties the cache
        llm._engine.add(llm._maker.searched("a", None, [*range(5)], BeamSearchParams(width=3, max_tokens=8)))
        llm.step()
        llm.update_params({"salt": jnp.float32(3)}, running="keep")
        mock_engine.finish(llm)
        assert llm.stats().num_cached_blocks == 0
    finally:
        llm.update_params({"salt": jnp.float32(0)}, running="recompute")
    llm.audit()
