"""Pools as `KVPages.zeros` makes them on a TPU, whose lines and scales are rounded up to 128 lanes, on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import quantised_pool

from pallas_kernels import KVPages, device_free, write_kv

TPU = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")


def zeros(*sizes: Any) -> KVPages:
    """The arguments are those of `KVPages.zeros`."""
    with device_free.tracing_for(TPU):
        shapes = jax.eval_shape(lambda: KVPages.zeros(*sizes))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def padded(problem: oracle.Problem) -> oracle.Problem:
    """The problem's tokens in a pool made for a TPU. Slots without a token are NaN, their padding too; what lies behind
    a token is what `write_kv` put there."""
    pages = problem.kv_pages
    sizes = (pages.num_layers, pages.num_blocks, pages.block_size, pages.num_kv_heads, pages.head_dim)
    k, v = (jnp.asarray(np.concatenate(x), pages.dtype) for x in (problem.keys, problem.values))
    empty = quantised_pool.poisoned(zeros(*sizes, pages.dtype))
    written = write_kv(empty, problem.layer, k, v, jnp.asarray(quantised_pool.slots(problem)))
    return dataclasses.replace(problem, kv_pages=written)
