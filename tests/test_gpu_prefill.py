"""The Hopper prefill kernel in the GPU interpreter, with race detection, against the oracle.

What the interpreter cannot show: how operands lie in shared memory (tiling, swizzle), register layouts, that the matrix
unit is asynchronous (a slot given back before its product was done), that shared memory written by threads must be
committed before the matrix unit or a copy reads it, and the approximate exp2 and log. Weights go through shared memory
there and through registers on the chip. `test_gpu_compiles` compiles the kernel at real shapes.

A launch takes seconds, so a few launches serve all tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_interpreter
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_pool

from pallas_kernels._gpu.prefill import attend_prefill

OTHERS_OUT, OTHERS_LSE = 7.0, 3.0  # of tokens that are not prefill's: to be left alone

SIZES: dict[str, Any] = {
    "num_q_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 64,
    "block_size": 32,
    "dtype": "bfloat16",
    "max_blocks": 6,
    "num_blocks": 12,
    "num_rows": 4,
    "num_tokens": 34,
}
# A chunk of two tiles of queries that continues a context of two tiles of keys, a whole prompt, a decode row, and a
# row with queries before its first key.
LONG, PROMPT, DECODE, EARLY = range(4)
SEQ_LENS, QUERY_LENS = [150, 9, 37, 3], [18, 9, 1, 5]
PROMPT_END = sum(QUERY_LENS[: PROMPT + 1])
CHUNK = 5  # the last tokens of the prompt

Result = tuple[np.ndarray, np.ndarray]


def attend(
    problem: oracle.Problem,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    causal: bool = True,
) -> Result:
    """out and LSE of the kernel, OTHERS_OUT and OTHERS_LSE where it wrote nothing."""
    q = jnp.asarray(problem.q, jnp.bfloat16)
    out, lse = attend_prefill(
        q,
        *problem.arguments()[1:],
        jnp.int32(problem.layer),
        jnp.float32(q.shape[-1] ** -0.5 if scale is None else scale),
        None if sliding_window is None else jnp.int32(sliding_window),
        None if sinks is None else jnp.asarray(sinks, jnp.float32),
        jnp.full_like(q, OTHERS_OUT),
        jnp.full(q.shape[:2], OTHERS_LSE),
        soft_cap=soft_cap,
        causal=causal,
        max_query_len=q.shape[0],
        interpret=gpu_interpreter.PARAMS,
    )
    result = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    gpu_interpreter.assert_no_race()
    return result


def assert_close(problem: oracle.Problem, result: Result, **options: Any) -> None:
    out, lse = problem.expected(**options)
    lengths = np.array(problem.query_lens)
    own = np.repeat((lengths > 1) & (problem.seq_lens > 0), lengths)
    own = np.pad(own, (0, len(out) - len(own)))
    out[~own], lse[~own] = OTHERS_OUT, OTHERS_LSE
    np.testing.assert_allclose(result[0], out, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(result[1], lse, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def problem() -> oracle.Problem:
    return oracle.make(0, SEQ_LENS, QUERY_LENS, **SIZES)


@pytest.fixture(scope="module")
def result(problem: oracle.Problem) -> Result:
    return attend(problem)


@pytest.fixture(scope="module")
def rearranged() -> Result:
    """The end of the prompt, a row without anything, and the long row; the junk is 0 and the padding the null block."""
    problem = oracle.make(0, SEQ_LENS, QUERY_LENS, **SIZES, fill=0.0, padding=0)
    rows, query_lens = [PROMPT, DECODE, LONG, DECODE], [CHUNK, 0, QUERY_LENS[LONG], 0]
    tokens = [*range(PROMPT_END - CHUNK, PROMPT_END), *range(QUERY_LENS[LONG])]
    q = np.concatenate([problem.q[tokens], problem.q[len(tokens) :]])
    keys, values = ([x[row] for row in rows] for x in (problem.keys, problem.values))
    keys[1] = values[1] = keys[1][:0]
    tables = problem.block_tables[rows]
    changes = {"q": q, "keys": keys, "values": values, "block_tables": tables, "query_lens": query_lens}
    return attend(dataclasses.replace(problem, **changes))


def test_rows_of_every_kind(problem: oracle.Problem, result: Result) -> None:
    assert_close(problem, result)


def test_neither_batch_mates_nor_junk_in_free_slots_change_a_row(result: Result, rearranged: Result) -> None:
    for x, y in zip(result, rearranged, strict=True):
        np.testing.assert_array_equal(x[: QUERY_LENS[LONG]], y[CHUNK : CHUNK + QUERY_LENS[LONG]])


def test_the_last_chunk_of_a_prompt_equals_the_prompt_in_one(result: Result, rearranged: Result) -> None:
    # Not bitwise here: NumPy's matrix product depends on where in a tile a query is.
    (out, lse), (chunk_out, chunk_lse) = result, rearranged
    np.testing.assert_allclose(chunk_lse[:CHUNK], lse[PROMPT_END - CHUNK : PROMPT_END], rtol=1e-6)
    np.testing.assert_allclose(chunk_out[:CHUNK], out[PROMPT_END - CHUNK : PROMPT_END], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("window", [7, pytest.param(100, marks=pytest.mark.slow)])
def test_all_options_and_blocks_freed_before_the_window(window: int) -> None:
    problem = oracle.make(1, SEQ_LENS, QUERY_LENS, **SIZES, layer=window % 2)
    tables = problem.block_tables.copy()
    first_key = SEQ_LENS[LONG] - QUERY_LENS[LONG] - window + 1
    tables[LONG, : first_key // SIZES["block_size"]] = 2**30
    options = {"scale": -0.2, "sliding_window": window, "soft_cap": 3.0, "sinks": np.linspace(-3, 40, 8)}
    assert_close(problem, attend(dataclasses.replace(problem, block_tables=tables), **options), **options)


@pytest.mark.parametrize(
    ("causal", "sizes"),
    [
        (False, {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 80, "block_size": 8, "max_blocks": 8}),
        (True, {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 256, "block_size": 128, "max_blocks": 2}),
    ],
    ids=[
        "not causal, odd group, head_dim 80, block_size 8",
        "two heads, head_dim 256, block_size 128, slots used again",
    ],
)
def test_shapes(causal: bool, sizes: dict[str, Any]) -> None:
    sizes = SIZES | sizes | {"num_rows": 1, "num_tokens": 18}
    problem = oracle.make(3, [sizes["block_size"] * sizes["max_blocks"] - 11], [17], **sizes)
    assert_close(problem, attend(problem, causal=causal), causal=causal)


@pytest.mark.parametrize("dtype", quantised_pool.DTYPES)
def test_quantised_pools(dtype: str) -> None:
    sizes = SIZES | {"num_rows": 1, "num_tokens": 16, "num_q_heads": 2, "head_dim": 128, "block_size": 16}
    sizes["dtype"] = "float32"  # of what is quantised
    problem = oracle.make(4, [90], [12], **sizes)
    q = np.asarray(jnp.asarray(problem.q, jnp.bfloat16), np.float64)
    pool, problem = quantised_pool.quantise(dataclasses.replace(problem, q=q), dtype)
    assert_close(problem, attend(dataclasses.replace(problem, kv_pages=pool)))


@pytest.mark.slow
def test_the_last_query_of_a_prefill_equals_decode() -> None:
    problem = oracle.make(5, [70, 70], [9, 1], **SIZES | {"num_rows": 2, "num_tokens": 16, "max_blocks": 3})
    q = problem.q.copy()
    q[9] = q[8]
    twins = {"keys": problem.keys[:1] * 2, "values": problem.values[:1] * 2, "q": q}
    problem = dataclasses.replace(problem, block_tables=problem.block_tables[[0, 0]], **twins)
    out, lse = problem.run("gpu", interpret=gpu_interpreter.PARAMS)
    gpu_interpreter.assert_no_race()
    expected_out, expected_lse = problem.expected()
    np.testing.assert_allclose(out, expected_out, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out[9], out[8], rtol=1e-2, atol=1e-2)
