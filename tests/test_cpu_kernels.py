"""The kernels for CPUs: products with a layer's matrix, attention over blocks, and the machine code and threads below.

What attention computes is checked for every implementation in the tests of `paged_attention`; here is what is this
kernel's own: the sizes at which its loops take another way, and bits that depend on a row alone.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import kernel_bits
import numpy as np
import oracle
import pytest

from pallas_kernels import layer_matmul, paged_attention
from pallas_kernels._cpu import attention, product, vectors

ROOT = pathlib.Path(__file__).parent.parent
LANES, TILE, PANEL = vectors.LANES, vectors.TILE_COLUMNS, product.PANEL
ROUNDING = 2.0**-24  # of float32, relative
ROWS = [*range(1, 14), 64, 100]
WIDTHS = [LANES, 3 * LANES, TILE, TILE + LANES, 3 * TILE + 2 * LANES]
DEPTHS = [1, 5, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL, 3 * PANEL + 7]

dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
multiply = jax.jit(layer_matmul)


def draw(num_rows: int, depth: int, width: int, dtype: str = "float32", num_layers: int = 2) -> tuple:
    """x in float32 and a stack."""
    rng = np.random.default_rng((num_rows, depth, width))
    x, stack = (rng.standard_normal(shape) for shape in ((num_rows, depth), (num_layers, depth, width)))
    return jnp.asarray(x, jnp.float32), jnp.asarray(stack, dtype)


def uses_kernel(*arguments: jax.Array) -> bool:
    return "pagedjax_product" in str(jax.make_jaxpr(layer_matmul)(*arguments, 0))


def assert_product(y: jax.Array, x: jax.Array, matrix: jax.Array) -> None:
    """Within what float32 sums of that many terms may be off, which grows as the root of their number."""
    x, matrix = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    norms = np.linalg.norm(x, axis=-1)[..., None] * np.linalg.norm(matrix, axis=0)
    bound = 2 * np.sqrt(len(matrix)) * ROUNDING * norms
    error = np.abs(np.asarray(y, np.float64) - x @ matrix)
    assert (error <= bound).all(), (error / bound).max()


@dtypes
@pytest.mark.parametrize("num_rows", [1, 13])
def test_every_width_and_depth(dtype: str, num_rows: int) -> None:
    sizes = [*((width, PANEL + 1) for width in WIDTHS), *((TILE + LANES, depth) for depth in DEPTHS)]
    for width, depth in sizes:
        x, stack = draw(num_rows, depth, width, dtype)
        assert uses_kernel(x, stack)
        for layer in range(2):
            assert_product(multiply(x, stack, layer), x, stack[layer])


@dtypes
def test_whole_numbers_are_multiplied_exactly(dtype: str) -> None:
    """No term is left out or taken twice: every sum is a number that float32 holds."""
    rng = np.random.default_rng(0)
    for width, depth in zip(WIDTHS, (1, 63, 65, 200, 131), strict=True):
        x, stack = rng.integers(-9, 10, (13, depth)), rng.integers(-9, 10, (2, depth, width))
        y = multiply(jnp.asarray(x, jnp.float32), jnp.asarray(stack, dtype), 1)
        np.testing.assert_array_equal(y, x @ stack[1])


@dtypes
@pytest.mark.parametrize("width", [TILE, 2 * TILE + 3 * LANES])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: str, width: int) -> None:
    """Alone, as any row of any number of them, and wherever it stands."""
    counts = [n for n in ROWS if dtype == "float32" or n <= product.MOST_BFLOAT16_ROWS]
    x, stack = draw(max(counts), 2 * PANEL + 3, width, dtype)
    alone = np.concatenate([multiply(row[None], stack, 1) for row in x])
    assert_product(alone, x, stack[1])
    for num_rows in counts:
        np.testing.assert_array_equal(multiply(x[:num_rows], stack, 1), alone[:num_rows], err_msg=f"{num_rows} rows")
        last = multiply(x[-num_rows:], stack, 1)
        np.testing.assert_array_equal(last, alone[-num_rows:], err_msg=f"the last {num_rows} rows")


@dtypes
def test_a_column_has_the_same_bits_whatever_is_beside_it(dtype: str) -> None:
    """And whichever thread computes it."""
    x, stack = draw(7, 2 * PANEL + 3, 9 * TILE + LANES, dtype)
    y = multiply(x, stack, 1)
    for start in range(0, stack.shape[2], 5 * LANES):
        part = multiply(x, stack[:, :, start : start + LANES], 1)
        np.testing.assert_array_equal(part, y[:, start : start + LANES])


@dtypes
def test_terms_of_a_panel_are_added_one_after_the_other_each_rounded_once(dtype: str) -> None:
    """And the panels' sums likewise: short ones, which round less than one long sum."""
    x, stack = draw(7, 2 * PANEL + 5, TILE + LANES, dtype)
    wide_x, wide_w = (np.asarray(a, np.float32).astype(np.longdouble) for a in (x, stack[0]))
    total = np.zeros((len(x), stack.shape[2]), np.float32)
    for start in range(0, wide_x.shape[1], PANEL):
        of_panel = np.zeros_like(total)
        for column, line in zip(wide_x.T[start:][:PANEL], wide_w[start:][:PANEL], strict=True):
            of_panel = (of_panel + column[:, None] * line).astype(np.float32)
        total += of_panel
    np.testing.assert_array_equal(multiply(x, stack, 0), total)


