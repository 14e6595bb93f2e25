"""The TPU kernel that writes tokens, in the interpreter with its race detector: the same bits as XLA's scatter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import padded_pool
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVPages, gather_kv, write_kv

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 12, 16, 48
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
MODES = ("on_wait", "eager")

# One token a block, in no order, some dropped; two in the last block.
DECODE = [17, 33, -1, 50, 7, NUM_SLOTS - 1, 200_000, 64, -(2**31), NUM_SLOTS - 2]
# Two chunks with an unaligned start and end each, between single tokens and dropped ones.
CHUNKS = [-1, *range(21, 21 + 19), -1, -1, 100, *range(120, 136), 170]
# Slabs that several runs come back to.
SHARED = [16, 40, 17, 41, 18, 42, 19, -1, 43, 31, 30, 29, 28, 27]
# A token in every slab: more items than there are buffers.
MANY = [8 * i + i % 7 for i in reversed(range(NUM_SLOTS // 8))]
SLOTS = {"decode": DECODE, "chunks": CHUNKS, "shared": SHARED, "many": MANY, "none": [-1]}


@pytest.fixture(autouse=True)
def no_races() -> Any:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found


def random_pool(
    dtype: str, head_dim: int, num_heads: int = 2, block_size: int = BLOCK_SIZE, zeros: Any = KVPages.zeros
) -> KVPages:
    """Random in its padding too, if it has any."""
    rng = np.random.default_rng(3)
    empty = zeros(2, NUM_BLOCKS, block_size, num_heads, head_dim, dtype)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * 40).astype(x.dtype), empty)


def random_tokens(pool: KVPages, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    k, v = np.random.default_rng(seed).standard_normal((2, NUM_TOKENS, pool.num_kv_heads, pool.head_dim))
    return jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)


def padded(slots: list[int]) -> jax.Array:
    """One length for all, so that they share programs."""
    return jnp.asarray([*slots, *[-1] * (NUM_TOKENS - len(slots))], jnp.int32)


@functools.partial(jax.jit, static_argnames="mode")
def interpreted(pool: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, mode: str = "on_wait") -> KVPages:
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan")
    return write_kv(pool, 1, k, v, slots, implementation="tpu", interpret=params)


def check(pool: KVPages, slots: list[int], mode: str = "on_wait") -> None:
    k, v = random_tokens(pool)
    expected = write_kv(pool, 1, k, v, padded(slots), implementation="xla")
    found = interpreted(pool, k, v, padded(slots), mode=mode)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", list(SLOTS))
def test_bfloat16(slots: str, mode: str) -> None:
    check(random_pool("bfloat16", 128), SLOTS[slots], mode)


@pytest.mark.parametrize(("slots", "mode"), [("decode", "eager"), ("chunks", "eager"), ("shared", "eager")])
def test_int8_with_its_scales(slots: str, mode: str) -> None:
    check(random_pool("int8", 64), SLOTS[slots], mode)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_heads", "block_size"),
    [("float32", 64, 3, 16), ("bfloat16", 256, 1, 8), ("float8_e4m3fn", 128, 1, 32)],
)
def test_shapes(dtype: str, head_dim: int, num_heads: int, block_size: int) -> None:
    pool = random_pool(dtype, head_dim, num_heads, block_size)
    check(pool, [3, *range(13, 13 + 30), 60, -1, 80])


@pytest.mark.parametrize(("dtype", "head_dim", "num_heads"), [("bfloat16", 96, 2), ("int8", 80, 3)])
def test_padded_pools(dtype: str, head_dim: int, num_heads: int) -> None:
    """The padding behind a token is written, with zeros; that behind the scales may stay or become zero."""
    pool = random_pool(dtype, head_dim, num_heads, zeros=padded_pool.zeros)
    assert pool.pool.shape[-1] == 256
    if pool.scales is not None:
        assert pool.scales.shape[-1] == 128
        pool = dataclasses.replace(pool, scales=pool.scales.at[..., num_heads * BLOCK_SIZE :].set(0))
    check(pool, CHUNKS)


def test_nan_in_other_slots_and_in_tokens_stays_where_it_is() -> None:
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), random_pool("bfloat16", 128))
    k, v = random_tokens(pool)
    k = k.at[2].set(jnp.nan)
    written = interpreted(pool, k, v, padded([20, 21, 22, 23]))
    got_k, got_v = gather_kv(written, 1, jnp.arange(NUM_BLOCKS), NUM_SLOTS)
    finite = np.isfinite(np.asarray(got_k, np.float32)).all((1, 2))
    assert np.flatnonzero(finite).tolist() == [20, 21, 23]
    np.testing.assert_array_equal(got_v[20:24], v[:4].astype(jnp.bfloat16))


def test_gradients_are_those_of_the_xla_write() -> None:
    pool = random_pool("float32", 64)
    k, v = random_tokens(pool)
    weights = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), pool)

    def loss(pool: KVPages, k: jax.Array, v: jax.Array, implementation: Any) -> jax.Array:
        interpret = pltpu.InterpretParams()
        written = write_kv(pool, 1, k, v, padded(CHUNKS), implementation=implementation, interpret=interpret)
        return jnp.sum(jnp.sin(written.pool) * weights.pool)

    expected, found = (
        jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(pool, k, v, implementation)
        for implementation in ("xla", "tpu")
    )
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert np.asarray(a).any()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "message"),
    [
        ("float16", 128, 16, "this one is float16"),
        ("bfloat16", 80, 16, "head_dim is 80"),
        ("bfloat16", 128, 12, "block_size is 12"),
        ("int8", 128, 24, "power of two"),
    ],
)
def test_what_it_can_not_do_is_named(dtype: str, head_dim: int, block_size: int, message: str) -> None:
    pool = random_pool(dtype, head_dim, block_size=block_size)
    tokens = random_tokens(pool)
    with pytest.raises(NotImplementedError, match=message):
        write_kv(pool, 1, *tokens, padded(DECODE), implementation="tpu")
    with pytest.raises(ValueError, match="'gpu' is unknown"):
        write_kv(pool, 1, *tokens, padded(DECODE), implementation="gpu")  # type: ignore[arg-type]
