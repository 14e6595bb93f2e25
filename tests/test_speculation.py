"""Speculation changes no output: on a model that likes to repeat itself, everything is what the oracle says."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import mock_engine
import mock_model
import numpy as np
import pytest
import test_engine_fuzz
from flax import nnx
from mock_engine import finish, generate, ids
from mock_model import VOCAB, Oracle
from paired_model import PairedDecoder, paired_logits

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams
from pagedjax.plan import NO_TOKEN, RUNNING, StepPlan, StepResult
from pagedjax.row_state import RowState
from pagedjax.speculation import NGRAM, accept, propose

PROPOSALS = 3


@functools.cache
def engine() -> LLM:
    return LLM(PairedDecoder(), **mock_engine.OPTIONS | {"num_speculative_tokens": PROPOSALS})


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """The engine as if it were new, and the oracle of its model; idle before and after a test."""
    monkeypatch.setattr(mock_model, "raw_logits", paired_logits)
    monkeypatch.setattr(engine()._maker, "num_made", 0)
    engine().update_params(engine()._runner.params)  # empties the prefix cache
    engine().audit()
    yield engine()
    for request_id in list(engine()._engine.requests):  # of a test that failed
        engine()._engine.discard(request_id)
    mock_engine.pace(engine())
    engine()._engine.scheduler.num_speculative_tokens = PROPOSALS
    finish(engine())
    engine().audit()


@dataclasses.dataclass
class Watch:
    """Follows an engine's plans and results."""

    llm: LLM
    plans: list[StepPlan] = dataclasses.field(default_factory=list)
    results: list[StepResult] = dataclasses.field(default_factory=list)

    def run(self, plan: StepPlan) -> StepResult:
        result = type(self.llm._runner).run(self.llm._runner, plan)
        table, size = self.llm._runner.state.table, self.llm.config.block_size
        held = np.count_nonzero(np.asarray(table.block_tables), axis=1)
        np.testing.assert_array_equal(held, -(-np.asarray(table.seq_lens) // size))  # nothing for rejected tokens
        for row, part in plan.scheduled.items():
            drawn = result.tokens[:, row] != NO_TOKEN
            assert not drawn.any() or result.seq_lens[row] == part.sequence.num_tokens + drawn.sum() - 1
            assert (result.finish[drawn, row][:-1] == RUNNING).all(), "a token after the end"
        self.plans.append(plan)
        self.results.append(result)
        return result

    def ends(self) -> set[tuple[int, bool]]:
        """How rows ended in steps with proposals, and whether with a token that came after an accepted one."""
        return {
            (int(result.finish[line, row]), bool(line % (1 + PROPOSALS)))
            for plan, result in zip(self.plans, self.results, strict=True)
            for line, row in np.argwhere(result.finish != RUNNING)
            if plan.num_proposals
        }


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> Watch:
    watch = Watch(llm)
    monkeypatch.setattr(llm._runner, "run", watch.run)
    return watch


# Outputs


@pytest.mark.parametrize(("budget", "decode_steps"), [(32, 8), (32, 1), (9, 2)])
def test_random_requests_come_out_as_without(llm: LLM, watch: Watch, budget: int, decode_steps: int) -> None:
    """Every option, alone and together; logprobs to the last bit, since the mock's logits are exact."""
    rng = random.Random(budget * decode_steps)
    mock_engine.pace(llm, budget=budget, decode_steps=decode_steps)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    params = [dataclasses.replace(test_engine_fuzz.random_params(rng), seed=rng.randrange(2**63)) for _ in prompts]
    found = generate(llm, prompts, params)
    stats = llm.stats()
    llm._engine.scheduler.num_speculative_tokens = 0
    for output, plain in zip(found, generate(llm, prompts, params), strict=True):
        assert output.outputs == plain.outputs
        assert output.prompt_logprobs == plain.prompt_logprobs
    assert llm.stats().num_proposed_tokens == stats.num_proposed_tokens
    num_proposed = sum(result.num_proposed_tokens for result in watch.results)
    num_accepted = sum(result.num_accepted_tokens for result in watch.results)
    assert num_proposed > num_accepted > 5


def test_fuzz(monkeypatch: pytest.MonkeyPatch, llm: LLM, watch: Watch) -> None:
    """Against the oracle, with aborts and a pool that preempts; rows end at every kind of token, with every plan."""
    test_engine_fuzz.drive(monkeypatch, llm, 1, [(4, 1), (7, 8), (32, 2)], 80)
    assert watch.ends() == {(finish, late) for finish in (1, 2) for late in (False, True)}
    assert {plan.num_proposals for plan in watch.plans} == set(range(PROPOSALS + 1))
    assert {plan.num_steps > 1 for plan in watch.plans if plan.num_proposals} == {False, True}


def always(*tokens: int, **options: Any) -> SamplingParams:
    """Draws one of these tokens, whichever the model prefers."""
    return SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(tokens, 60.0), **options)


@pytest.mark.parametrize("max_tokens", range(1, 15))
def test_length_ends_a_row_among_accepted_tokens(llm: LLM, watch: Watch, max_tokens: int) -> None:
    (output,) = generate(llm, [[9] * 4], always(9, max_tokens=max_tokens, logprobs=2))
    assert ids(output) == [9] * max_tokens
    Oracle([9] * 4, always(9, max_tokens=max_tokens, logprobs=2)).check(output.outputs[0])
    # All proposals are accepted: four tokens an inner step after the prompt's one.
    num_steps = 0
    for plan, result in zip(watch.plans, watch.results, strict=True):
        lines = result.tokens[:: 1 + PROPOSALS if plan.num_proposals else 1]  # the first of each inner step
        num_steps += np.any(lines != NO_TOKEN, axis=1).sum()
    assert num_steps == 1 + -(-(max_tokens - 1) // (1 + PROPOSALS))


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_stop_id_ends_a_row_among_accepted_tokens(llm: LLM, watch: Watch, min_tokens: int) -> None:
    """The stop id is what is proposed and drawn, and the model would draw what is proposed behind it as well."""
    for stop in range(0, VOCAB, 3):
        params = always(stop, stop ^ 1, max_tokens=12, stop_token_ids=[stop], min_tokens=min_tokens)
        prompt = [stop ^ 1, stop] * 3
        (output,) = generate(llm, [prompt], params)
        assert ids(output) == Oracle(prompt, params).generate()
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert sum(result.num_proposed_tokens for result in watch.results) > VOCAB // 3


def test_penalties_see_what_stands_before_a_token(llm: LLM, watch: Watch) -> None:
    """Each 9 makes the next one less likely: a position that counted a token too many would draw a 4 instead."""
    params = always(9, 4, max_tokens=24, frequency_penalty=2.0)
    num_doubtful = 0
    for first in range(12):
        prompt = [first, 9, 4, 9, 4, 9]
        (output,) = generate(llm, [prompt], params)
        num_doubtful += Oracle(prompt, params).check(output.outputs[0])
        assert {9, 4} == set(ids(output))
    assert num_doubtful < 5
    assert sum(result.num_accepted_tokens for result in watch.results) > 24


def test_accepted_tokens_fill_blocks_that_can_be_shared(llm: LLM) -> None:
    """The next request goes on from what was accepted, and not from what was rejected."""
    params = SamplingParams(temperature=0.0, max_tokens=17)
    prompt = [2, 3, 2, 3, 2]
    (first,) = generate(llm, [prompt], params)
    longer = prompt + ids(first)
    (second,) = generate(llm, [longer], params)
    assert second.num_cached_tokens == (len(longer) - 1) // 2 * 2
    assert ids(second) == Oracle(longer, params).generate()


def test_a_short_pool_costs_proposals_and_no_preemption(llm: LLM, watch: Watch) -> None:
    """Two rows that fill the pool between them, with nothing to spare for what may be rejected."""
    before = llm.stats().num_preemptions
    params = SamplingParams(temperature=0.0, max_tokens=16, logit_bias={4: 6.0})
    prompts = [[1, 2, 1], [4, 5, 4]]  # 18 tokens each at the end: 9 blocks of 19
    for prompt, output in zip(prompts, generate(llm, prompts, params), strict=True):
        assert ids(output) == Oracle(prompt, params).generate()
    assert llm.stats().num_preemptions == before
    assert max(plan.num_proposals for plan in watch.plans) == PROPOSALS


def test_samples_of_one_prompt(llm: LLM, watch: Watch) -> None:
    params = SamplingParams(temperature=0.4, seed=5, n=4, max_tokens=12, logprobs=1)
    (output,) = generate(llm, [[6, 7, 6, 7, 6]], params)
    for sample in output.outputs:
        Oracle([6, 7, 6, 7, 6], params, index=sample.index).check(sample)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    assert sum(result.num_accepted_tokens for result in watch.results) > 0


@pytest.mark.slow
def test_a_sliding_window() -> None:
    """A small decoder with and without proposals: every bit of the logprobs is the same, with `batch_invariant`."""
    config = ModelConfig("llama", 48, 16, 16, 2, 2, 1, 8, 128, sliding_windows=(6, 9))
    options = mock_engine.OPTIONS | {"max_model_len": 96, "num_blocks": 40, "max_num_seqs": 2}
    llm = LLM(Decoder(config, rngs=nnx.Rngs(1)), num_speculative_tokens=2, **options)
    prompts = [[7, 7, 7, 3] * 3, [1, 2, 3]]
    params = SamplingParams(temperature=0.0, max_tokens=60, repetition_penalty=1.05, logprobs=1)
    found = [output.outputs for output in generate(llm, prompts, params)]
    assert llm.stats().num_accepted_tokens > 10
    llm._engine.scheduler.num_speculative_tokens = 0
    assert [output.outputs for output in generate(llm, prompts, params)] == found
    llm.audit()


def test_the_programs_are_listed() -> None:
    options = mock_engine.OPTIONS | {"batch_invariant": False, "max_num_batched_tokens": 64, "max_num_seqs": 20}
    plain = LLM(mock_model.MockDecoder(), **options).plan.programs
    assert not [name for name in plain if "verify" in name]
    options["num_speculative_tokens"] = 4
    assert LLM(mock_model.MockDecoder(), **options).plan.programs == (
        *plain, "verify[5]", "verify[20]", "verify[64]"
    )  # fmt: skip


# Proposals and acceptance, against loops


def proposals_of(tokens: list[int], wanted: int) -> list[int]:
    """What follows the latest of the earlier places that agree with most of the last NGRAM tokens."""
    for size in range(min(NGRAM, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(wanted)]
    return []


@pytest.mark.parametrize("num_ids", [1, 2, 4, 30])
def test_propose(num_ids: int) -> None:
    rng = np.random.default_rng(num_ids)
    num_rows, length, most = 40, 24, 5
    rows = RowState.zeros(num_rows, length)
    num_tokens = rng.integers(1, length, num_rows)
    num_tokens[:3] = (1, 2, length - 1)
    end_len = np.minimum(num_tokens + rng.integers(1, 9, num_rows), length)
    history = rng.integers(0, num_ids, (num_rows, length))
    wanted = rng.integers(0, most + 1, num_rows)
    rows = dataclasses.replace(
        rows,
        tokens=jnp.asarray(history, jnp.int32),
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
        end_len=jnp.asarray(end_len, jnp.int32),
    )
    new, counts = jax.jit(propose, static_argnums=2)(rows, jnp.asarray(wanted, jnp.int32), most)
    for row, size in enumerate(num_tokens):
        known = history[row, :size].tolist()
        expected = proposals_of(known, min(wanted[row], end_len[row] - size - 1))
        assert counts[row] == len(expected)
        assert new.tokens[row, : size + len(expected)].tolist() == known + expected
        assert new.tokens[row, size + len(expected) :].tolist() == history[row, size + len(expected) :].tolist()


def test_accept() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        is_first = rng.random(16) < 0.3
        starts = np.maximum.accumulate(np.where(is_first, np.arange(16), 0))
        agrees = rng.random(16) < 0.6
        expected = [agrees[start:slot].all() for slot, start in enumerate(starts)]
        assert accept(jnp.asarray(agrees), jnp.asarray(starts, jnp.int32)).tolist() == expected


@pytest.mark.slow
def test_smollm2_repeats_a_text(smollm2: LLM, smollm2_path: Any) -> None:
    """Greedy tokens are those of plain decoding, in far fewer steps; each with the margin that two shapes leave."""
    text = (
        "The harbour of the old town lies behind two breakwaters. In winter the fishing boats stay in port, and their "
        "crews mend nets in the sheds along the quay. In summer the ferries bring visitors, who eat grilled fish and "
        "watch the boats come in."
    )
    content = f"Repeat the following text exactly, word by word, and nothing else.\n\n{text}"
    message = [{"role": "user", "content": content}]
    params = SamplingParams(temperature=0.0, max_tokens=96, logprobs=2)
    (plain,) = smollm2.chat(message, params)
    llm = LLM.load(
        smollm2_path, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=2**26, num_speculative_tokens=4
    )
    (found,) = llm.chat(message, params)
    assert found.outputs[0].logprobs is not None
    for token, wanted, entry in zip(ids(found), ids(plain), found.outputs[0].logprobs, strict=True):
        first, second = sorted(entry.values(), reverse=True)[:2]
        if token != wanted:
            assert first - second < 1e-3
            break
    assert llm.stats().num_accepted_tokens > len(ids(found)) / 2
    llm.audit()
