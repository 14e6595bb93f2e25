"""The implementations for CPUs against the oracle: head counts, head sizes, block sizes and dtypes.

Every problem has NaN in the slots that hold no token and wild ids in the table's padding.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import gather_kv, paged_attention

IMPLEMENTATIONS = ("reference", "xla", "cpu")
ANY_DTYPE = ("reference", "xla")
HEADS = [(9, 3), (14, 2), (4, 1), (8, 8)]
HEAD_DIMS = [64, 80, 96, 128, 256]
BLOCK_SIZES = [8, 16, 32, 64]
# Decode, empty, whole and chunked prefill, a row without queries: every kind between neighbours of another.
MIXED = {"seq_lens": [33, 0, 20, 7, 1, 150, 64], "query_lens": [1, 0, 20, 0, 1, 70, 2]}

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def check(implementation: str | None, heads: tuple[int, int], head_dim: int, block_size: int, dtype: str) -> None:
    problem = oracle.make(
        0,
        **MIXED,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        max_blocks=-(-192 // block_size),
        dtype=dtype,
    )
    if dtype == "float16" and implementation == "cpu":
        implementation = None  # the kernel refuses it; this is what a CPU takes instead
    oracle.assert_close(problem, implementation)


@each
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype"),
    [
        ((9, 3), 80, 8, "float32"),
        ((14, 2), 96, 32, "float32"),
        ((4, 1), 256, 64, "float32"),
        ((8, 8), 128, 16, "float16"),
        ((9, 3), 64, 16, "bfloat16"),
    ],
)
def test_shapes(implementation: str, heads: tuple[int, int], head_dim: int, block_size: int, dtype: str) -> None:
    check(implementation, heads, head_dim, block_size, dtype)


@pytest.mark.slow
@each
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype"),
    [
        *((*shape, "float32") for shape in itertools.product(HEADS, HEAD_DIMS, BLOCK_SIZES)),
        *(((9, 3), head_dim, 16, dtype) for head_dim in HEAD_DIMS for dtype in ("bfloat16", "float16")),
        ((2, 1), 64, 256, "float32"),
    ],
)
def test_all_shapes(implementation: str, heads: tuple[int, int], head_dim: int, block_size: int, dtype: str) -> None:
    check(implementation, heads, head_dim, block_size, dtype)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        problem = oracle.make(4, **MIXED, dtype="float64")
        expected_out, expected_lse = problem.expected()
        for implementation in (*ANY_DTYPE, None):
            out, lse = problem.run(implementation)
            np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_a_pool_may_be_narrower_than_the_queries() -> None:
    problem = oracle.make(10, **MIXED, dtype="bfloat16")
    q = jnp.asarray(problem.q, jnp.float32)
    outs = [
        paged_attention(*problem.arguments(q=q), layer=1, implementation=implementation)
        for implementation in IMPLEMENTATIONS
    ]
    for out in outs:
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, outs[0], rtol=2e-5, atol=2e-5)


def test_the_problems_themselves_are_paged_as_drawn() -> None:
    problem = oracle.make(12, [20, 7], [1, 1])
    for row, seq_len in enumerate(problem.seq_lens):
        k, v = gather_kv(problem.kv_pages, 1, jnp.asarray(problem.block_tables[row]), seq_len)
        np.testing.assert_array_equal(k[:seq_len], problem.keys[row].astype(np.float32))
        np.testing.assert_array_equal(v[:seq_len], problem.values[row].astype(np.float32))
