"""A TPU's pool, whose lines and scales are padded to 128 lanes: its shapes, and that the padding reaches no result."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import padded_pool
import pytest
import quantised_pool

from pagedjax import ModelConfig, memory
from pallas_kernels import KVPages, copy_blocks, device_free, gather_kv, paged_attention, write_kv

GPU = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
LENGTHS: dict[str, Any] = {"seq_lens": [5, 0, 20, 7], "query_lens": [1, 0, 20, 3], "num_rows": 4, "num_tokens": 25}
SIZES: dict[str, Any] = {"block_size": 8, "max_blocks": 3, "num_blocks": 9}


def shapes_for(device: Any, *sizes: Any) -> KVPages:
    with device_free.tracing_for(device):
        return jax.eval_shape(lambda: KVPages.zeros(*sizes))


@pytest.mark.parametrize(("head_dim", "line"), [(16, 128), (64, 128), (80, 256), (96, 256), (128, 128), (160, 384)])
def test_lines_are_whole_registers_on_a_tpu_only(head_dim: int, line: int) -> None:
    sizes = (3, 6, 8, 2, head_dim, jnp.bfloat16)
    pool = shapes_for(padded_pool.TPU, *sizes)
    assert pool.pool.shape[-1] == line
    assert (pool.head_dim, pool.num_kv_heads, pool.block_size) == (head_dim, 2, 8)
    assert pool.kv_on_lanes == (head_dim != 128)
    assert pool.is_padded == (head_dim not in (64, 128))
    assert pool.nbytes == 3 * 6 * 8 * 2 * line * 2 * (2 if head_dim == 128 else 1)
    for elsewhere in (KVPages.zeros(*sizes), shapes_for(GPU, *sizes)):
        assert elsewhere.pool.shape[-1] == (head_dim if head_dim == 128 else 2 * head_dim)
        assert elsewhere.head_dim == head_dim
        assert not elsewhere.is_padded


@pytest.mark.parametrize(("num_heads", "block_size", "line"), [(3, 64, 256), (8, 8, 128), (8, 16, 128), (1, 256, 256)])
def test_scales_are_whole_registers_on_a_tpu_only(num_heads: int, block_size: int, line: int) -> None:
    sizes = (2, 6, block_size, num_heads, 128, jnp.int8)
    pool, elsewhere = shapes_for(padded_pool.TPU, *sizes), KVPages.zeros(*sizes)
    assert pool.scales is not None
    assert elsewhere.scales is not None
    assert pool.scales.shape == (2, 6, 2, line)
    assert elsewhere.scales.shape == (2, 6, 2, num_heads * block_size)
    assert pool.is_padded == (line != num_heads * block_size)
    assert not elsewhere.is_padded


def test_a_pool_made_from_arrays_is_the_same_pytree() -> None:
    for head_dim in (64, 80, 128):
        pool = KVPages.zeros(1, 2, 8, 2, head_dim, jnp.int8)
        assert jax.tree.structure(KVPages(pool.pool, pool.scales)) == jax.tree.structure(pool)
        padded = padded_pool.zeros(1, 2, 8, 2, head_dim, jnp.int8)
        mapped = jax.tree.map(lambda x: x.shape, padded, is_leaf=lambda x: isinstance(x, jax.Array))
        assert mapped.head_dim == padded.head_dim == head_dim
        assert jax.jit(lambda x: x)(padded).head_dim == head_dim


def test_what_is_written_over_nan_is_zero_in_its_padding() -> None:
    pool = quantised_pool.poisoned(padded_pool.zeros(1, 3, 4, 2, 80, jnp.float32))
    tokens = jnp.ones((2, 2, 80))
    written = np.asarray(write_kv(pool, 0, tokens, 2 * tokens, jnp.asarray([5, 99])).pool)
    np.testing.assert_array_equal(written[0, 1, :, 1], np.repeat([[1, 2, 0]], [80, 80, 96], axis=1).repeat(2, axis=0))
    assert np.isnan(written).sum() == written.size - 2 * 256


@pytest.mark.parametrize("dtype", quantised_pool.DTYPES)
def test_a_quantised_pool_gives_back_what_a_plain_one_does(dtype: str) -> None:
    problem = oracle.make(0, **LENGTHS, **SIZES, num_kv_heads=3, num_q_heads=3, head_dim=80)
    (plain, _), (padded, _) = (
        quantised_pool.quantise(problem, dtype, zeros) for zeros in (KVPages.zeros, padded_pool.zeros)
    )
    assert not plain.is_padded
    assert padded.is_padded
    line = problem.block_tables[2]
    src, dst = jnp.asarray(line[:2]), jnp.asarray([i for i in range(9) if i not in problem.block_tables][:2])
    for a, b in zip(
        *(gather_kv(copy_blocks(pool, src, dst), 1, jnp.append(dst, line[2]), 20) for pool in (plain, padded)),
        strict=True,
    ):
        assert np.asarray(a).any()
        np.testing.assert_array_equal(a, b)
    found = [problem.arguments(kv_pages=pool) for pool in (plain, padded)]
    a, b = (paged_attention(*arguments, layer=1, implementation="xla") for arguments in found)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_attention_reads_no_padding(implementation: Any, head_dim: int) -> None:
    problem = padded_pool.padded(oracle.make(0, **LENGTHS, **SIZES, head_dim=head_dim))
    pages = problem.kv_pages
    problem = dataclasses.replace(
        problem, kv_pages=dataclasses.replace(pages, pool=pages.pool.at[..., 2 * head_dim :].set(jnp.nan))
    )
    oracle.assert_close(problem, implementation)


def test_gradients_are_those_of_a_plain_pool() -> None:
    """Of a write and the attention after it, in the pool, the tokens and q."""
    plain = oracle.make(0, **LENGTHS, **SIZES, head_dim=80, fill=0.5)
    rng = np.random.default_rng(1)
    k, v, weights = jnp.asarray(rng.standard_normal((3, 25, 4, 80)), jnp.float32)
    slots = jnp.asarray(plain.block_tables[2, :1] * 8 + np.arange(25) % 8 + 10**6 * (np.arange(25) > 7), jnp.int32)

    def loss(pool: KVPages, k: jax.Array, v: jax.Array, q: jax.Array, problem: oracle.Problem) -> jax.Array:
        pool = write_kv(pool, 1, k[:, :2], v[:, :2], slots)
        rest = problem.arguments()[2:]
        return jnp.sum(weights * paged_attention(q, pool, *rest, layer=1, implementation="xla"))

    gradients = []
    for problem in (plain, padded_pool.padded(plain)):
        d_pool, *others = jax.grad(loss, (0, 1, 2, 3))(problem.kv_pages, k, v, jnp.asarray(problem.q), problem)
        assert d_pool.head_dim == 80
        values, padding = np.split(np.asarray(d_pool.pool), [160], axis=-1)
        assert not padding.any()
        gradients.append([values, *others])
    for a, b in zip(*gradients, strict=True):
        assert np.asarray(a).any()
        np.testing.assert_array_equal(a, b)


def test_a_gpu_refuses_a_padded_pool() -> None:
    problem = padded_pool.padded(oracle.make(0, **LENGTHS, **SIZES, head_dim=80, dtype="bfloat16"))
    with pytest.raises(NotImplementedError, match="padded for a TPU"):
        problem.run("gpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_engines_arithmetic_counts_the_padding(dtype: str) -> None:
    # 2 layers, 3 KV heads of 80, blocks of 8: lines of 160 or 256 values, and 24 or 128 scales of 4 bytes for K and V.
    config = ModelConfig("llama", 96, 32, 64, 2, 3, 3, 80, 64)
    scales = {"bfloat16": (0, 0), "int8": (2 * 24 * 4, 2 * 128 * 4)}[dtype]
    size = jnp.dtype(dtype).itemsize
    assert memory.kv_block_bytes(config, jnp.dtype(dtype), 8) == 2 * (8 * 3 * 160 * size + scales[0])
    with device_free.tracing_for(padded_pool.TPU):
        assert memory.kv_block_bytes(config, jnp.dtype(dtype), 8) == 2 * (8 * 3 * 256 * size + scales[1])
