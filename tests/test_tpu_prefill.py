"""The TPU prefill kernel in the interpreter, with its race detector and NaN in memory that was never written.

Tiles are small here, so that short rows have several. An interpreted kernel takes seconds to compile, so a few programs
serve all checks: lengths, tables, window, scale and sinks vary between runs of one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import padded_pool
import pytest
import quantised_pool
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVPages, copy_blocks, paged_attention
from pallas_kernels._tpu import decode, prefill, prefill_kernel

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
KEYS_PER_TILE, QUERIES_PER_TILE = 128, 16

# Decode, empty, whole, short and with fewer keys than queries; row 4 is a chunk of three tiles that continues a long
# context.
SEQ_LENS, QUERY_LENS = [140, 0, 20, 1, 262, 33, 4], [1, 0, 20, 0, 42, 2, 7]
SIZES = {"num_rows": 7, "num_tokens": 74}
CHUNK = 4

PLAIN = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 128, "block_size": 32}
ON_LANES = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 64, "block_size": 8}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_KEYS_PER_TILE", KEYS_PER_TILE)
    monkeypatch.setattr(prefill, "MAX_QUERIES_PER_TILE", QUERIES_PER_TILE)
    monkeypatch.setattr(prefill_kernel, "LINES_PER_STEP", 2 * QUERIES_PER_TILE)
    monkeypatch.setattr(prefill_kernel, "LINES_TOGETHER", 2 * QUERIES_PER_TILE)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """jax 0.10 only sets a flag where it finds a race."""
    yield
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


def no_decode(*arguments: Any, **_: Any) -> tuple[Any, Any]:
    """Out and LSE as they came: half the time to compile, where no row decodes."""
    return arguments[-2:]


@functools.cache
def program(mode: Any, num_cores: int, soft_cap: float | None, causal: bool, with_decode: bool) -> Any:
    """(arguments, traced options) -> out, lse."""
    interpret = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan", num_cores_or_threads=num_cores
    )

    def attend(arguments: tuple, options: dict[str, Any]) -> Any:
        static = {"soft_cap": soft_cap, "causal": causal, "max_query_len": 42, "return_lse": True}
        patched = contextlib.nullcontext() if with_decode else mock.patch.object(decode, "attend", no_decode)
        with patched:
            return paged_attention(*arguments, **static, implementation="tpu", interpret=interpret, **options)

    return jax.jit(attend, compiler_options=QUICKLY)


def run(
    problem: oracle.Problem,
    *,
    mode: Any = "on_wait",
    num_cores: int = 1,
    soft_cap: float | None = None,
    causal: bool = True,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    traced = jax.tree.map(jnp.asarray, {"layer": problem.layer, **options})
    with_decode = 1 in problem.query_lens
    out, lse = program(mode, num_cores, soft_cap, causal, with_decode)(problem.arguments(**(changes or {})), traced)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def check(problem: oracle.Problem, *, mode: Any = "on_wait", num_cores: int = 1, **options: Any) -> None:
    tolerance = oracle.TOLERANCE[problem.kv_pages.dtype.name]
    out, lse = run(problem, mode=mode, num_cores=num_cores, **options)
    expected, expected_lse = problem.expected(**options)
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def make(seed: int = 0, *, with_decode: bool = False, **options: Any) -> oracle.Problem:
    query_lens = [n if n > 1 or with_decode else 0 for n in QUERY_LENS]
    block_size = options["block_size"]
    blocks = {"max_blocks": -(-288 // block_size), "num_blocks": 8 + 480 // block_size}
    return oracle.make(seed, SEQ_LENS, query_lens, **SIZES, **blocks, **options)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@functools.cache
def mixed() -> oracle.Problem:
    return make(**PLAIN, with_decode=True)


@functools.cache
def result_of_mixed() -> tuple[np.ndarray, np.ndarray]:
    return run(mixed())


def test_a_mixed_batch() -> None:
    for got, want in zip(result_of_mixed(), mixed().expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 20, 140])
def test_every_option(window: int) -> None:
    """The windows: inside a block, inside an edge tile, a whole tile between two edges. What is outside is not read."""
    sinks = np.array([0.5, -30.0, 90.0], np.float32)
    problem = make(**ON_LANES)
    for row, (seq_len, count) in enumerate(zip(SEQ_LENS, problem.query_lens, strict=True)):
        problem.block_tables[row, : max(0, seq_len - count - window + 1) // 8] = -(10**6)
        problem.block_tables[row, -(-seq_len // 8) :] = 10**6
    check(problem, mode="eager", sliding_window=window, soft_cap=3.0, sinks=sinks, scale=np.float32(-0.2))


def test_two_cores_without_causality_in_a_padded_bfloat16_pool() -> None:
    """The padding is NaN where the slot is stale, and zero, as it was written, behind a token: the product of q and a
    line goes over it, so it must not be NaN there."""
    problem = make(num_q_heads=4, num_kv_heads=4, head_dim=80, block_size=32, dtype="bfloat16")
    check(padded_pool.padded(problem), num_cores=2, causal=False)


def check_quantised(dtype: str, zeros: Any = KVPages.zeros, **options: Any) -> None:
    """Weights and queries are rounded to bfloat16 on the way, so the tolerance is bfloat16's."""
    problem = make(**options)
    pool, stored = quantised_pool.quantise(problem, dtype, zeros)
    stored = dataclasses.replace(stored, q=np.asarray(jnp.asarray(stored.q, jnp.bfloat16), np.float64))
    q = jnp.asarray(stored.q, jnp.bfloat16)
    window = np.int32(150)
    out, lse = run(problem, mode="eager", sliding_window=window, changes={"q": q, "kv_pages": pool})
    rows = (stored.keys, stored.values, stored.query_lens)
    expected, expected_lse = oracle.attend(stored.q, *rows, sliding_window=150)
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def test_int8() -> None:
    """64 scales a block and part, padded to 128: with NaN, as the values have no NaN."""
    check_quantised("int8", padded_pool.zeros, **PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, ON_LANES], ids=["apart", "lanes"])
