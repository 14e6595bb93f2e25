"""Gradients through the forward pass of the Pallas kernels, interpreted: those that jax finds for the reference.

The kernels hand the backward pass no more than out and the LSE; `test_backward` has its cases.
"""

from __future__ import annotations

import functools
from typing import Any

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages, paged_attention

TOLERANCE = {"tpu": 3e-5, "gpu": 3e-2}  # of the largest gradient
SINKS = np.array([0.5, -3.0, 2.0, 1.0], np.float32)
Gradients = tuple[jax.Array, KVPages, jax.Array, jax.Array]  # of q, the pool, scale and sinks


@functools.partial(
    jax.jit, static_argnames=("implementation", "interpret", "max_query_len"), compiler_options=interpreted.QUICKLY
)
def pull(
    inputs: tuple, tables: tuple, cotangents: tuple, *, implementation: Any, interpret: Any, max_query_len: int
) -> Gradients:
    def attend(q: jax.Array, pool: KVPages, scale: jax.Array, sinks: jax.Array) -> Any:
        return paged_attention(
            q,
            pool,
            *tables,
            layer=1,
            scale=scale,
            sinks=sinks,
            sliding_window=jnp.int32(40),
            soft_cap=2.0,
            max_query_len=max_query_len,
            return_lse=True,
            implementation=implementation,
            interpret=interpret,
        )

    (out, lse), pull_back = jax.vjp(attend, *inputs)
    return pull_back((cotangents[0].astype(out.dtype), cotangents[1].astype(lse.dtype)))


def check(problem: oracle.Problem, kernel: str) -> None:
    """Of q, scale, sinks and each slot of the pool, for random cotangents of out and LSE."""
    q, pool, *tables = problem.arguments()
    rng = np.random.default_rng(1)
    rest = (tuple(tables), (rng.standard_normal(q.shape), rng.standard_normal(q.shape[:2])))
    options = {"interpret": interpreted.PARAMS[kernel], "max_query_len": max(problem.query_lens)}
    found = pull((q, pool, np.float32(0.3), SINKS), *rest, implementation=kernel, **options)
    interpreted.assert_no_race(kernel)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (q, pool))
    expected = pull((*exact, np.float32(0.3), SINKS), *rest, implementation="reference", **options)
    assert (found[0].dtype, found[1].dtype) == (q.dtype, pool.dtype)
    for name, got, want in zip(("q", "pool", "scale", "sinks"), found, expected, strict=True):
        got, want = (np.asarray(jax.tree.leaves(x)[0], np.float64) for x in (got, want))
        bound = TOLERANCE[kernel] * np.abs(want).max()
        assert bound > 0
        np.testing.assert_allclose(got, want, rtol=TOLERANCE[kernel], atol=bound, err_msg=name)
        np.testing.assert_array_equal(got[want == 0], 0)


@pytest.mark.parametrize("kernel", interpreted.KERNELS)
def test_decode(kernel: str) -> None:
    """K and V side by side in the pool."""
    check(interpreted.make(kernel, 30, [33, 0, 9, 70], [1, 0, 1, 1], num_tokens=4), kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", interpreted.KERNELS)
def test_rows_of_several_queries(kernel: str) -> None:
    """K and V apart; all of it in the decode kernel."""
    check(interpreted.make(kernel, 31, [33, 0, 9, 70], [1, 0, 4, 8], head_dim=128, num_tokens=15), kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", interpreted.KERNELS)
def test_decode_and_prefill(kernel: str) -> None:
    check(interpreted.make(kernel, 32, [33, 0, 12, 70], [1, 0, 9, 5]), kernel)
