"""The whole engine on the mock model, fed at random: every token of every request is what the oracle says.

Pools are short, so that sequences are preempted all the time; requests are aborted wherever they happen to be. Prompts
begin like earlier ones, repeat them, or go on where they ended; weights are exchanged for the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import mock_engine
import mock_model
import numpy as np
import pytest

from pagedjax import LLM, RequestOutput, SamplingParams, block_table
from pagedjax.plan import StepPlan

END_IDS = (5, mock_model.VOCAB - 1)


def random_params(rng: random.Random) -> SamplingParams:
    """Every option with some chance, most requests with few of them."""

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    max_tokens = rng.randint(1, 16)
    return SamplingParams(
        n=sometimes(0.15, rng.randint(2, 8), 1),
        temperature=sometimes(0.5, rng.uniform(0.3, 1.5), 0.0),
        top_p=sometimes(0.15, rng.uniform(0.1, 1.0), 1.0),
        top_k=sometimes(0.15, rng.randint(1, 8), 0),
        min_p=sometimes(0.1, rng.uniform(0.0, 0.3), 0.0),
        repetition_penalty=sometimes(0.15, rng.uniform(0.8, 1.5), 1.0),
        presence_penalty=sometimes(0.15, rng.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(0.15, rng.uniform(-1, 1), 0.0),
        seed=sometimes(0.5, rng.randrange(2**63), None),
        max_tokens=max_tokens,
        min_tokens=sometimes(0.3, rng.randint(0, max_tokens), 0),
        stop_token_ids=sometimes(0.3, rng.sample(range(mock_model.VOCAB), rng.randint(1, 4)), ()),
        ignore_eos=rng.random() < 0.2,
        logprobs=sometimes(0.2, rng.choice([0, 1, 5, 20]), None),
        prompt_logprobs=sometimes(0.2, rng.choice([0, 1, 5]), None),
        logit_bias=sometimes(0.1, {rng.randrange(mock_model.VOCAB): rng.uniform(-4, 4)}, None),
        cache_salt=sometimes(0.15, rng.choice(["a", "b"]), None),
    )


class Driver:
    """Feeds an engine and checks what comes out."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.engine, self.rng = llm, llm._engine, random.Random(seed)
        self.usable = self.engine.scheduler.num_usable_blocks
        self.params: dict[str, SamplingParams] = {}
        self.seeds: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.latest: dict[str, RequestOutput] = {}
        self.num_tokens = self.num_doubtful = 0
        self.prefixes = [self._tokens(self.rng.randint(0, 30)) for _ in range(2)]
        self.prompts: list[list[int]] = []

    def run(self, num_requests: int) -> None:
        first = len(self.params)
        while len(self.params) < first + num_requests or self.llm.has_unfinished_requests():
            if len(self.params) < first + num_requests and self.rng.random() < 0.7:
                self.add()
            if self.rng.random() < 0.04 and self.engine.requests:
                self.llm.abort(self.rng.choice(list(self.engine.requests)))
            if self.rng.random() < 0.02:
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
        """The same weights; what was cached or goes on with older K/V must not be found again all the same."""
        modes: list[Literal["refuse", "recompute", "keep"]] = ["refuse", "recompute", "keep"]
        running = self.rng.choice(modes)
        if running == "refuse" and self.engine.requests:
            with pytest.raises(ValueError, match="requests are unfinished"):
                self.llm.update_params(self.engine.runner.params, running=running)
            return
        self.llm.update_params(self.engine.runner.params, running=running)
        cache = self.engine.scheduler.ledger.cache
        assert cache is None or not cache.block_ids

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(mock_model.VOCAB) for _ in range(count)]

    def add(self) -> None:
        prompt, params = self.prompt(), random_params(self.rng)
        num_tokens = len(prompt)
        end_len = min(num_tokens + params.max_tokens, self.llm.config.max_model_len)
        request_id = str(len(self.params))
        if -(-(end_len - 1) // self.llm.config.block_size) > self.usable or num_tokens >= self.llm.config.max_model_len:
            with pytest.raises(ValueError, match="raise"):
                self.llm.add_request(request_id, prompt, params)
            return
        self.llm.add_request(request_id, prompt, params)
        self.params[request_id] = params
        self.prompts.append(prompt)
        self.seeds[request_id] = [sequence.seed for sequence in self.engine.requests[request_id].sequences]

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
        assert ledger.num_free_blocks == np.sum(counts[1:] == 0), "nothing is in flight, and the bound is not the truth"
        if self.rng.random() < 0.02:
            cached = ledger.cache.block_ids if ledger.cache is not None else []
            block_table.check(table, [*cached, *ledger.drops])

    def check(self, output: RequestOutput) -> None:
        params = self.params[output.request_id]
        prompt = output.prompt_token_ids
        aborted = any(sample.finish_reason == "abort" for sample in output.outputs)
        assert [sample.index for sample in output.outputs] == list(range(params.n))
        for sample, seed in zip(output.outputs, self.seeds[output.request_id], strict=True):
            oracle = mock_model.Oracle(prompt, params, seed=seed, index=sample.index, end_ids=END_IDS)
            self.num_doubtful += oracle.check(sample)
            self.num_tokens += len(sample.token_ids)
        found = output.prompt_logprobs
        if found is not None:
            assert params.prompt_logprobs is not None
            assert found[0] is None
            assert aborted or len(found) == len(prompt)
            following = prompt[1 : len(found)]
            mock_model.check_logprobs(found[1:], params.prompt_logprobs, mock_model.raw_logits(prompt)[:-1], following)
        else:
            assert params.prompt_logprobs is None


class Starts:
    """Counts how sequences start, from the plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.hits = self.forks = self.drops = 0
        self._schedule = llm._engine.scheduler.schedule
        monkeypatch.setattr(llm._engine.scheduler, "schedule", self._count)

    def _count(self) -> StepPlan:
        plan = self._schedule()
        self.hits += sum(bool(admission.block_ids) for admission in plan.admits)
        self.forks += sum(admission.parent is not None for admission in plan.admits)
        self.drops += len(plan.drops)
        return plan


def drive(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, seed: int, paces: Sequence[tuple[int, int]], requests: int
) -> None:
    """Runs that many requests at each pace: tokens a step, inner steps."""
    monkeypatch.setattr(llm._maker, "end_ids", frozenset(END_IDS))
    starts = Starts(monkeypatch, llm)
    driver = Driver(llm, seed)
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
        assert sum(count > 0 for count in cached) > len(cached) // 10
        assert starts.hits > len(cached) // 4
        assert starts.drops > len(cached)
    else:
        assert (starts.hits, starts.drops, sum(cached)) == (0, 0, 0)
    # Of blocks of one token the cache has all that a fork could share.
    forks = not llm.config.enable_prefix_caching or llm.config.block_size > 1
    assert starts.forks > len(cached) // 20 if forks else starts.forks == 0


def test_random_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, mock_engine.engine(), 0, [(4, 1), (7, 8), (32, 8)], 60)


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