@pytest.mark.parametrize("num_rows", [-1, 0, 1, 5, 6, 7, 12, 13, 20])
def test_rows_that_do_not_count_are_zero_and_spread_nothing(num_rows: int) -> None:
    x, stack = draw(13, PANEL + 1, TILE + LANES)
    counted = min(max(num_rows, 0), 13)
    expected = multiply(x, stack, 1)[:counted]
    for bad in (np.nan, np.inf):
        y = multiply(x.at[counted:].set(bad), stack, 1, jnp.int32(num_rows))
        np.testing.assert_array_equal(y[:counted], expected)
        np.testing.assert_array_equal(y[counted:], 0)


def test_nan_shows_in_its_row_or_its_column_alone() -> None:
    x, stack = draw(13, PANEL + 1, TILE + LANES)
    clean = np.asarray(multiply(x, stack, 1))
    for bad_x, bad_stack, row, column in (
        (x.at[8, -1].set(jnp.nan), stack, 8, slice(None)),
        (x, stack.at[1, PANEL, TILE].set(jnp.nan), slice(None), TILE),
    ):
        expected = clean.copy()
        expected[row, column] = np.nan
        np.testing.assert_array_equal(multiply(bad_x, bad_stack, 1), expected)
    np.testing.assert_array_equal(multiply(x, stack.at[0].set(jnp.nan), 1), clean)


def test_in_a_scan_over_layers() -> None:
    """The number of the layer is traced, and one program reads every matrix of the stack."""
    x, stack = draw(5, TILE, TILE, num_layers=4)
    stack /= TILE**0.5

    @jax.jit
    def run(x: jax.Array, stack: jax.Array, num_rows: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (layer_matmul(x, stack, layer, num_rows), None), x, jnp.arange(4))[0]

    expected = x
    for layer in range(4):
        expected = multiply(expected, stack, layer)
    np.testing.assert_array_equal(run(x, stack, jnp.int32(5)), expected)
    np.testing.assert_array_equal(run(x.at[3:].set(jnp.nan), stack, jnp.int32(3))[:3], expected[:3])


def test_the_program_holds_no_copy_of_a_matrix() -> None:
    x, stack = draw(2, 512, 512)

    def temporaries(stack: jax.Array) -> int:
        run = jax.jit(
            lambda x, stack: jax.lax.scan(lambda x, i: (layer_matmul(x, stack, i), None), x, jnp.arange(2))[0]
        )
        return run.lower(x, stack).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(stack) < stack[0].nbytes / 16


