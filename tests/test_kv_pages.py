"""The pool: what is written is read back, what is out of range is dropped, and updates are in place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import padded_pool
import pytest

from pallas_kernels import KVPages, copy_blocks, gather_kv, paged_attention, write_kv

# K and V side by side, apart, and side by side in lines that are padded.
LAYOUTS = {"lanes": (64, KVPages.zeros), "apart": (128, KVPages.zeros), "padded": (80, padded_pool.zeros)}
layouts = pytest.mark.parametrize(("head_dim", "zeros"), list(LAYOUTS.values()), ids=list(LAYOUTS))


def random_pool(head_dim: int, zeros: Callable[..., KVPages] = KVPages.zeros) -> KVPages:
    """Random in its padding too, if it has any."""
    empty = zeros(3, 6, 4, 2, head_dim, jnp.float32)
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), empty)


def contents(kv_pages: KVPages) -> np.ndarray:
    """[2, num_layers, num_slots, num_kv_heads, head_dim], read through the public gather."""
    every = np.arange(kv_pages.num_blocks)
    layers = [gather_kv(kv_pages, layer, every, kv_pages.num_slots) for layer in range(kv_pages.num_layers)]
    return np.stack([np.stack([np.asarray(layer[part]) for layer in layers]) for part in (0, 1)])


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_sizes(head_dim: int) -> None:
    pool = KVPages.zeros(3, 6, 8, 2, head_dim, jnp.bfloat16)
    sizes = (pool.num_layers, pool.num_blocks, pool.block_size, pool.num_kv_heads, pool.head_dim)
    assert sizes == (3, 6, 8, 2, head_dim)
    assert pool.dtype == jnp.bfloat16
    assert pool.num_slots == 48
    assert pool.nbytes == 3 * 48 * 2 * head_dim * 2 * 2
    assert pool.nbytes == sum(x.nbytes for x in jax.tree.leaves(pool))


def test_is_a_pytree_that_survives_abstract_evaluation() -> None:
    shape = jax.eval_shape(lambda: KVPages.zeros(3, 6, 8, 2, 64, jnp.float32))
    assert (shape.num_layers, shape.head_dim, shape.nbytes) == (3, 64, 3 * 6 * 8 * 2 * 64 * 2 * 4)


@layouts
def test_written_tokens_are_read_back_and_nothing_else_changes(head_dim: int, zeros: Any) -> None:
    pool = random_pool(head_dim, zeros)
    expected = contents(pool)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 9, 2, head_dim)).astype(np.float32)
    slots = rng.permutation(pool.num_slots)[:9].astype(np.int32)
    for one_call in (write_kv, jax.jit(write_kv)):
        written = one_call(pool, 1, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
        expected[:, 1, slots] = k, v
        np.testing.assert_array_equal(contents(written), expected)


@layouts
def test_a_slot_outside_the_pool_is_dropped(head_dim: int, zeros: Any) -> None:
    pool = zeros(2, 4, 4, 1, head_dim, jnp.float32)
    tokens = jnp.asarray([1.0, 9, 9, 9, 9, 9])[:, None, None] * jnp.ones((6, 1, head_dim))
    slots = jnp.asarray([0, -1, -1, 16, 17, -(2**31)], jnp.int32)
    expected = contents(pool)
    expected[:, 0, 0] = 1
    np.testing.assert_array_equal(contents(write_kv(pool, 0, tokens, tokens, slots)), expected)


def test_values_are_cast_to_the_pools_dtype() -> None:
    pool = write_kv(
        KVPages.zeros(1, 2, 4, 1, 64, jnp.bfloat16),
        0,
        jnp.full((1, 1, 64), 1 + 2.0**-12),
        jnp.full((1, 1, 64), -3.0),
        jnp.asarray([5], jnp.int32),
    )
    k, v = gather_kv(pool, 0, jnp.asarray([1]), 4)
    assert k.dtype == jnp.bfloat16
    assert (float(k[1, 0, 0]), float(v[1, 0, 0])) == (1.0, -3.0)


@layouts
def test_gather_follows_the_table_and_is_zero_past_the_length(head_dim: int, zeros: Any) -> None:
    pool = random_pool(head_dim, zeros)
    poisoned = jax.tree.map(lambda x: x.at[:, 3].set(jnp.nan), pool)
    everything = contents(pool)
    k, v = jax.jit(gather_kv)(poisoned, 2, jnp.asarray([5, 1, 3, 999]), 7)
    assert k.shape == v.shape == (16, 2, head_dim)
    slots = [20, 21, 22, 23, 4, 5, 6]
    for got, want in ((k, everything[0, 2]), (v, everything[1, 2])):
        np.testing.assert_array_equal(got[:7], want[slots])
        np.testing.assert_array_equal(got[7:], 0)


def test_gather_gives_zero_for_an_unknown_block() -> None:
    k, v = gather_kv(random_pool(64), 0, jnp.asarray([-1, 2, 6]), 12)
    assert not k[:4].any()
    assert not v[8:].any()
    assert k[4:8].all()


@layouts
@pytest.mark.parametrize(("count", "copied"), [(None, 3), (2, 2), (0, 0), (99, 3)])
def test_copies_the_first_count_blocks_of_all_layers(head_dim: int, zeros: Any, count: int | None, copied: int) -> None:
    pool = random_pool(head_dim, zeros)
    src, dst = [1, 5, 1], [4, 2, 3]
    expected = contents(pool).reshape(2, 3, 6, 4, 2, head_dim)
    for a, b in list(zip(src, dst, strict=True))[:copied]:
        expected[:, :, b] = expected[:, :, a]
    for one_call in (copy_blocks, jax.jit(copy_blocks)):
        out = one_call(pool, jnp.asarray(src), jnp.asarray(dst), count)
        np.testing.assert_array_equal(contents(out).reshape(expected.shape), expected)


def test_a_copy_with_an_id_outside_the_pool_is_skipped() -> None:
    pool = random_pool(64)
    out = copy_blocks(pool, jnp.asarray([1, 9, -1, 2]), jnp.asarray([6, 3, 4, 5]))
    expected = contents(pool).reshape(2, 3, 6, -1)
    expected[:, :, 5] = expected[:, :, 2]
    np.testing.assert_array_equal(contents(out).reshape(expected.shape), expected)


@layouts
def test_the_pool_is_updated_in_place_through_a_scan_over_layers(head_dim: int, zeros: Any) -> None:
    num_layers, rows, heads = 30, 4, 4
    pool = jax.eval_shape(lambda: zeros(num_layers, 64, 16, 2, head_dim, jnp.float32))

    def step(kv_pages, q, slots, tables, seq_lens, starts, src, dst, count):
        kv_pages = copy_blocks(kv_pages, src, dst, count)

        def one_layer(carry, layer):
            kv_pages, x = carry
            kv_pages = write_kv(kv_pages, layer, x[:, :2], x[:, 2:], slots)
            return (kv_pages, paged_attention(x, kv_pages, tables, seq_lens, starts, layer=layer)), None

        return jax.lax.scan(one_layer, (kv_pages, q), jnp.arange(num_layers))[0]

    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens = 2 * rows
    q = jax.ShapeDtypeStruct((tokens, heads, head_dim), jnp.float32)
    shapes = (pool, q, i32((tokens,)), i32((rows, 8)), i32((rows,)), i32((rows + 1,)), i32((4,)), i32((4,)), i32(()))
    memory = jax.jit(step, donate_argnums=0).lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 4, "num_kv_heads": 1, "head_dim": 64, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        KVPages.zeros(**sizes, dtype=jnp.float32)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "int32"])
def test_an_unsupported_dtype_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"{dtype} is not supported.*bfloat16"):
        KVPages.zeros(1, 2, 4, 1, 64, jnp.dtype(dtype))


def test_float64_needs_x64() -> None:
    with pytest.raises(ValueError, match="jax_enable_x64"):
        KVPages.zeros(1, 2, 4, 1, 64, np.float64)


def test_arguments_that_do_not_fit_the_pool_are_refused() -> None:
    pool = KVPages.zeros(1, 2, 4, 2, 64, jnp.float32)
    good, slots = jnp.ones((3, 2, 64)), jnp.zeros(3, jnp.int32)
    for k, v, where in (
        (jnp.ones((3, 1, 64)), good, slots),
        (good, jnp.ones((3, 2, 32)), slots),
        (good, good, slots[:2]),
        (good.astype(jnp.int32), good, slots),
        (good, good, slots.astype(jnp.float32)),
    ):
        with pytest.raises(ValueError, match=r"shape|dtype"):
            write_kv(pool, 0, k, v, where)
    with pytest.raises(ValueError, match="same length"):
        copy_blocks(pool, slots, slots[:2])
    with pytest.raises(ValueError, match="int32"):
        copy_blocks(pool, slots.astype(jnp.float32), slots)
    with pytest.raises(ValueError, match="vector"):
        gather_kv(pool, 0, slots[None], 1)
