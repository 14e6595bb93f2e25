"""pagedjax.logit_rules: bias, held-back stop ids and penalties against a token-by-token NumPy oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy_sampler

from pagedjax.logit_rules import apply_rules, clean, needs_rules
from pagedjax.row_sampling import row_values
from pagedjax.sampling_params import SamplingParams

VOCAB, LENGTH = 128, 12
STOP_IDS = [2, 127]
RULES = jax.jit(apply_rules)
NEEDED = jax.jit(needs_rules)


def _apply(
    logits: np.ndarray, requests: list[tuple[SamplingParams, list[int], list[int]]], order: list[int] | None = None
) -> np.ndarray:
    """The rows of `requests` (params, prompt, output); `order` permutes the lines of the history."""
    lines = order or list(range(len(requests)))
    tokens = np.full((len(requests), LENGTH), 5, np.int32)  # what is past a history is not padding: real ids
    for line, (_, prompt, output) in zip(lines, requests, strict=True):
        tokens[line, : len(prompt) + len(output)] = prompt + output
    rows = [row_values(params, seed=0, sample_index=0, stop_ids=STOP_IDS) for params, _, _ in requests]
    prompt_lens = np.array([len(prompt) for _, prompt, _ in requests], np.int32)
    positions = prompt_lens + np.array([len(output) for _, _, output in requests], np.int32)
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)
    found = RULES(jnp.asarray(logits), stacked, positions, tokens, prompt_lens, np.array(lines, np.int32))
    if not bool(NEEDED(stacked, positions - prompt_lens)):
        np.testing.assert_array_equal(found, logits)
    return np.asarray(found)


def test_penalties_see_the_right_history() -> None:
    logits = np.tile(np.linspace(-2, 2, VOCAB, dtype=np.float32), (4, 1))
    prompt, output = [7, 7, 3], [5, 5]
    found = _apply(
        logits,
        [
            (SamplingParams(repetition_penalty=2.0), prompt, output),
            (SamplingParams(frequency_penalty=0.5), prompt, output),
            (SamplingParams(presence_penalty=0.5), prompt, output),
            (SamplingParams(), prompt, output),
        ],
    )
    changed = [np.flatnonzero(row != logits[0]).tolist() for row in found]
    assert changed == [[3, 5, 7], [5], [5], []]
    np.testing.assert_allclose(found[0, [3, 5, 7]], logits[0, [3, 5, 7]] * 2)  # negative: multiplied
    np.testing.assert_allclose(found[1, 5], logits[0, 5] - 1.0)
    np.testing.assert_allclose(found[2, 5], logits[0, 5] - 0.5)
    # After a preemption the output is prefilled like a prompt; the history still knows where the prompt ended.
    np.testing.assert_array_equal(
        _apply(logits, [(SamplingParams(frequency_penalty=0.5), prompt, output)] * 4), found[[1] * 4]
    )


def test_any_mixture_equals_the_oracle() -> None:
    rng = np.random.default_rng(0)
    for trial in range(30):
        logits = rng.normal(size=(4, VOCAB)).astype(np.float32) * 3
        logits[trial % 4, 9] = [np.nan, -np.inf, 0.0][trial % 3]
        requests = []
        for _ in range(4):
            on = rng.random(5) < 0.5
            params = SamplingParams(
                repetition_penalty=float(rng.uniform(0.5, 2)) if on[0] else 1.0,
                presence_penalty=float(rng.uniform(-2, 2)) if on[1] else 0.0,
                frequency_penalty=float(rng.uniform(-2, 2)) if on[2] else 0.0,
                min_tokens=int(rng.integers(0, 6)) if on[3] else 0,
                logit_bias={int(i): float(rng.normal() * 5) for i in rng.integers(0, VOCAB, 6)} if on[4] else None,
            )
            lengths = rng.integers(1, 7, 2)
            requests.append((params, *(rng.integers(0, 12, n).tolist() for n in lengths)))
        found = _apply(logits, requests, rng.permutation(4).tolist())
        for row, (params, prompt, output) in enumerate(requests):
            expected = numpy_sampler.processed_logits(logits[row], params, prompt, output, STOP_IDS)
            np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5, err_msg=str(params))


def test_stop_ids_are_held_back_until_min_tokens() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    params = SamplingParams(min_tokens=2)
    found = _apply(logits, [(params, [1, 2], [3] * n) for n in range(4)])
    held = [np.flatnonzero(row == -np.inf).tolist() for row in found]
    assert held == [STOP_IDS, STOP_IDS, [], []]
    # A bias does not bring a held-back id in.
    found = _apply(logits, [(SamplingParams(min_tokens=1, logit_bias={2: 100.0}), [1], [])] * 4)
    assert found[0, 2] == -np.inf


def test_padding_of_the_lists_touches_nothing() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    found = _apply(logits, [(SamplingParams(logit_bias={0: 1.0}), [1], [])] + [(SamplingParams(), [1], [])] * 3)
    assert np.flatnonzero(found[0]).tolist() == [0]
    assert not found[1:].any()


def test_extreme_values_stay_numbers() -> None:
    big = float(np.finfo(np.float32).max)
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, :4] = [big, -big, -np.inf, 1.0]
    extreme = SamplingParams(logit_bias={0: 1e300, 1: -1e300, 2: 1e300, 3: 1e300}, repetition_penalty=1e-300)
    found = _apply(logits, [(extreme, [0, 1, 2, 3], [0])] * 4)
    assert not np.isnan(found).any()
    np.testing.assert_array_equal(found[0, :4], [big, -np.inf, -np.inf, big])
    np.testing.assert_array_equal(
        clean(jnp.array([np.nan, np.inf, -np.inf, 2.0, -0.0])), np.array([-np.inf, big, -np.inf, 2.0, -0.0], np.float32)
    )