def test_under_vmap() -> None:
    x, stack = draw(6, PANEL + 1, TILE + LANES)
    many = x.reshape(3, 2, -1)
    expected = multiply(x, stack, 1).reshape(3, 2, -1)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: layer_matmul(x, stack, 1)))(many), expected)
    both = jax.vmap(lambda layer: layer_matmul(x, stack, layer))(jnp.arange(2))
    np.testing.assert_array_equal(both, [multiply(x, stack, layer) for layer in range(2)])


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 1, 3), (0,)])
def test_x_may_have_any_leading_axes(shape: tuple[int, ...]) -> None:
    x, stack = draw(6, 33, TILE + LANES)
    count = int(np.prod(shape))
    y = multiply(x[:count].reshape(*shape, 33), stack, 1)
    assert y.shape == (*shape, TILE + LANES)
    np.testing.assert_array_equal(y.reshape(count, TILE + LANES), multiply(x, stack, 1)[:count])


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@dtypes
def test_the_result_has_the_dtype_of_x(x_dtype: str, dtype: str) -> None:
    """It is summed in float32 and rounded once."""
    x, stack = draw(5, 100, 2 * LANES, dtype)
    x = x.astype(x_dtype)
    y = multiply(x, stack, 1)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, multiply(x.astype(jnp.float32), stack, 1).astype(x_dtype))
    assert multiply(x, stack[..., : LANES + 1], 1).dtype == x.dtype  # not by the kernel


