"""A hundred random requests on a real model in float32, served in random ways: each gives what it gives by itself.

What it gives by itself comes from a plain engine: one sample at a time, the prompt in one piece, a token a step,
nothing shared, nothing proposed. The plain engine is compared with the dense forward and the NumPy sampler in turn, and
the margins come from these: a draw is clear where the two largest of (logit / temperature + noise) are more than 1e-3
apart. Clear draws have to be equal; at any other one two texts may part, and there their comparison ends.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import mock_engine
import numpy as np
import numpy_sampler
import pytest
from flax import nnx
from mock_model import logprobs

from pagedjax import LLM, Decoder, RequestOutput, SamplingParams
from pagedjax.loaders import gguf
from pagedjax.plan import StepPlan, StepResult

# Dimensions: N tokens of one sequence, V token ids.

LOGPROB_TOLERANCE = 1e-3
NUM_REQUESTS = 100
MAX_PROMPT, MAX_TOKENS = 40, 9
END_IDS = (2, 30)  # the model's own, and a full stop
PAUSES = (28, 198, 30)  # comma, new line, full stop

SIZES: dict[str, Any] = {"max_model_len": 56, "block_size": 4, "num_blocks": 18}  # blocks for two or three at once
PLAIN = SIZES | {
    "max_num_seqs": 1,
    "max_num_batched_tokens": MAX_PROMPT,
    "decode_steps": 1,
    "enable_prefix_caching": False,
}
SERVING = SIZES | {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "decode_steps": 8,
    "num_speculative_tokens": 3,
    "watermark": 0.0,
}
ENGINES: dict[str, dict[str, Any]] = {
    "cache": SERVING | {"defragment_above": 0.0},
    "no cache": SERVING | {"enable_prefix_caching": False, "batch_invariant": True},  # in one shape: two programs less
}
PACES = list(itertools.product((6, 11, 16), (1, 4, 8), (0, 3)))  # tokens a step, inner steps, proposals

_PROMPTS = json.loads((pathlib.Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["prompts"]
TEXTS: dict[str, list[int]] = {prompt["name"]: prompt["prompt_token_ids"] for prompt in _PROMPTS}
LONG = TEXTS["raw_long600"]


def random_request(rng: random.Random, earlier: Sequence[list[int]]) -> tuple[list[int], SamplingParams]:
    """A prompt of one token, or of 17 to 40: those in between would need one more program of the plain engine."""
    kind = rng.choice(["shared", "shared", "shared", "repeating", "repeating", "again", "token"])
    place = rng.randrange(len(LONG) - 8)
    if kind == "again" and earlier:
        return rng.choice(earlier[-6:]), random_params(rng)
    if kind == "token":
        return LONG[place : place + 1], random_params(rng)
    if kind == "repeating":
        phrase = LONG[place : place + rng.randint(3, 6)]
        params = dataclasses.replace(random_params(rng), temperature=0.0, max_tokens=MAX_TOKENS)  # likely to go on so
        return (phrase * 8)[: rng.randint(17, 32)], params
    start = TEXTS[rng.choice(["chat_capital", "raw_code", "raw_unicode", "raw_long600"])][: rng.choice([16, 22, 32])]
    return start + LONG[place : place + rng.randint(1, 8)], random_params(rng)


def random_params(rng: random.Random) -> SamplingParams:
    """Greedy or seeded; every option with some chance."""

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    max_tokens = rng.randint(1, MAX_TOKENS)
    return SamplingParams(
        n=sometimes(0.15, rng.randint(2, 3), 1),
        temperature=sometimes(0.5, rng.uniform(0.3, 1.2), 0.0),
        top_p=sometimes(0.25, rng.uniform(0.5, 1.0), 1.0),
        top_k=sometimes(0.25, rng.choice([1, 5, 40, 200]), 0),
        min_p=sometimes(0.2, rng.uniform(0.0, 0.2), 0.0),
        repetition_penalty=sometimes(0.15, rng.uniform(0.9, 1.4), 1.0),
        presence_penalty=sometimes(0.15, rng.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(0.15, rng.uniform(-1, 1), 0.0),
        seed=rng.randrange(2**63),
        max_tokens=max_tokens,
        min_tokens=sometimes(0.2, rng.randint(0, max_tokens), 0),
        stop_token_ids=sometimes(0.2, rng.sample(PAUSES, 2), ()),
        ignore_eos=rng.random() < 0.3,
        logprobs=sometimes(0.4, rng.choice([0, 1, 5, 20]), None),
        prompt_logprobs=sometimes(0.25, rng.choice([0, 1, 5]), None),
        cache_salt=sometimes(0.15, rng.choice(["a", "b"]), None),
    )


class Dense:
    """The training forward, and what the definitions say of its logits."""

    def __init__(self, model: Decoder, params: Any) -> None:
        graphdef, _ = nnx.split(model)
        self._params = params
        self._forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens)[0])

    def check(self, output: RequestOutput, params: SamplingParams) -> list[list[bool]]:
        """Fails unless every clear draw and every logprob is right.

        Returns:
            Of each sample, which draws are clear.
        """
        prompt, clear = output.prompt_token_ids, []
        for sample in output.outputs:
            logits = self._logits(prompt + sample.token_ids[:-1])
            clear.append(_check_draws(logits[len(prompt) - 1 :], prompt, params, sample.index, sample.token_ids))
            if params.logprobs is not None:
                assert sample.logprobs is not None
                _check_logprobs(sample.logprobs, params.logprobs, logits[len(prompt) - 1 :], sample.token_ids)
            if params.prompt_logprobs is not None and sample.index == 0:
                assert output.prompt_logprobs is not None
                _check_logprobs(output.prompt_logprobs[1:], params.prompt_logprobs, logits, prompt[1:])
        return clear

    def _logits(self, tokens: list[int]) -> np.ndarray:
        """f64[N, V], after each token."""
        padded = np.zeros((1, MAX_PROMPT + MAX_TOKENS), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._forward(self._params, padded)[: len(tokens)], np.float64)


def _check_draws(
    logits: np.ndarray, prompt: list[int], params: SamplingParams, index: int, tokens: list[int]
) -> list[bool]:
    assert params.seed is not None
    positions = [len(prompt) + place for place in range(MAX_TOKENS)]  # always as many: one program
    noise = numpy_sampler.noise([params.seed] * MAX_TOKENS, [index] * MAX_TOKENS, positions, logits.shape[1])
    stop_ids = sorted({*params.stop_token_ids, *(() if params.ignore_eos else END_IDS)})
    clear = []
    for place, token in enumerate(tokens):
        x = numpy_sampler.processed_logits(logits[place], params, prompt, tokens[:place], stop_ids)
        expected, is_clear = numpy_sampler.draw(x, params, noise[place])
        assert token == expected or not is_clear, f"token {place} of {tokens} is not {expected}: {prompt}, {params}"
        clear.append(is_clear)
    return clear


def _check_logprobs(
    found: Sequence[dict[int, float] | None], num_top: int, logits: np.ndarray, tokens: Sequence[int]
) -> None:
    """Of near ties either may be among the top: the values have to be right, and each that of its id."""
    assert len(found) == len(tokens)
    for entry, values, token in zip(found, logprobs(logits[: len(tokens)]), tokens, strict=True):
        assert entry is not None
        assert token in entry
        top = np.sort(values)[::-1][:num_top]
        np.testing.assert_allclose(list(entry.values())[:num_top], top, atol=LOGPROB_TOLERANCE)
        np.testing.assert_allclose(list(entry.values()), values[list(entry)], atol=LOGPROB_TOLERANCE)


@dataclasses.dataclass
class Case:
    """A request and what it gives by itself."""

    prompt: list[int]
    params: SamplingParams
    plain: RequestOutput
    clear: list[list[bool]]  # of each sample, of each token

    def check(self, output: RequestOutput) -> int:
        """Fails unless the output is the plain one, as far as that is clear; how many samples part from it."""
        num_parted = 0
        for sample, plain, clear in zip(output.outputs, self.plain.outputs, self.clear, strict=True):
            pairs = enumerate(zip(sample.token_ids, plain.token_ids, strict=False))
            agreed = next((place for place, (token, expected) in pairs if token != expected), None)
            if agreed is None:
                assert sample.token_ids == plain.token_ids
                assert (sample.finish_reason, sample.stop_reason) == (plain.finish_reason, plain.stop_reason)
            else:
                assert not clear[agreed], (
                    f"{sample.token_ids} parts from {plain.token_ids}: {self.prompt}, {self.params}"
                )
                num_parted += 1
            assert_close(sample.logprobs, plain.logprobs, self.params.logprobs, agreed)
        assert_close(output.prompt_logprobs, self.plain.prompt_logprobs, self.params.prompt_logprobs)
        return num_parted


def assert_close(found: Any, expected: Any, num_top: int | None, length: int | None = None) -> None:
    """The first `length` entries of both have the same values; None: all."""
    if num_top is None:
        assert found is expected is None
        return
    for entry, other in zip(found[:length], expected[:length], strict=True):
        if entry is None or other is None:
            assert entry is other is None
            continue
        tops = [list(e.values())[:num_top] for e in (entry, other)]
        np.testing.assert_allclose(*tops, atol=LOGPROB_TOLERANCE)
        common = entry.keys() & other.keys()
        assert len(common) >= max(num_top - 1, 1)  # the last may be a near tie
        np.testing.assert_allclose(*([e[i] for i in common] for e in (entry, other)), atol=LOGPROB_TOLERANCE)


class Server:
    """Serves cases while it changes the pace, moves blocks, and counts what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM, rng: random.Random) -> None:
        self.llm, self.rng = llm, rng
        self.counts: Counter[str] = Counter()
        self.paces: set[tuple[int, int, int]] = set()  # in force while something was computed
        self._upcoming = itertools.cycle(rng.sample(PACES, len(PACES)))
        self._run, self._defragment = llm._runner.run, llm._runner.defragment
        monkeypatch.setattr(llm._runner, "run", self._count)
        monkeypatch.setattr(llm._runner, "defragment", self._count_moves)

    def serve(self, cases: Sequence[Case]) -> None:
        """All of them to the end, in bursts: some that wait and preempt each other, and then a few that decode."""
        waiting = list(enumerate(cases))
        known = {str(index): case for index, case in waiting}
        while waiting or self.llm.has_unfinished_requests():
            if len(self.llm._engine.requests) <= self.rng.randint(0, 2):
                burst, waiting = waiting[:9], waiting[9:]
                for index, case in burst:
                    self.llm.add_request(str(index), case.prompt, case.params)
            if self.rng.random() < 0.5:
                self._change_pace()
            if self.rng.random() < 0.2:
                self.llm.defragment()
            for output in self.llm.step():
                if output.finished:
                    self.counts["parted"] += known.pop(output.request_id).check(output)
                    self.counts["cached tokens"] += output.num_cached_tokens
        assert not known
        self.llm.audit()
        self.counts["preemptions"] = self.llm.stats().num_preemptions
        self.counts["accepted"] = self.llm.stats().num_accepted_tokens

    def check(self, *, hits: bool) -> None:
        """All that is claimed to happen has happened; `hits`: prefixes were found in the cache."""
        counts = self.counts
        happened = ["preemptions", "accepted", "forks", "several steps", "chunks", "moves"]
        assert all(counts[what] > 0 for what in happened), counts
        assert (counts["hits"] > 0) == (counts["cached tokens"] > 0) == hits, counts
        assert counts["parted"] <= 2, counts
        assert self.paces == set(PACES)

    def _change_pace(self) -> None:
        budget, decode_steps, num_proposals = next(self._upcoming)
        self.llm._engine.scheduler.num_speculative_tokens = num_proposals
        mock_engine.pace(self.llm, budget=budget, decode_steps=decode_steps)

    def _count(self, plan: StepPlan) -> StepResult:
        scheduler = self.llm._engine.scheduler
        self.paces.add((scheduler.max_num_batched_tokens, scheduler.decode_steps, scheduler.num_speculative_tokens))
        self.counts["hits"] += sum(bool(admission.block_ids) for admission in plan.admits)
        self.counts["forks"] += sum(admission.parent is not None for admission in plan.admits)
        self.counts["several steps"] += plan.num_steps > 1
        self.counts["chunks"] += sum(
            part.first_position + part.num_tokens < len(part.sequence.given_ids) for part in plan.scheduled.values()
        )
        return self._run(plan)

    def _count_moves(self) -> dict[int, int]:
        moves = self._defragment()
        self.counts["moves"] += len(moves)
        return moves


@pytest.mark.slow
def test_random_requests(monkeypatch: pytest.MonkeyPatch, smollm2_path: pathlib.Path) -> None:
    config, weights = gguf.load(smollm2_path)
    model = Decoder.abstract(config)
    plain = LLM(model, weights, end_ids=END_IDS, **PLAIN)
    make = functools.partial(LLM, model, plain._runner.params, end_ids=END_IDS)  # on the device: not copied
    dense, rng = Dense(model, plain._runner.params), random.Random(0)
    cases: list[Case] = []
    for _ in range(NUM_REQUESTS):
        prompt, params = random_request(rng, [case.prompt for case in cases])
        (output,) = mock_engine.generate(plain, prompt, params)
        cases.append(Case(prompt, params, output, dense.check(output, params)))
    draws = [clear for case in cases for sample in case.clear for clear in sample]
    assert sum(draws) > 0.95 * len(draws)
    half = NUM_REQUESTS // 2
    for first, (name, options) in zip((0, half), ENGINES.items(), strict=True):
        server = Server(monkeypatch, make(**options), rng)
        server.serve(cases[first : first + half // 2])
        server.serve(cases[first + half // 2 : first + half])  # idle in between, where a cache is tidied up
        server.check(hits=name == "cache")
