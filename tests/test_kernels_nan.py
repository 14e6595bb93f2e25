"""NaN through the Pallas kernels: what a query does not see has no effect, what it sees shows.

A zero in the place of a NaN would be a wrong answer that looks like one.
"""

from __future__ import annotations

import interpreted
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages

# A decode row, one without anything, a whole prompt, a chunk of one: rows of the decode kernel and of the prefill's.
SEQ_LENS, QUERY_LENS = [33, 0, 12, 70], [1, 0, 9, 5]
DECODE, CHUNK = slice(0, 1), slice(10, 15)
KEY = {0: 32, 3: 20}  # of a row: a key that all of its queries see

# NumPy's matrix product, which the GPU's interpreter uses, may warn of a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

Result = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module", params=interpreted.KERNELS)
def case(request: pytest.FixtureRequest) -> tuple[str, oracle.Problem, Result]:
    """A kernel, a problem whose free slots and blocks are NaN, and its result."""
    problem = interpreted.make(request.param, 20, SEQ_LENS, QUERY_LENS)
    return request.param, problem, interpreted.run(problem, request.param)


def with_nan(problem: oracle.Problem, row: int, key: int, part: str) -> tuple:
    """The arguments with NaN in K or V of one token, in KV head 0; in K it is one element alone."""
    block_size, head_dim = problem.kv_pages.block_size, problem.kv_pages.head_dim
    block = problem.block_tables[row, key // block_size]
    where = (problem.layer, block, 0, key % block_size, 5 if part == "k" else slice(head_dim, None))
    assert problem.kv_pages.kv_on_lanes
    return problem.arguments(kv_pages=KVPages(problem.kv_pages.pool.at[where].set(jnp.nan)))


def test_what_is_not_seen_has_no_effect(case: tuple[str, oracle.Problem, Result]) -> None:
    """NaN in free blocks, in the null block and after a row's last token, against zeros there."""
    kernel, _, result = case
    clean = interpreted.make(kernel, 20, SEQ_LENS, QUERY_LENS, fill=0.0, padding=0)
    for got, want in zip(result, interpreted.run(clean, kernel), strict=True):
        assert not np.isnan(want).any()
        np.testing.assert_array_equal(got, want)
    expected = clean.expected()
    tolerance = oracle.TOLERANCE[interpreted.SIZES[kernel]["dtype"]]
    np.testing.assert_allclose(result[0], expected[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize(("row", "tokens"), [(0, DECODE), (3, CHUNK)], ids=["decode", "chunk"])
def test_what_is_seen_shows(case: tuple[str, oracle.Problem, Result], row: int, tokens: slice, part: str) -> None:
    """In the row's queries, in the heads of its KV head, and nowhere else."""
    kernel, problem, (out, lse) = case
    bad_out, bad_lse = interpreted.attend(with_nan(problem, row, KEY[row], part), kernel, layer=problem.layer)
    heads = slice(problem.q.shape[1] // problem.kv_pages.num_kv_heads)  # of KV head 0
    expected_out, expected_lse = out.copy(), lse.copy()
    expected_out[tokens, heads] = np.nan
    # On the TPU's lanes K and V side by side meet q in one product, which has zeros for V: 0 * NaN is NaN.
    if part == "k" or kernel == "tpu":
        expected_lse[tokens, heads] = np.nan
    np.testing.assert_array_equal(bad_out, expected_out)
    np.testing.assert_array_equal(bad_lse, expected_lse)


def test_a_query_before_a_key_does_not_see_its_nan(case: tuple[str, oracle.Problem, Result]) -> None:
    """The chunk's third query is the first to see it; those before it keep every bit."""
    kernel, problem, (out, lse) = case
    third = SEQ_LENS[3] - QUERY_LENS[3] + 2
    bad_out, bad_lse = interpreted.attend(with_nan(problem, 3, third, "k"), kernel, layer=problem.layer)
    before, rest = slice(CHUNK.start, CHUNK.start + 2), slice(CHUNK.start + 2, CHUNK.stop)
    np.testing.assert_array_equal(bad_out[before], out[before])
    np.testing.assert_array_equal(bad_lse[before], lse[before])
    assert np.isnan(bad_lse[rest, 0]).all()
    assert np.isnan(bad_out[rest, 0]).all()