@pytest.mark.parametrize(
    ("dtype", "width", "num_rows"),
    [
        ("float32", LANES + 1, 5),
        ("bfloat16", LANES // 2, 5),
        ("float16", LANES, 5),
        ("bfloat16", LANES, product.MOST_BFLOAT16_ROWS + 1),
    ],
)
def test_what_the_kernel_cannot_do_is_multiplied_by_xla(dtype: str, width: int, num_rows: int) -> None:
    x, stack = draw(num_rows, 100, width, dtype)
    x = x.astype(dtype)
    assert not uses_kernel(x, stack)
    y = multiply(x, stack, 1)
    assert (y.shape, y.dtype) == ((num_rows, width), x.dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(stack[1], np.float64)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-1, "float16": 5e-2}[dtype]  # of sums of size 10
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("x_shape", "stack_shape"), [((2, 3), (3, 16)), ((2, 3), (1, 4, 16)), ((2, 3), (1, 1, 3, 16)), ((2, 3), (0, 3, 16))]
)
def test_shapes_that_do_not_fit_are_refused(x_shape: tuple[int, ...], stack_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[num_layers, K, N\]"):
        layer_matmul(jnp.ones(x_shape), jnp.ones(stack_shape), 0)


def test_a_product_has_no_gradient_and_says_so() -> None:
    x, stack = draw(2, 8, LANES)
    with pytest.raises(ValueError, match="differentiated"):
        jax.grad(lambda x: layer_matmul(x, stack, 0).sum())(x)


# Attention.

KEYS, LINES, FEW = attention.KEYS, attention.LINES, attention.FEW_LINES
SINKS = [0.5, -30.0, 4.0, 1.0, 2.0, -1.0, 0.0, 3.0, 1.5] * 6


@jax.jit
def attend(arguments: tuple) -> Any:
    return paged_attention(*arguments, layer=1, return_lse=True, implementation="cpu")


@dtypes
@pytest.mark.parametrize("queries", ["one", "many"])
@pytest.mark.parametrize("group", [1, 3, FEW, 9, 16, LINES + 1])
def test_groups_of_every_size(group: int, queries: str, dtype: str) -> None:
    """Few lines and many, of one query and of several; more heads than lines of a unit."""
    lengths = [KEYS - 1, 0, KEYS, KEYS + 1, 1, 2 * KEYS + 3]
    counts = [1, 0, 1, 1, 1, 1] if queries == "one" else [2, 0, KEYS, 5, 1, 70]
    sizes = {"num_q_heads": 2 * group, "num_kv_heads": 2, "num_rows": 6, "num_tokens": sum(counts) + 2}
    problem = oracle.make(group, lengths, counts, **sizes, dtype=dtype)
    options = {"sinks": jnp.asarray(SINKS[:1] * (2 * group)), "soft_cap": 4.0, "sliding_window": 50}
    oracle.assert_close(problem, "cpu")
    oracle.assert_close(problem, "cpu", **options)


@pytest.mark.parametrize("window", [1, 2, KEYS - 1, KEYS, KEYS + 1, None])
@pytest.mark.parametrize("queries", ["one", "many"])
def test_windows_caps_and_sinks_at_the_edges_of_a_tile(queries: str, window: int | None) -> None:
    lengths = [KEYS, KEYS + 1, 2 * KEYS - 1, 2 * KEYS, 2 * KEYS + 1]
    counts = [1] * 5 if queries == "one" else [KEYS, 3, 48, 49, 2]
    problem = oracle.make(3, lengths, counts, num_rows=5, num_tokens=sum(counts), max_blocks=9, num_blocks=45)
    for options in ({}, {"soft_cap": 1.5}, {"sinks": jnp.asarray(SINKS[:4])}):
        oracle.assert_close(problem, "cpu", sliding_window=window, **options)
    if window is None:
        oracle.assert_close(problem, "cpu", causal=False, sinks=jnp.asarray(SINKS[:4]))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(LANES, 1, "float32"), (64, 24, "float32"), (64, 2 * KEYS, "bfloat16"), (128, 8, "float32"), (128, 8, "bfloat16")],
)
def test_heads_and_blocks_of_every_size(head_dim: int, block_size: int, dtype: str) -> None:
    """One lane's worth of a head, K and V apart in the pool (128), blocks larger than a tile and of no power of two."""
    sizes = {"block_size": block_size, "max_blocks": -(-160 // block_size), "num_blocks": 300}
    problem = oracle.make(4, [150, 0, 20, 33, 3], [60, 0, 20, 1, 1], head_dim=head_dim, dtype=dtype, **sizes)
    oracle.assert_close(problem, "cpu")


def rows_of(problem: oracle.Problem, rows: list[int]) -> oracle.Problem:
    """Some rows as a batch of their own, in this order."""
    starts = problem.query_start_loc
    tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])
    keys, values = ([x[r] for r in rows] for x in (problem.keys, problem.values))
    counts = [problem.query_lens[r] for r in rows]
    return oracle.Problem(problem.q[tokens], keys, values, counts, problem.kv_pages, problem.block_tables[rows], 1)


@dtypes
@pytest.mark.parametrize("num_q_heads", [2, 4, 18])
def test_a_row_has_the_same_bits_in_every_batch(num_q_heads: int, dtype: str) -> None:
    """Alone on one thread, among neighbours that are divided over all, first and last; decode and prefill."""
    lengths, counts = [150, 33, 1, 70, 64, 120, 17, 90, 5], [1, 1, 1, 1, 64, 50, 3, 6, 0]
    sizes = {"num_q_heads": num_q_heads, "num_rows": 9, "num_tokens": sum(counts), "max_blocks": 10, "num_blocks": 80}
    problem = oracle.make(5, lengths, counts, dtype=dtype, **sizes)
    out, lse = (np.asarray(x, np.float64) for x in attend(problem.arguments()))
    np.testing.assert_allclose(out, problem.expected()[0], rtol=0, atol=oracle.TOLERANCE[dtype])
    starts = problem.query_start_loc
    many = np.random.default_rng(0).integers(0, 9, 30).tolist()
    for rows in (*([r] for r in range(8)), [*range(8)][::-1], [0] * 40, [4, 0], [0, 4], [8, 3, 8], many):
        got_out, got_lse = attend(rows_of(problem, rows).arguments())
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])
        np.testing.assert_array_equal(np.asarray(got_out, np.float64), out[tokens], err_msg=str(rows))
        np.testing.assert_array_equal(got_lse, lse[tokens], err_msg=str(rows))


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("num_rows", [2, 40])
def test_rows_that_mean_nothing_hurt_no_other(num_rows: int, count: int) -> None:
    """Wild block ids that are read, lengths beyond the table and below 0: no crash, and their neighbours keep their
    bits. The first row is right, all others are wrong."""
    problem = oracle.make(6, [60] + [0] * (num_rows - 1), [count] + [0] * (num_rows - 1), num_rows=num_rows)
    q = jnp.asarray(np.resize(problem.q, (num_rows * count, 4, 64)), jnp.float32)
    starts = jnp.arange(num_rows + 1) * count
    expected = attend(rows_of(problem, [0]).arguments())
    largest, tables = np.iinfo(np.int32).max, problem.block_tables.copy()
    for wild_id in (largest, -largest - 1, -1, problem.kv_pages.num_blocks):
        tables[1:] = wild_id
        for length in (12 * 16, 12 * 16 + 1, 5000, -1, -largest - 1):
            lengths = jnp.asarray([60] + [length] * (num_rows - 1), jnp.int32)
            got = attend((q, problem.kv_pages, jnp.asarray(tables), lengths, starts))
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a[:count], b[:count])


