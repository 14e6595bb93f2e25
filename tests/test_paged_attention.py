"""Both implementations against the oracle: dtypes, heads, sizes, windows, caps, sinks; and what is refused.

Every problem has NaN in the slots that hold no token and wild ids in the table's padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages, gather_kv, paged_attention, write_kv

IMPLEMENTATIONS = ("reference", "xla")
# Decode, empty, whole and chunked prefill, a row without queries: every kind between neighbours of another.
MIXED = {"seq_lens": [33, 0, 20, 7, 1, 150, 64], "query_lens": [1, 0, 20, 0, 1, 70, 2]}

both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@both
@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (4, 1), (8, 8)])
def test_head_counts(implementation: str, heads: tuple[int, int]) -> None:
    problem = oracle.make(0, **MIXED, num_q_heads=heads[0], num_kv_heads=heads[1])
    oracle.assert_close(problem, implementation)


@both
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_dims(implementation: str, head_dim: int) -> None:
    oracle.assert_close(oracle.make(1, **MIXED, head_dim=head_dim), implementation)


@both
@pytest.mark.parametrize("block_size", [8, 32, 64, 256])
def test_block_sizes(implementation: str, block_size: int) -> None:
    problem = oracle.make(2, **MIXED, block_size=block_size, max_blocks=20)
    oracle.assert_close(problem, implementation)


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_narrow_dtypes(implementation: str, dtype: str, head_dim: int) -> None:
    oracle.assert_close(oracle.make(3, **MIXED, dtype=dtype, head_dim=head_dim), implementation)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        problem = oracle.make(4, **MIXED, dtype="float64")
        for implementation in IMPLEMENTATIONS:
            out, lse = problem.run(implementation)
            expected_out, expected_lse = problem.expected()
            np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


@both
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"soft_cap": 0.7},
        {"sinks": np.array([0.5, -30.0, 4.0, 90.0], np.float32)},
        {"causal": False},
        {"soft_cap": 2.0, "sliding_window": 37, "sinks": np.array([1.0, 2, 3, 4], np.float32), "scale": 0.5},
        {"causal": False, "sinks": np.array([1.0, 2, 3, 4], np.float32)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(implementation: str, options: dict) -> None:
    if "sinks" in options:
        options = options | {"sinks": jnp.asarray(options["sinks"])}
    oracle.assert_close(oracle.make(5, **MIXED), implementation, **options)


@both
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


@both
@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_window_edges_in_decode_and_in_chunks(implementation: str, length: int) -> None:
    whole = oracle.make(length, [length], [length], block_size=4, max_blocks=4, spare_tokens=9 - length)
    expected, _ = whole.expected(sliding_window=4)
    out, _ = whole.run(implementation, sliding_window=4)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    decode = whole.arguments(q=jnp.asarray(whole.q[length - 1 : length], jnp.float32), query_start_loc=jnp.array([0, 1]))
    last = paged_attention(*decode, layer=1, sliding_window=4, implementation=implementation)
    np.testing.assert_allclose(last[0], expected[length - 1], rtol=2e-5, atol=2e-5)


@both
def test_scores_by_hand_the_cap_goes_on_before_the_mask(implementation: str) -> None:
    """Scores 2, 1, 3 of which the third is masked, cap 1; and 80, 60 with cap 50."""
    for scores, cap, weights in (
        ([2.0, 1.0, 3.0], 1.0, [0.550, 0.450, 0.0]),
        ([80.0, 60.0, 0.0], 50.0, [0.988, 0.012, 0.0]),
    ):
        k = jnp.zeros((3, 1, 64)).at[:, 0, 0].set(jnp.asarray(scores))
        v = jnp.zeros((3, 1, 64)).at[jnp.arange(3), 0, jnp.arange(3)].set(1.0)
        pages = write_kv(KVPages.zeros(1, 2, 4, 1, 64, jnp.float32), 0, k, v, jnp.asarray([4, 5, 6]))
        q = jnp.zeros((3, 1, 64)).at[:, 0, 0].set(1.0)
        options = {"layer": 0, "scale": 1.0, "soft_cap": cap, "implementation": implementation}
        chunk = paged_attention(q, pages, jnp.asarray([[1]]), jnp.asarray([3]), jnp.asarray([0, 3]), **options)
        decode = paged_attention(q[:1], pages, jnp.asarray([[1]]), jnp.asarray([2]), jnp.asarray([0, 1]), **options)
        np.testing.assert_allclose(chunk[1, 0, :3], weights, atol=6e-4)
        np.testing.assert_allclose(decode[0, 0, :3], weights, atol=6e-4)


@both
@pytest.mark.parametrize("length", [1, 127, 129, 192])
def test_equal_scores_give_the_mean_of_the_values_each_time(implementation: str, length: int) -> None:
    problem = oracle.make(length, [length], [length], spare_tokens=192 - length)
    arguments = problem.arguments(q=jnp.zeros((192, 4, 64)))
    runs = [
        paged_attention(*arguments, layer=1, causal=False, implementation=implementation, max_query_len=192)
        for _ in range(10)
    ]
    mean = np.repeat(problem.values[0].mean(0), 2, axis=0)
    np.testing.assert_allclose(runs[0][:length], np.broadcast_to(mean, (length, 4, 64)), rtol=2e-5, atol=2e-5)
    for again in runs[1:]:
        np.testing.assert_array_equal(again, runs[0])


@both
def test_tokens_past_the_last_row_give_zero(implementation: str) -> None:
    problem = oracle.make(7, [9, 6], [1, 4], spare_tokens=5)
    out, lse = problem.run(implementation)
    assert not out[5:].any()
    np.testing.assert_array_equal(lse[5:], -np.inf)


@both
def test_a_query_without_a_visible_key_gives_zero_even_with_sinks(implementation: str) -> None:
    problem = oracle.make(8, [5, 0, 3, 2], [1, 1, 1, 4])
    q = jnp.asarray(problem.q, jnp.float32)
    arguments = problem.arguments(q=q.at[1].set(jnp.nan))
    for options in ({}, {"sinks": jnp.ones(4)}):
        out, lse = paged_attention(
            *arguments, layer=1, return_lse=True, implementation=implementation, **options
        )
        clean, _ = problem.run(implementation, **options)
        for token in (1, 3, 4):  # row 1, and the two queries of row 3 that stand before its keys
            assert not out[token].any()
            np.testing.assert_array_equal(lse[token], -np.inf)
        np.testing.assert_array_equal(np.delete(out, 1, 0), np.delete(clean, 1, 0))


@both
def test_without_tokens_there_is_nothing_to_do(implementation: str) -> None:
    problem = oracle.make(9, [5], [0], spare_tokens=0)
    out, lse = problem.run(implementation)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_a_pool_may_be_narrower_than_the_queries() -> None:
    problem = oracle.make(10, **MIXED, dtype="bfloat16")
    q = jnp.asarray(problem.q, jnp.float32)
    outs = [
        paged_attention(*problem.arguments(q=q), layer=1, implementation=implementation)
        for implementation in IMPLEMENTATIONS
    ]
    assert outs[0].dtype == outs[1].dtype == jnp.float32
    np.testing.assert_allclose(*outs, rtol=2e-5, atol=2e-5)


@pytest.fixture
def small() -> tuple:
    return oracle.make(11, [5, 3], [1, 3], spare_tokens=0).arguments()


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (0, 2)])
def test_head_counts_that_do_not_divide_are_refused(small: tuple, heads: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{heads[0]} heads.*{heads[1]} KV heads"):
        paged_attention(jnp.ones((4, heads[0], 64)), *small[1:], layer=0)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, jnp.ones((4, 4)), r"\[num_tokens, num_q_heads, head_dim\]"),
        (0, jnp.ones((4, 4, 32)), "head_dim, 64"),
        (0, jnp.ones((4, 4, 64), jnp.int32), "floating"),
        (2, jnp.ones((3, 12), jnp.int32), "block_tables"),
        (2, jnp.ones(2, jnp.int32), "block_tables"),
        (2, jnp.ones((2, 12)), "block_tables.*int32"),
        (3, jnp.ones((2, 1), jnp.int32), "seq_lens"),
        (3, jnp.ones(2), "seq_lens.*int32"),
        (4, jnp.zeros(2, jnp.int32), r"query_start_loc.*\[3\]"),
        (4, jnp.zeros(3), "query_start_loc.*int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(small: tuple, position: int, value: jax.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(*small[:position], value, *small[position + 1 :], layer=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 2}, "layer is 2.*0 to 1"),
        ({"layer": -1}, "layer is -1"),
        ({"soft_cap": 0.0}, "soft_cap is 0"),
        ({"soft_cap": -1}, "soft_cap is -1"),
        ({"soft_cap": float("nan")}, "soft_cap is nan"),
        ({"soft_cap": float("inf")}, "soft_cap is inf"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": 4, "causal": False}, "causal=False"),
        ({"max_query_len": 0}, "max_query_len is 0"),
        ({"implementation": "triton"}, "'triton' is unknown.*reference"),
        ({"sinks": jnp.ones(3)}, r"sinks.*float32\[4\]"),
        ({"sinks": jnp.ones(4, jnp.int32)}, "sinks is int32"),
    ],
)
def test_options_out_of_range_are_refused(small: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(*small, **({"layer": 0} | options))


def test_a_traced_soft_cap_is_refused(small: tuple) -> None:
    with pytest.raises(ValueError, match="soft_cap is an array"):
        jax.jit(lambda cap: paged_attention(*small, layer=0, soft_cap=cap))(1.0)


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_kernels_that_do_not_exist_yet_say_so(small: tuple, implementation: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{implementation!r}.*not written yet"):
        paged_attention(*small, layer=0, implementation=implementation)


def test_the_problems_themselves_are_paged_as_drawn() -> None:
    problem = oracle.make(12, [20, 7], [1, 1])
    for row, seq_len in enumerate(problem.seq_lens):
        k, v = gather_kv(problem.kv_pages, 1, jnp.asarray(problem.block_tables[row]), seq_len)
        np.testing.assert_array_equal(k[:seq_len], problem.keys[row].astype(np.float32))
        np.testing.assert_array_equal(v[:seq_len], problem.values[row].astype(np.float32))
