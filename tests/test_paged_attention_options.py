"""Scale, window, cap, sinks, causality and the edges of a batch, the implementations for CPUs, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages, paged_attention, write_kv

MIXED = {"seq_lens": [33, 0, 20, 7, 1, 150, 64], "query_lens": [1, 0, 20, 0, 1, 70, 2]}

each = pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])


@each
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"causal": False, "sinks": np.array([0.5, -30.0, 4.0, 90.0], np.float32)},
        {"soft_cap": 2.0, "sliding_window": 37, "sinks": np.array([1.0, 2, 3, 4], np.float32), "scale": 0.5},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(implementation: str, options: dict) -> None:
    if "sinks" in options:
        options = options | {"sinks": jnp.asarray(options["sinks"])}
    oracle.assert_close(oracle.make(5, **MIXED), implementation, **options)


@each
def test_windows_of_every_size_share_one_program(implementation: str) -> None:
    problem = oracle.make(6, **MIXED)
    traces = []

    @jax.jit
    def attend(arguments: tuple, window: jax.Array) -> jax.Array:
        traces.append(window)
        return paged_attention(*arguments, layer=problem.layer, sliding_window=window, implementation=implementation)

    for window in (1, 2, 15, 16, 17, 40, 128, 150, 2**31 - 1):
        expected, _ = problem.expected(sliding_window=window)
        out = attend(problem.arguments(), jnp.int32(window))
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5, err_msg=f"window {window}")
    assert len(traces) == 1


@each
@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_window_edges_in_decode_and_in_chunks(implementation: str, length: int) -> None:
    whole = oracle.make(length, [length], [length], block_size=4)
    expected, _ = whole.expected(sliding_window=4)
    out, _ = whole.run(implementation, sliding_window=4)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    q = np.roll(whole.q, 1 - length, axis=0)  # the last query first: the only one
    decode = whole.arguments(q=jnp.asarray(q, jnp.float32), query_start_loc=jnp.asarray([0] + [1] * 7))
    last = paged_attention(*decode, layer=1, sliding_window=4, implementation=implementation)
    np.testing.assert_allclose(last[0], expected[length - 1], rtol=2e-5, atol=2e-5)


@each
def test_scores_by_hand_the_cap_goes_on_before_the_mask(implementation: str) -> None:
    """Scores 2, 1, 3 of which the third is masked, cap 1; and 80, 60 with cap 50."""
    for scores, cap, weights in (
        ([2.0, 1.0, 3.0], 1.0, [0.550, 0.450, 0.0]),
        ([80.0, 60.0, 0.0], 50.0, [0.988, 0.012, 0.0]),
    ):
        k, v, q = np.zeros((3, 3, 1, 64), np.float32)
        k[:, 0, 0] = scores
        v[range(3), 0, range(3)] = 1
        q[:, 0, 0] = 1
        pages = write_kv(KVPages.zeros(1, 2, 4, 1, 64, jnp.float32), 0, *jnp.asarray([k, v]), jnp.asarray([4, 5, 6]))
        # Row 0 is the prefill of two tokens, row 1 the decode of the second.
        arguments = (jnp.asarray(q), pages, jnp.ones((2, 1), jnp.int32), jnp.asarray([2, 2]), jnp.asarray([0, 2, 3]))
        out = paged_attention(*arguments, layer=0, scale=1.0, soft_cap=cap, implementation=implementation)
        np.testing.assert_allclose(out[1:, 0, :3], [weights, weights], atol=6e-4)


@each
@pytest.mark.parametrize("length", [1, 127, 129, 192])
def test_equal_scores_give_the_mean_of_the_values_each_time(implementation: str, length: int) -> None:
    problem = oracle.make(length, [length], [length], num_tokens=192)
    arguments = problem.arguments(q=jnp.zeros((192, 4, 64)))
    runs = [
        paged_attention(*arguments, layer=1, causal=False, implementation=implementation, max_query_len=192)
        for _ in range(10)
    ]
    mean = np.repeat(problem.values[0].mean(0), 2, axis=0)
    np.testing.assert_allclose(runs[0][:length], np.broadcast_to(mean, (length, 4, 64)), rtol=2e-5, atol=2e-5)
    for again in runs[1:]:
        np.testing.assert_array_equal(again, runs[0])


@each
@pytest.mark.parametrize("part", ["k", "v"])
def test_nan_in_a_key_that_is_seen_shows(implementation: str, part: str) -> None:
    """Zero would be a wrong answer that looks like one."""
    problem = oracle.make(10, [9, 20], [1, 4])
    target = {"k": slice(0, 64), "v": slice(64, 128)}[part]
    pool = problem.kv_pages.pool.at[1, problem.block_tables[1, 0], 0, 3, target].set(jnp.nan)  # token 3, KV head 0
    out, _ = problem.run(implementation)
    arguments = problem.arguments(kv_pages=KVPages(pool))
    bad, lse = paged_attention(*arguments, layer=1, return_lse=True, implementation=implementation)
    assert np.isnan(bad[1:5, :2]).all()
    assert np.isnan(lse[1:5, :2]).all() == (part == "k")
    np.testing.assert_array_equal(bad[0], out[0])
    np.testing.assert_array_equal(bad[1:5, 2:], out[1:5, 2:])


@each
def test_tokens_past_the_last_row_give_zero(implementation: str) -> None:
    problem = oracle.make(7, [9, 6], [1, 4])
    out, lse = problem.run(implementation)
    assert not out[5:].any()
    np.testing.assert_array_equal(lse[5:], -np.inf)


@each
def test_a_query_without_a_visible_key_gives_zero_even_with_sinks(implementation: str) -> None:
    problem = oracle.make(8, [5, 0, 3, 2], [1, 1, 1, 4])
    q = jnp.asarray(problem.q, jnp.float32)
    arguments = problem.arguments(q=q.at[1].set(jnp.nan))
    for options in ({}, {"sinks": jnp.ones(4)}):
        out, lse = paged_attention(*arguments, layer=1, return_lse=True, implementation=implementation, **options)
        clean, _ = problem.run(implementation, **options)
        for token in (1, 3, 4):  # row 1, and the two queries of row 3 that stand before its keys
            assert not out[token].any()
            np.testing.assert_array_equal(lse[token], -np.inf)
        np.testing.assert_array_equal(np.delete(out, 1, 0), np.delete(clean, 1, 0))


@each
def test_without_tokens_there_is_nothing_to_do(implementation: str) -> None:
    problem = oracle.make(9, [5], [0], num_tokens=0)
    out, lse = problem.run(implementation)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