@pytest.mark.parametrize(
    "starts", [[-1000, 1, 2], [-5, -3, -1], [3, 5, 6], [2**31 - 1, 2**31 - 1, 2**31 - 1], [0, 9, 2]]
)
def test_starts_that_mean_nothing_stay_inside(starts: list[int]) -> None:
    """What is written lies inside the result, and tokens before the first row and after the last give nothing."""
    problem = oracle.make(6, [60, 40], [1, 1], num_rows=2, num_tokens=8)
    out, lse = attend(problem.arguments(query_start_loc=jnp.asarray(starts, jnp.int32)))
    outside = [token for token in range(8) if token < starts[0] or token >= max(starts)]
    assert not np.asarray(out)[outside].any()
    np.testing.assert_array_equal(np.asarray(lse)[outside], -np.inf)


def test_without_compilation_there_are_no_kernels() -> None:
    """NUMBA_DISABLE_JIT makes plain functions of numba's: everything works, by other means."""
    program = """
import jax.numpy as jnp
from pallas_kernels import KVPages, layer_matmul, paged_attention
x = jnp.ones((1, 4, 64))
tables = jnp.ones((1, 1), jnp.int32), jnp.array([3]), jnp.array([0, 1])
out = paged_attention(x, KVPages(jnp.ones((1, 2, 2, 16, 128))), *tables, layer=0)
assert (out == 1).all()
assert (layer_matmul(jnp.ones((2, 8)), jnp.ones((1, 8, 16)), 0) == 8).all()
try:
    paged_attention(x, KVPages(jnp.ones((1, 2, 2, 16, 128))), *tables, layer=0, implementation="cpu")
except NotImplementedError as error:
    assert "NUMBA_DISABLE_JIT" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, check=True)


def test_a_length_beyond_everything_is_read_through_its_window() -> None:
    problem = oracle.make(6, [60, 0], [1, 0], num_rows=2, num_tokens=2)
    lengths, starts = jnp.asarray([60, np.iinfo(np.int32).max]), jnp.asarray([0, 1, 2])
    arguments = problem.arguments(seq_lens=lengths, query_start_loc=starts)
    out = paged_attention(*arguments, layer=1, sliding_window=30, implementation="cpu")
    np.testing.assert_allclose(out[0], problem.expected(sliding_window=30)[0][0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 0, 3], [3, 0, 0], [0, 90, 0]])
def test_rows_without_tokens(counts: list[int]) -> None:
    problem = oracle.make(7, [20, 90, 40], counts, num_rows=3, num_tokens=97)
    oracle.assert_close(problem, "cpu")
    out, lse = problem.run("cpu")
    assert not out[sum(counts) :].any()
    np.testing.assert_array_equal(lse[sum(counts) :], -np.inf)


def test_more_tokens_than_there_are_places_are_left_out() -> None:
    """As a step has it whose rows were cut off: what is in front of the end is right."""
    problem = oracle.make(8, [30, 20], [5, 10], num_rows=2, num_tokens=15)
    expected, _ = problem.expected()
    out, _ = attend(problem.arguments(q=jnp.asarray(problem.q[:9], jnp.float32)))
    np.testing.assert_allclose(out, expected[:9], rtol=2e-5, atol=2e-5)


def test_attention_under_vmap() -> None:
    problem = oracle.make(9, [60, 20], [1, 4], num_rows=2, num_tokens=6)
    q = jnp.stack([jnp.asarray(problem.q, jnp.float32) * factor for factor in (1, 2)])
    rest = problem.arguments()[1:]
    got = jax.vmap(lambda q: attend((q, *rest)))(q)
    for a, b in zip(got, jax.tree.map(lambda *x: jnp.stack(x), *(attend((x, *rest)) for x in q)), strict=True):
        np.testing.assert_array_equal(a, b)


# Machine code and threads.


@pytest.mark.parametrize(
    ("num_threads", "num_calls"), [(8, 50), pytest.param(32, 2000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_threads_that_call_at_once(num_threads: int, num_calls: int) -> None:
    """None waits for another forever, and every result has the bits of a call alone."""
    programs = [part() for part in kernel_bits.PARTS.values()]
    expected = [kernel_bits.digest(function(*arguments)) for function, arguments in programs]
    wrong: list[Any] = []
    finished: list[int] = []

    def work(number: int) -> None:
        try:
            for call in range(num_calls):
                part = (number + call) % len(programs)
                function, arguments = programs[part]
                if kernel_bits.digest(function(*arguments)) != expected[part]:
                    wrong.append((number, call, part))
            finished.append(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(num_threads)]
    end = time.monotonic() + 60 + num_threads * num_calls / 50
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    assert not wrong
    assert len(finished) == num_threads


def run_apart(*parts: str, path: pathlib.Path = ROOT, **environment: str) -> dict[str, Any]:
    """`kernel_bits` in a process of its own, with the kernels under `path`."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(path)} | environment
    command = [sys.executable, str(ROOT / "tests" / "kernel_bits.py"), *parts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_fresh_and_cached_code_and_any_number_of_threads_give_the_same_bits(tmp_path: pathlib.Path) -> None:
    """Each kernel is compiled by a process of its own; then one process takes all of them from the cache."""
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        fresh = list(pool.map(lambda part: run_apart(part, **folder, NPROC="1")["hashes"], kernel_bits.PARTS))
    expected = {part: digest for hashes in fresh for part, digest in hashes.items()}
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    cached = run_apart(*kernel_bits.PARTS, **folder, NPROC="7")
    hits, count = cached["from_cache"]
    assert hits == count == len(kept)
    assert cached["hashes"] == expected
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept
    assert {part: kernel_bits.digest_of(part) for part in kernel_bits.PARTS} == expected


def test_where_no_code_can_be_kept_it_is_compiled_each_time(tmp_path: pathlib.Path) -> None:
    """Files stand where the folders would be, so that nobody can make them, root neither."""
    shutil.copytree(ROOT / "pallas_kernels", tmp_path / "pallas_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pallas_kernels" / "_cpu" / "__pycache__").touch()
    blocked = tmp_path / "file"
    blocked.touch()
    folders = dict.fromkeys(("XDG_CACHE_HOME", "HOME", "NUMBA_CACHE_DIR"), str(blocked / "folder"))
    result = run_apart("product", path=tmp_path, PYTHONDONTWRITEBYTECODE="1", **folders)
    assert result["from_cache"][0] == 0
    assert result["hashes"]["product"] == kernel_bits.digest_of("product")
    assert not list(tmp_path.rglob("*.nbc"))
