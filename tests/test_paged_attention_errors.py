"""What `paged_attention` refuses, and what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_pool

from pallas_kernels import paged_attention


@pytest.fixture
def small() -> tuple:
    return oracle.make(11, [5, 3], [1, 3], num_rows=2, num_tokens=4).arguments()


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


@pytest.mark.parametrize(
    ("implementation", "dtype", "message"),
    [
        ("cpu", "float16", "'cpu': .*float16.*use \"xla\""),
        ("tpu", "float16", "'tpu': .*float16.*use \"xla\""),
        ("gpu", "float32", "'gpu': .*float32.*use \"xla\""),
    ],
)
def test_what_a_kernel_cannot_do_is_named(implementation: str, dtype: str, message: str) -> None:
    arguments = oracle.make(0, [5, 3], [1, 3], dtype=dtype).arguments()
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(*arguments, layer=0, implementation=implementation)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        ("float16", 64, "q in float16 over a pool in float16"),
        ("float64", 64, "q in float64 over a pool in float64"),
        ("int8", 64, "q in float32 over a pool in int8"),
        ("float8_e4m3fn", 64, "q in float32 over a pool in float8_e4m3fn"),
        ("float32", 66, "head_dim 66 is not a multiple"),
    ],
)
def test_where_the_kernel_for_cpus_cannot_xla_does(dtype: str, head_dim: int, message: str) -> None:
    quantised = dtype in quantised_pool.DTYPES
    with jax.enable_x64(dtype == "float64"):
        problem = oracle.make(1, [5, 3], [1, 3], head_dim=head_dim, dtype="float32" if quantised else dtype)
        pool = quantised_pool.quantise(problem, dtype)[0] if quantised else problem.kv_pages
        arguments = problem.arguments(kv_pages=pool)
        with pytest.raises(NotImplementedError, match=message):
            paged_attention(*arguments, layer=1, implementation="cpu")
        default, xla = (paged_attention(*arguments, layer=1, implementation=name) for name in (None, "xla"))
    assert np.asarray(xla).any()
    np.testing.assert_array_equal(default, xla)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_for_cpus_is_the_default_there(dtype: str) -> None:
    arguments = oracle.make(2, [5, 3], [1, 3], dtype=dtype).arguments()
    default, cpu = (
        jax.make_jaxpr(lambda *x, name=name: paged_attention(*x, layer=1, implementation=name))(*arguments)
        for name in (None, "cpu")
    )
    assert "pagedjax_attention_64" in str(default)
    assert str(default) == str(cpu)
