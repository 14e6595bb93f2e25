"""The TPU decode kernel in the interpreter, with its race detector and NaN in memory that was never written.

An interpreted kernel takes seconds to compile, so a few programs serve all checks: what is traced (window, scale,
layer, sinks, lengths, tables) varies between runs of one program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

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

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NO_WINDOW = 2**31 - 1
NO_SINKS = np.full(4, -1e30, np.float32)

# Rows of several tiles of 256 keys, of none, of one query and of more, one with fewer keys than queries; the tiles
# are more than the slots of the stream.
MIXED = {"seq_lens": [600, 0, 257, 20, 2, 1050], "query_lens": [3, 0, 2, 1, 3, 1]}
SIZES = {"num_rows": 6, "num_tokens": 12, "max_blocks": 70, "num_blocks": 140}


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """jax 0.10 only sets a flag where it finds a race."""
    yield
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


def params(mode: Any = "on_wait", num_cores: int = 1) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan", num_cores_or_threads=num_cores
    )


@functools.cache
def program(interpret: pltpu.InterpretParams, max_query_len: int, soft_cap: float | None, causal: bool) -> Any:
    """(arguments, traced options) -> out, lse."""

    def attend(arguments: tuple, options: dict[str, Any]) -> Any:
        return paged_attention(
            *arguments,
            max_query_len=max_query_len,
            soft_cap=soft_cap,
            causal=causal,
            return_lse=True,
            implementation="tpu",
            interpret=interpret,
            **options,
        )

    return jax.jit(attend, compiler_options=QUICKLY)


def run(
    problem: oracle.Problem,
    *,
    interpret: pltpu.InterpretParams | None = None,
    max_query_len: int = 1,
    soft_cap: float | None = None,
    causal: bool = True,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    attend = program(interpret or params(), max_query_len, soft_cap, causal)
    traced = {"layer": problem.layer, **options}
    if "sliding_window" in traced:
        traced["sliding_window"] = jnp.int32(traced["sliding_window"])
    out, lse = attend(problem.arguments(**(changes or {})), traced)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def check(problem: oracle.Problem, tolerance: float | None = None, **options: Any) -> None:
    tolerance = tolerance or oracle.TOLERANCE[problem.kv_pages.dtype.name]
    out, lse = run(problem, **options)
    unlike = ("interpret", "max_query_len", "changes")
    expected, expected_lse = problem.expected(**{k: v for k, v in options.items() if k not in unlike})
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


# One program: K and V on the lanes, float32, up to three queries a row, every option.
EVERY = {"max_query_len": 3, "soft_cap": 3.0, "scale": np.float32(0.2)}


@pytest.fixture(scope="module")
def mixed() -> oracle.Problem:
    return oracle.make(0, **MIXED, **SIZES)


@pytest.mark.parametrize("window", [1, 250, 560, NO_WINDOW])
def test_every_option(mixed: oracle.Problem, window: int) -> None:
    """The windows: inside a block, one edge tile, a whole tile between two edges, none."""
    sinks = NO_SINKS if window == 250 else np.array([0.5, -30.0, 4.0, 90.0], np.float32)
    check(mixed, sliding_window=window, sinks=sinks, **EVERY)


def test_what_must_not_matter(mixed: oracle.Problem) -> None:
    """Stale slots, table padding, blocks before the window, where blocks lie in the pool: bit for bit."""
    options = {"sliding_window": 250, "sinks": NO_SINKS, **EVERY}
    want = run(mixed, **options)
    assert_same(run(oracle.make(0, **MIXED, **SIZES, fill=0.0, padding=0), **options), want)

    moved_to = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(SIZES["num_blocks"] - 1)]).astype(np.int32)
    blank = KVPages.zeros(2, SIZES["num_blocks"], 16, 2, 64, jnp.float32)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), blank, mixed.kv_pages)
    moved = copy_blocks(both, jnp.arange(SIZES["num_blocks"]) + SIZES["num_blocks"], jnp.asarray(moved_to))
    moved = jax.tree.map(lambda x: x[:, : SIZES["num_blocks"]], moved)
    tables = moved_to[np.clip(mixed.block_tables, 0, SIZES["num_blocks"] - 1)]
    for row, (seq_len, count) in enumerate(zip(mixed.seq_lens, mixed.query_lens, strict=True)):
        tables[row, : max(0, (seq_len - count - 250 + 1) // 16)] = -(10**6)
        tables[row, -(-seq_len // 16) :] = 10**6
    assert_same(run(dataclasses.replace(mixed, kv_pages=moved, block_tables=tables), **options), want)


def test_a_row_does_not_depend_on_its_batch_mates(mixed: oracle.Problem) -> None:
    options = {"sliding_window": 560, "sinks": NO_SINKS, **EVERY}
    out, lse = run(mixed, **options)
    starts = mixed.query_start_loc
    for rows in ([5, 2, 4, 3, 0, 1], [1, 3, 5, 5, 5, 2]):
        query_lens = [MIXED["query_lens"][r] for r in rows]
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])
        q = np.zeros(mixed.q.shape)
        q[: len(tokens)] = mixed.q[tokens]
        keys, values = ([x[r] for r in rows] for x in (mixed.keys, mixed.values))
        shuffled = oracle.Problem(q, keys, values, query_lens, mixed.kv_pages, mixed.block_tables[rows], 1)
        got_out, got_lse = run(shuffled, **options)
        assert_same((got_out[: len(tokens)], got_lse[: len(tokens)]), (out[tokens], lse[tokens]))
        assert not got_out[len(tokens) :].any()
        np.testing.assert_array_equal(got_lse[len(tokens) :], -np.inf)


DECODE = {"seq_lens": [300, 0, 64, 513, 1], "query_lens": [1, 0, 1, 1, 1], "num_rows": 5, "num_tokens": 5}
SHAPES = {
    # K and V apart; copies done as soon as they are issued: one into a slot that is still in use shows here.
    "eager": {"head_dim": 128, "block_size": 64, "interpret": params("eager")},
    "bfloat16": {"head_dim": 256, "block_size": 128, "dtype": "bfloat16", "num_kv_heads": 1, "causal": False},
    "two cores": {
        "head_dim": 96,
        "block_size": 64,
        "num_q_heads": 3,
        "num_kv_heads": 1,
        "padded": True,
        "interpret": params("on_wait", 2),
    },
}


def check_shape(shape: dict[str, Any]) -> None:
    shape = dict(shape)
    options = {key: shape.pop(key) for key in ("interpret", "causal", "soft_cap") if key in shape}
    is_padded, needed = shape.pop("padded", False), -(-513 // shape["block_size"])
    problem = oracle.make(1, **DECODE, max_blocks=needed + 2, num_blocks=2 * needed + 8, **shape)
    check(padded_pool.padded(problem) if is_padded else problem, **options)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    """In a padded pool the padding is NaN where the slot is stale, and zero, as it was written, behind a token: the
    product of q and a line goes over it, so it must not be NaN there."""
    check_shape(SHAPES[name])


def check_quantised(kv_dtype: str, zeros: Any = padded_pool.zeros, **shape: Any) -> None:
    needed = -(-513 // shape["block_size"])
    problem = oracle.make(2, **DECODE, max_blocks=needed + 2, num_blocks=2 * needed + 8, **shape)
    pool, stored = quantised_pool.quantise(problem, kv_dtype, zeros)
    out, lse = run(problem, changes={"kv_pages": pool})
    q = np.asarray(jnp.asarray(problem.q, problem.kv_pages.dtype), np.float64)
    expected, expected_lse = oracle.attend(q, stored.keys, stored.values, stored.query_lens)
    tolerance = oracle.TOLERANCE[problem.kv_pages.dtype.name]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def test_int8() -> None:
    """192 scales a block and part, padded to 256: with NaN, as the values have no NaN."""
    check_quantised("int8", head_dim=128, block_size=64, num_kv_heads=3, num_q_heads=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_dtype", quantised_pool.DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("zeros", [padded_pool.zeros, KVPages.zeros], ids=["padded", "plain"])
def test_every_quantised_shape(kv_dtype: str, block_size: int, dtype: str, zeros: Any) -> None:
    check_quantised(kv_dtype, zeros, head_dim=64, block_size=block_size, num_kv_heads=3, num_q_heads=6, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (5, 1), (8, 8), (16, 1)])
@pytest.mark.parametrize(
    ("head_dim", "padded"), [(64, False), (80, False), (80, True), (96, False), (96, True), (128, False), (256, False)]
)
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 8), ("bfloat16", 16), ("float32", 64)])
def test_all_shapes(heads: tuple[int, int], head_dim: int, padded: bool, dtype: str, block_size: int) -> None:
    shape = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "padded": padded}
    check_shape({**shape, "dtype": dtype, "block_size": block_size})


@pytest.mark.slow
def test_eight_queries_a_row() -> None:
    lengths = {"seq_lens": [300, 0, 64, 513, 7], "query_lens": [8, 0, 5, 1, 8], "num_rows": 5, "num_tokens": 25}
    problem = oracle.make(3, **lengths, max_blocks=35, num_blocks=70)
    check(problem, max_query_len=8, sliding_window=256, interpret=params("eager"))
    check(problem, max_query_len=8, causal=False)


def test_what_has_no_kernel_says_so() -> None:
    small = {"seq_lens": [5], "query_lens": [1], "num_rows": 1, "num_tokens": 1}
    for changes, message in (({"block_size": 4}, "block_size 4"), ({"dtype": "float16"}, "dtype float16")):
        with pytest.raises(NotImplementedError, match=message):
            oracle.make(4, **small, **changes).run("tpu")
