"""The Hopper decode kernel in the GPU interpreter, with race detection, against the oracle.

What the interpreter cannot show: how operands lie in shared memory (tiling, swizzle) and registers hold values; that
the matrix unit is asynchronous, and what it reads (no race is found where a stage of the ring is given back before its
product has ended, or where weights are not committed before it reads them); a copy from a block that does not exist (it
brings zeros, as on the chip); approximate exp2 and division; copies of scales that are longer than a block. Those are
read by eye; the last has a test of its arithmetic. `test_gpu_compiles` compiles real shapes.

A launch takes seconds, so a few launches serve all tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_pool

from pallas_kernels import KVPages, _gpu, copy_blocks, paged_attention
from pallas_kernels._gpu import split
from pallas_kernels._gpu.decode_plan import LEAST_SCALES, Plan
from pallas_kernels._gpu.split import END_TILE, FIRST_TILE, ROW, SPLIT, TILE

SIZES: dict[str, Any] = {
    "num_q_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "block_size": 32,
    "dtype": "bfloat16",
    "max_blocks": 12,
    "num_blocks": 24,
    "num_rows": 4,
    "num_tokens": 5,
}
# Two splits, no key at all, less than a block, and a tile and a bit.
LONG, EMPTY, SHORT, MIDDLE = range(4)
SEQ_LENS = [300, 0, 7, 65]

list_work = jax.jit(split.list_work, static_argnums=3)

Result = tuple[np.ndarray, np.ndarray]


def attend(problem: oracle.Problem, **options: Any) -> Result:
    options = {"max_query_len": max(problem.query_lens)} | options
    result = problem.run("gpu", interpret=gpu_interpreter.PARAMS, **options)
    gpu_interpreter.assert_no_race()
    return result


def assert_close(problem: oracle.Problem, **options: Any) -> Result:
    result = attend(problem, **options)
    out, lse = problem.expected(**options)
    np.testing.assert_allclose(result[0], out, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(result[1], lse, rtol=2e-5, atol=2e-5)
    return result


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def problem() -> oracle.Problem:
    return oracle.make(0, SEQ_LENS, [1, 1, 1, 1], **SIZES)


@pytest.fixture(scope="module")
def result(problem: oracle.Problem) -> Result:
    return assert_close(problem)


def test_blocks_batch_mates_and_junk_do_not_change_a_row(problem: oracle.Problem, result: Result) -> None:
    """The same rows in another order, one of them gone, every block elsewhere, zeros where there was NaN."""
    num_blocks = problem.kv_pages.num_blocks
    clean = oracle.make(0, SEQ_LENS, [1, 1, 1, 1], **SIZES, fill=0.0, padding=0)
    moved_to = np.roll(np.arange(1, num_blocks), 7)
    moved_to = np.concatenate([[0], moved_to]).astype(np.int32)
    doubled = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x), x], axis=1), clean.kv_pages)
    doubled = copy_blocks(doubled, jnp.arange(num_blocks) + num_blocks, jnp.asarray(moved_to))
    pages = jax.tree.map(lambda x: x[:, :num_blocks], doubled)
    rows = [MIDDLE, EMPTY, LONG, EMPTY]
    q = np.concatenate([problem.q[[MIDDLE, EMPTY, LONG]], problem.q[3:]])
    keys, values = ([x[row] for row in rows] for x in (problem.keys, problem.values))
    tables = moved_to[clean.block_tables[rows]]
    moved = oracle.Problem(q, keys, values, [1, 1, 1, 0], pages, tables, problem.layer)
    for x, y in zip(attend(moved, max_query_len=1), result, strict=True):
        np.testing.assert_array_equal(x[:3], y[[MIDDLE, EMPTY, LONG]])
        np.testing.assert_array_equal(x[3:], y[[EMPTY, EMPTY]])


@pytest.mark.parametrize("window", [40, pytest.param(2**30, marks=pytest.mark.slow)])
def test_all_options_and_blocks_freed_before_the_window(window: int) -> None:
    problem = oracle.make(1, SEQ_LENS, [1, 1, 1, 1], **SIZES, layer=window % 2)
    tables = problem.block_tables.copy()
    tables[LONG, : max(0, SEQ_LENS[LONG] - window) // SIZES["block_size"]] = 2**30
    options = {"scale": -0.2, "sliding_window": window, "soft_cap": 3.0, "sinks": np.array([-3.0, 0, 4, 40])}
    assert_close(dataclasses.replace(problem, block_tables=tables), **options)


def test_several_queries_a_row() -> None:
    """A speculative step: three queries, one, none, and two of which the first stands before its only key."""
    sizes = {"num_tokens": 7, "num_q_heads": 6, "num_kv_heads": 2, "max_blocks": 3, "head_dim": 96, "dtype": "float16"}
    assert_close(oracle.make(2, [70, 40, 33, 1], [3, 1, 0, 2], **SIZES | sizes), sliding_window=30)


@pytest.mark.parametrize(
    ("causal", "sizes"),
    [
        (False, {"head_dim": 80, "num_q_heads": 3, "block_size": 8, "max_blocks": 9}),
        (True, {"head_dim": 256, "num_q_heads": 14, "num_kv_heads": 2, "block_size": 128, "max_blocks": 1}),
    ],
    ids=["not causal, head_dim 80, block_size 8", "head_dim 256, groups of 7, two tiles a block"],
)
def test_shapes(causal: bool, sizes: dict[str, Any]) -> None:
    sizes = SIZES | {"num_rows": 2, "num_tokens": 3} | sizes
    assert_close(oracle.make(3, [sizes["block_size"] * sizes["max_blocks"] - 3, 5], [2, 1], **sizes), causal=causal)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("int8", {"block_size": 16}), ("float8_e4m3fn", {"block_size": 8, "head_dim": 128, "num_q_heads": 10})],
    ids=quantised_pool.DTYPES,
)
def test_quantised_pools(dtype: str, sizes: dict[str, Any]) -> None:
    sizes = SIZES | {"num_rows": 2, "num_tokens": 3, "num_kv_heads": 2, "max_blocks": 9, "dtype": "float32"} | sizes
    problem = oracle.make(4, [70, 9], [2, 1], **sizes)
    q = np.asarray(jnp.asarray(problem.q, jnp.bfloat16), np.float64)
    pool, problem = quantised_pool.quantise(dataclasses.replace(problem, q=q), dtype)
    out, lse = paged_attention(
        *problem.arguments(q=jnp.asarray(q, jnp.bfloat16), kv_pages=pool),
        layer=problem.layer,
        max_query_len=2,
        sliding_window=30,
        return_lse=True,
        implementation="gpu",
        interpret=gpu_interpreter.PARAMS,
    )
    gpu_interpreter.assert_no_race()
    expected_out, expected_lse = problem.expected(sliding_window=30)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 64, 65, 200, 10_000])
@pytest.mark.parametrize("most_splits", [1, 3, 16])
def test_the_work_list_has_every_tile_once(window: int | None, most_splits: int) -> None:
    rng = np.random.default_rng(0)
    seq_lens = np.array([0, 1, 63, 64, 65, 256, 257, 1000, 3000, *rng.integers(0, 3000, 20)])
    query_lens = np.minimum(np.arange(len(seq_lens)) % 4, seq_lens)
    traced = None if window is None else jnp.int32(window)
    work = list_work(jnp.asarray(seq_lens), jnp.asarray(query_lens), traced, most_splits)
    items = np.asarray(work.items)[: int(work.num_items)]
    seen = [(item[ROW], tile) for item in items for tile in range(item[FIRST_TILE], item[END_TILE])]
    first = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - query_lens - window + 1, 0)
    expected = [
        (row, tile)
        for row in range(len(seq_lens))
        if query_lens[row]
        for tile in range(first[row] // TILE, -(-seq_lens[row] // TILE))
    ]
    assert seen == expected
    splits = [(row, s) for row in range(len(seq_lens)) for s in range(work.first_split[row], work.end_split[row])]
    assert [(item[ROW], item[SPLIT]) for item in items] == splits
    assert max(split for _, split in splits) < most_splits


def test_a_rows_splits_depend_on_its_length_alone() -> None:
    def items(seq_lens: list[int], row: int) -> np.ndarray:
        work = list_work(jnp.asarray(seq_lens), jnp.ones(len(seq_lens), jnp.int32), None, 8)
        every = np.asarray(work.items)[: int(work.num_items)]
        return every[every[:, ROW] == row, SPLIT : END_TILE + 1]

    np.testing.assert_array_equal(items([5000], 0), items([1, 0, 5000, 70], 2))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("head", [0, 1, 2])
def test_where_copies_longer_than_a_block_bring_scales(block_size: int, head: int) -> None:
    """NumPy in the place of the copies and of the choice between buffers; the interpreter runs neither."""
    plan = Plan(
        num_kv_heads=3,
        group=1,
        max_query_len=1,
        head_dim=128,
        block_size=block_size,
        kv_on_lanes=False,
        dtype=jnp.dtype("bfloat16"),
        stored_dtype=jnp.dtype("int8"),
        soft_cap=None,
        causal=True,
        has_window=False,
        interpret=False,
    )
    offset = block_size - plan.rows_per_copy  # the last part of a block that has several
    buffers = np.full((plan.scale_buffers, TILE), np.nan)
    for j in range(plan.blocks_per_tile):
        line = 1000 * j + np.arange(3 * block_size)
        buffer, before = plan.scale_buffer(j)
        source = head * block_size + offset - before + np.arange(plan.scales_per_copy)
        inside = (source >= 0) & (source < len(line))
        target = j * plan.rows_per_copy - before
        assert target % LEAST_SCALES == 0, "a copy's target is aligned to 128 bytes"
        assert target + plan.scales_per_copy <= TILE
        buffers[buffer, target : target + plan.scales_per_copy] = np.where(inside, line[source * inside], 0)
    key = np.arange(TILE)
    got = buffers[key // block_size % plan.scale_buffers, key]
    block, token = np.divmod(key, plan.rows_per_copy)
    np.testing.assert_array_equal(got, 1000 * block + head * block_size + offset + token)


@pytest.mark.parametrize(
    ("q", "pool", "block_size", "head_dim", "reason"),
    [
        ("float32", "float32", 16, 64, "float32 pool"),
        ("float32", "bfloat16", 16, 64, "float32 queries"),
        ("float16", "int8", 16, 64, "float16 queries"),
        ("bfloat16", "bfloat16", 24, 64, "block_size 24"),
        ("bfloat16", "bfloat16", 16, 72, "head_dim 72"),
        ("bfloat16", "bfloat16", 16, 16, "head_dim 16"),
        ("bfloat16", "bfloat16", 16, 64, "group of 65"),
        ("bfloat16", "bfloat16", 16, 64, None),
    ],
)
def test_what_it_cannot_do_is_said(q: str, pool: str, block_size: int, head_dim: int, reason: str | None) -> None:
    pages = KVPages.zeros(1, 2, block_size, 1, head_dim, pool)
    heads = 65 if reason == "group of 65" else 4
    why = _gpu.why_not(jnp.zeros((1, heads, head_dim), q), pages)
    assert (why is None) if reason is None else why is not None and reason in why