@pytest.mark.parametrize("zeros", [padded_pool.zeros, KVPages.zeros], ids=["padded", "plain"])
def test_float8(options: dict[str, int], zeros: Any) -> None:
    check_quantised("float8_e4m3fn", zeros, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((7, 1), 96, 64), ((10, 2), 256, 8), ((16, 1), 64, 16), ((2, 2), 128, 32), ((9, 3), 80, 16)],
)
@pytest.mark.parametrize(("window", "padded"), [(None, False), (40, True)])
def test_all_shapes(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: str, window: int | None, padded: bool
) -> None:
    sizes = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    problem = make(**sizes, dtype=dtype)
    options = {} if window is None else {"sliding_window": window}
    check(padded_pool.padded(problem) if padded else problem, **options)


def test_stale_slots_and_table_padding_do_not_matter() -> None:
    """They are NaN and wild in `mixed`."""
    assert_same(run(make(**PLAIN, with_decode=True, fill=0.0, padding=0)), result_of_mixed())


def test_the_order_of_blocks_in_the_pool_does_not_matter() -> None:
    num_blocks = mixed().kv_pages.num_blocks
    moved_to = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(num_blocks - 1)]).astype(np.int32)
    both = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x), x], axis=1), mixed().kv_pages)
    moved: KVPages = copy_blocks(both, jnp.arange(num_blocks) + num_blocks, jnp.asarray(moved_to))
    moved = jax.tree.map(lambda x: x[:, :num_blocks], moved)
    tables = moved_to[np.clip(mixed().block_tables, 0, num_blocks - 1)]
    assert_same(run(dataclasses.replace(mixed(), kv_pages=moved, block_tables=tables)), result_of_mixed())


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    out, lse = result_of_mixed()
    starts, rows = mixed().query_start_loc, [5, 6, 4, 1, 2, 0, 0]
    query_lens = [QUERY_LENS[r] for r in rows]
    tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])
    q = np.zeros(mixed().q.shape)
    q[: len(tokens)] = mixed().q[tokens]
    keys, values = ([x[r] for r in rows] for x in (mixed().keys, mixed().values))
    tables = mixed().block_tables[rows]
    got_out, got_lse = run(oracle.Problem(q, keys, values, query_lens, mixed().kv_pages, tables, mixed().layer))
    assert_same((got_out[: len(tokens)], got_lse[: len(tokens)]), (out[tokens], lse[tokens]))
    assert not got_out[len(tokens) :].any()


def chunks_of(problem: oracle.Problem, row: int, chunks: list[int]) -> dict[str, Any]:
    """The arguments of a batch whose rows are the chunks of one prefill, all of them in one call."""
    start = problem.query_start_loc[row]
    q = np.roll(problem.q, -start, axis=0)
    end = SEQ_LENS[row] - QUERY_LENS[row] + np.cumsum(chunks)
    empty = SIZES["num_rows"] - len(chunks)
    lens = jnp.asarray([*chunks, *[0] * empty], jnp.int32)
    return {
        "q": jnp.asarray(q, jnp.float32),
        "block_tables": jnp.asarray(np.repeat(problem.block_tables[row : row + 1], SIZES["num_rows"], axis=0)),
        "seq_lens": jnp.asarray([*end, *[0] * empty], jnp.int32),
        "query_start_loc": jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens)]),
    }


def test_chunks_and_decode_equal_one_prefill() -> None:
    start, count = mixed().query_start_loc[CHUNK], QUERY_LENS[CHUNK]
    chunked = run(mixed(), changes=chunks_of(mixed(), CHUNK, [2, 16, 1, 22, 1]))
    for got, want in zip(chunked, result_of_mixed(), strict=True):
        np.testing.assert_allclose(got[:count], want[start : start + count], rtol=2e-6, atol=2e-6)
