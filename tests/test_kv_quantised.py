"""int8 and float8 pools: what is written comes back within half a step, and attention sees exactly what is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_pool
from quantised_pool import DTYPES, ERROR

from pallas_kernels import KVPages, copy_blocks, gather_kv, paged_attention, write_kv

MIXED = {"seq_lens": [33, 0, 20, 7, 1, 150, 64], "query_lens": [1, 0, 20, 0, 1, 70, 2]}
TOLERANCE = oracle.TOLERANCE["float32"]

dtypes = pytest.mark.parametrize("dtype", DTYPES)
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def draw(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal vectors whose sizes differ a lot from token to token and from head to head."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))


def written(dtype: str, k: Any, v: Any, head_dim: int = 64, num_heads: int = 2, block_size: int = 8) -> KVPages:
    """A poisoned pool of two layers and six blocks, with k and v in layer 1 from slot 11 on."""
    empty = quantised_pool.poisoned(KVPages.zeros(2, 6, block_size, num_heads, head_dim, dtype))
    return write_kv(empty, 1, jnp.asarray(k), jnp.asarray(v), 11 + jnp.arange(k.shape[0], dtype=jnp.int32))


def read(kv_pages: KVPages, count: int, layer: int = 1) -> tuple[np.ndarray, np.ndarray]:
    k, v = gather_kv(kv_pages, layer, jnp.arange(kv_pages.num_blocks), kv_pages.num_slots)
    return np.array(k)[11 : 11 + count], np.array(v)[11 : 11 + count]


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes(dtype: str, head_dim: int) -> None:
    pool = KVPages.zeros(3, 6, 8, 2, head_dim, dtype)
    assert pool.is_quantised
    assert pool.dtype == jnp.dtype(dtype)
    assert (pool.num_slots, pool.head_dim) == (48, head_dim)
    assert pool.nbytes == 3 * 48 * 2 * 2 * (head_dim + 4)
    assert pool.nbytes == sum(x.nbytes for x in jax.tree.leaves(pool))
    assert not KVPages.zeros(3, 6, 8, 2, head_dim, jnp.bfloat16).is_quantised


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_tokens_come_back_within_half_a_step(dtype: str, head_dim: int) -> None:
    k, v = draw((2, 20, 2, head_dim))
    got = read(written(dtype, k, v, head_dim), 20)
    for x, back in zip((k, v), got, strict=True):
        assert back.dtype == np.float32
        bound = ERROR[dtype] * np.abs(x).max(-1, keepdims=True)
        assert (np.abs(back - x) <= bound * (1 + 1e-5)).all()
        np.testing.assert_allclose(back, quantised_pool.round_trip(x, dtype), rtol=1e-6)


@dtypes
def test_the_largest_element_of_a_vector_is_kept(dtype: str) -> None:
    k, v = draw((2, 20, 2, 64))
    largest = np.abs(k).argmax(-1)[..., None]
    back, _ = read(written(dtype, k, v), 20)
    expected = np.take_along_axis(k, largest, -1)
    np.testing.assert_allclose(np.take_along_axis(back, largest, -1), expected, rtol=1e-6)


@dtypes
def test_int8_ties_go_to_even_and_bfloat16_tokens_are_quantised_in_float32(dtype: str) -> None:
    x = np.zeros((1, 2, 64), np.float32)
    x[..., :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]  # the scale is 1 in int8
    back, _ = read(written(dtype, jnp.asarray(x, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16)), 1)
    if dtype == "int8":
        np.testing.assert_array_equal(back[0, 0, :6], [127, 0, 2, 2, 0, -2])
    np.testing.assert_allclose(back, quantised_pool.round_trip(x, dtype), rtol=1e-6)


@dtypes
def test_vectors_of_zeros_and_of_subnormals_read_back_as_zeros(dtype: str) -> None:
    x = np.zeros((3, 2, 64), np.float32)
    x[1], x[2, 0, 5] = -0.0, 1e-39
    for back in read(written(dtype, x, x), 3):
        np.testing.assert_array_equal(back, 0)


@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_reads_back_as_nan_and_spoils_no_other(dtype: str, bad: float) -> None:
    k, v = draw((2, 4, 2, 64))
    k[2, 1, 7] = bad
    back_k, back_v = read(written(dtype, k, v), 4)
    assert np.isnan(back_k[2, 1]).all()
    back_k[2, 1] = 0
    assert np.isfinite(back_k).all()
    assert np.isfinite(back_v).all()


@dtypes
def test_dropped_slots_leave_values_and_scales_alone(dtype: str) -> None:
    before = written(dtype, *draw((2, 20, 2, 64)))
    x = jnp.ones((4, 2, 64))
    after = write_kv(before, 0, x, x, jnp.asarray([-1, before.num_slots, 2**31 - 1, -(2**31)], jnp.int32))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@dtypes
def test_a_token_changes_its_own_slot_only(dtype: str) -> None:
    k, v = draw((2, 20, 2, 64))
    new = draw((2, 1, 2, 64), seed=1)
    pool = written(dtype, k, v)
    other_layer = jax.tree.map(lambda x: np.asarray(x[0]).tobytes(), pool)
    pool = jax.jit(write_kv)(pool, 1, jnp.asarray(new[0]), jnp.asarray(new[1]), jnp.asarray([11 + 6], jnp.int32))
    k[6], v[6] = new[0, 0], new[1, 0]
    for x, back in zip((k, v), read(pool, 20), strict=True):
        np.testing.assert_allclose(back, quantised_pool.round_trip(x, dtype), rtol=1e-6)
    assert jax.tree.map(lambda x: np.asarray(x[0]).tobytes(), pool) == other_layer


@dtypes
def test_blocks_are_copied_with_their_scales(dtype: str) -> None:
    pool = written(dtype, *draw((2, 20, 2, 64)))
    copied = copy_blocks(pool, jnp.asarray([2, 1, 9]), jnp.asarray([4, 5, 0]))
    for got, want in zip(
        gather_kv(copied, 1, jnp.asarray([4]), 8), gather_kv(pool, 1, jnp.asarray([2]), 8), strict=True
    ):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)


@dtypes
def test_gather_is_zero_past_the_length_whatever_the_free_slots_hold(dtype: str) -> None:
    for x in gather_kv(written(dtype, *draw((2, 3, 2, 64))), 1, jnp.asarray([1, 3, 99]), 0):
        np.testing.assert_array_equal(x, 0)


def attend(
    problem: oracle.Problem, pool: KVPages, implementation: Any, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """out and LSE in float64 of float32 queries over `pool`."""
    arguments = problem.arguments(kv_pages=pool)
    out, lse = paged_attention(
        *arguments, layer=problem.layer, return_lse=True, implementation=implementation, **options
    )
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def stretched(**sizes: Any) -> oracle.Problem:
    """A random problem whose values are of another size than its keys, and whose heads differ."""
    problem = oracle.make(0, **MIXED, **sizes)
    heads = 1 + np.arange(problem.kv_pages.num_kv_heads)[:, None]
    return dataclasses.replace(problem, values=[3 * heads * x for x in problem.values])


@both
@pytest.mark.parametrize(
    ("dtype", "sizes", "options"),
    [
        ("int8", {}, {}),
        (
            "float8_e4m3fn",
            {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 128, "block_size": 8, "max_blocks": 24},
            {"sliding_window": 21, "soft_cap": 5.0},
        ),
    ],
)
def test_attention_is_that_of_the_stored_values(
    implementation: str, dtype: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    problem = stretched(**sizes)
    pool, stored = quantised_pool.quantise(problem, dtype)
    expected_out, expected_lse = stored.expected(**options)
    out, lse = attend(problem, pool, implementation, **options)
    np.testing.assert_allclose(out, expected_out, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, rtol=TOLERANCE, atol=TOLERANCE)


def test_bfloat16_queries_give_bfloat16() -> None:
    problem = stretched()
    pool, stored = quantised_pool.quantise(problem, "int8")
    q = jnp.asarray(problem.q, jnp.bfloat16)
    out = paged_attention(*problem.arguments(q=q, kv_pages=pool), layer=1, implementation="xla")
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.bfloat16
    rounded = dataclasses.replace(stored, q=np.asarray(q, np.float64))
    np.testing.assert_allclose(np.asarray(out, np.float64), rounded.expected()[0], rtol=2e-2, atol=2e-2)


def by_head(scales: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    apart = scales.reshape(*scales.shape[:3], 2, -1)  # [L, N, 2, H, B]
    return change(apart).reshape(scales.shape)


@both
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda s: jnp.where(jnp.isnan(s), s, 0.02), id="one scale for all"),
        pytest.param(lambda s: s[:, :, ::-1], id="K and V scales swapped"),
        pytest.param(lambda s: by_head(s, lambda x: x[:, :, :, ::-1]), id="heads swapped"),
        pytest.param(lambda s: by_head(s, lambda x: jnp.roll(x, 1, -1)), id="the neighbour token's"),
        pytest.param(lambda s: s[:, ::-1], id="another block's"),
    ],
)
def test_a_wrong_scale_shows(implementation: str, wrong: Callable[[jax.Array], jax.Array]) -> None:
    problem = stretched()
    pool, stored = quantised_pool.quantise(problem, "int8")
    assert pool.scales is not None
    out, lse = attend(problem, dataclasses.replace(pool, scales=wrong(pool.scales)), implementation)
    expected_out, expected_lse = stored.expected()
    assert not np.allclose(out, expected_out, rtol=1e-2, atol=1e-2)
    assert not np.allclose(lse, expected_lse, rtol=1e-2, atol=1e-2)


def test_a_token_that_was_not_finite_makes_what_sees_it_nan() -> None:
    problem = stretched()
    pool, _ = quantised_pool.quantise(problem, "int8")
    k, v = draw((2, 1, 2, 64))
    v[0, 1, 5] = np.inf
    last = quantised_pool.slots(problem)[[32]]  # of row 0, which decodes its last token
    out, _ = attend(problem, write_kv(pool, 1, jnp.asarray(k), jnp.asarray(v), jnp.asarray(last)), "xla")
    assert np.isnan(out[0, 2:]).all()  # the query heads of KV head 1
    assert np.isfinite(out[0, :2]).all()
    assert np.isfinite(out[1:]).all()


def test_float64_queries_are_refused_on_a_quantised_pool() -> None:
    problem = oracle.make(0, [5], [1])
    pool, _ = quantised_pool.quantise(problem, "int8")
    with jax.enable_x64(True), pytest.raises(ValueError, match="float64 goes with float64"):
        paged_attention(*problem.arguments(q=jnp.asarray(problem.q, jnp.float64), kv_pages=pool), layer=1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_pool_is_updated_in_place_through_a_scan_over_layers(head_dim: int) -> None:
    # float8 too on TPU and GPU; XLA for CPU has no float8 and works on a float16 copy of the pool.
    num_layers, tokens = 30, 8
    pool = jax.eval_shape(lambda: KVPages.zeros(num_layers, 64, 16, 2, head_dim, "int8"))

    def step(kv_pages: KVPages, x: jax.Array, slots: jax.Array, src: jax.Array, dst: jax.Array, count: Any) -> KVPages:
        kv_pages = copy_blocks(kv_pages, src, dst, count)

        def one_layer(kv_pages: KVPages, layer: jax.Array) -> tuple[KVPages, None]:
            return write_kv(kv_pages, layer, x, x, slots), None

        return jax.lax.scan(one_layer, kv_pages, jnp.arange(num_layers))[0]

    def i32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    x = jax.ShapeDtypeStruct((tokens, 2, head_dim), jnp.float32)
    shapes = (pool, x, i32(tokens), i32(4), i32(4), i32())
    memory = jax.jit(step, donate_argnums=0).lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 8
