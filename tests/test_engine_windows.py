"""The engine on a model with sliding windows: what no layer sees any more is given back, and nobody misses it."""

from __future__ import annotations

import dataclasses
import random

import mock_engine
import mock_model
import pytest
from mock_engine import GREEDY, finish, generate, ids
from windowed_mock import WINDOWS, engine, greedy, num_used

from pagedjax import LLM, SamplingParams

SIZE = mock_engine.OPTIONS["block_size"]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def local() -> LLM:
    return engine("local")


def mixed() -> LLM:
    return engine("local and global", enable_prefix_caching=False)


@pytest.mark.parametrize("kind", list(WINDOWS))
def test_tokens_with_windows(kind: str) -> None:
    llm = local() if kind == "local" else mixed()
    params = dataclasses.replace(GREEDY, max_tokens=14)
    prompts = [PROMPT, PROMPT, [*PROMPT, *PROMPT, 1], list(range(30)), [3]]
    for _ in range(2):
        for prompt, output in zip(prompts, generate(llm, prompts, params), strict=True):
            assert ids(output) == greedy(prompt, WINDOWS[kind], 14)
    mock_engine.pace(llm, budget=5)
    (output,) = generate(llm, [[9, *range(25)]], dataclasses.replace(params, n=8))
    assert [s.token_ids for s in output.outputs] == [greedy([9, *range(25)], WINDOWS[kind], 14)] * 8
    mock_engine.pace(llm)
    llm.audit()


def test_blocks_behind_the_windows_of_all_layers_are_given_back() -> None:
    llm = local()
    window, usable = 6, llm.plan.num_usable_blocks  # the larger one
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [2, *range(20)], dataclasses.replace(GREEDY, max_tokens=20))
    for num_tokens in range(21, 40):
        llm.step()
        expected = -(-num_tokens // SIZE) - (num_tokens - window) // SIZE
        assert num_used(llm) == expected
        assert llm.stats().kv_usage == pytest.approx(expected / usable)  # what the cache keeps can be had
    finish(llm)
    mock_engine.pace(llm)
    llm.audit()


def test_a_prompt_longer_than_the_pool_runs_through_its_window() -> None:
    """At most the window's blocks and those of one chunk are held at once, so that many are asked of the pool."""
    window, budget = 6, 8
    least = -(-(window + budget - 1) // SIZE) + 1
    prompts = [[3, *range(29)], [4, *range(20)]]
    asked = SamplingParams(temperature=0.0, max_tokens=14)
    assert -(-(len(prompts[0]) + asked.max_tokens - 1) // SIZE) > least
    with pytest.raises(ValueError, match=rf"need {least} blocks of {SIZE} tokens"):
        generate(engine("local", num_blocks=least, max_num_batched_tokens=budget), prompts, asked)
    llm = engine("local", num_blocks=least + 1, max_num_batched_tokens=budget)
    for prompt, output in zip(prompts, generate(llm, prompts, asked), strict=True):
        assert ids(output) == greedy(prompt, WINDOWS["local"], asked.max_tokens)
    llm.audit()


def test_a_global_layer_keeps_every_block() -> None:
    llm = mixed()
    usable = llm.plan.num_usable_blocks
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [2, *range(20)], dataclasses.replace(GREEDY, max_tokens=20))
    for num_tokens in range(21, 40):
        llm.step()
        assert llm.stats().num_free_blocks == usable - -(-num_tokens // SIZE)
    finish(llm)
    mock_engine.pace(llm)
    llm.audit()


def test_samples_that_end_together_behind_different_windows_leak_nothing() -> None:
    """One ends at once, the other after eight inner steps of the same plan; both hold a block of the prompt."""
    llm, prompt = local(), [11, 12, 13, 14, 15, 16, 17]
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=9)
    for stop in range(mock_model.VOCAB):
        (output,) = generate(llm, [prompt], dataclasses.replace(params, stop_token_ids=[stop], cache_salt=str(stop)))
        assert all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
        llm.audit()


@pytest.mark.slow
def test_random_requests_with_windows() -> None:
    """Prefixes shared and not, samples, preemptions: as without windows, and what has passed is never read."""
    rng, llm = random.Random(0), engine("local", num_blocks=26)
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    prefixes = [[rng.randrange(32) for _ in range(rng.randint(0, 24))] for _ in range(4)]
    for _ in range(300):
        start = rng.choice([*prefixes, *prompts[-3:]])[:30]
        prompts.append([*start, *(rng.randrange(32) for _ in range(rng.randint(1, 6)))])
        params.append(dataclasses.replace(GREEDY, n=rng.choice([1, 1, 1, 8]), max_tokens=rng.randint(1, 12)))
    for budget, decode_steps in ((4, 1), (11, 8), (32, 3)):
        mock_engine.pace(llm, budget=budget, decode_steps=decode_steps)
        for prompt, asked, output in zip(prompts, params, generate(llm, prompts, params), strict=True):
            expected = greedy(prompt, WINDOWS["local"], asked.max_tokens)
            assert [sample.token_ids for sample in output.outputs] == [expected] * asked.n
        llm.audit()
        assert llm.stats().prefix_hit_rate > 0.2
    assert llm.stats().num_preemptions > 30
