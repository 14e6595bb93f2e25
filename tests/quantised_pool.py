"""Quantised pools for a random problem: the same tokens in int8 or float8, and what NumPy says they read back as."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle

from pallas_kernels import KVPages, write_kv

DTYPES = ("int8", "float8_e4m3fn")
LARGEST_STORED = {"int8": 127, "float8_e4m3fn": 448}
# The error of an element, as a share of its vector's largest: half a step of 1/127; half of 2^-3, float8's mantissa.
ERROR = {"int8": 0.5 / 127, "float8_e4m3fn": 0.5 / 8}


def round_trip(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 x [..., D] as a quantised pool gives it back."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / LARGEST_STORED[dtype])
    steps = x / np.where(scale > 0, scale, 1)
    stored = np.rint(steps) if dtype == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float64) * scale


def poisoned(kv_pages: KVPages) -> KVPages:
    """The pool with junk in every slot, NaN wherever the dtype has one; the scales are all NaN."""

    def junk(x: jax.Array) -> jax.Array:
        return jnp.full_like(x, 77 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.nan)

    return jax.tree.map(junk, kv_pages)


def slots(problem: oracle.Problem) -> np.ndarray:
    """i32[tokens of all rows]: where each row's tokens lie, row after row."""
    block_size = problem.kv_pages.block_size
    position = [np.arange(n) for n in problem.seq_lens]
    lines = zip(problem.block_tables, position, strict=True)
    return np.concatenate([line[p // block_size] * block_size + p % block_size for line, p in lines]).astype(np.int32)


def quantise(
    problem: oracle.Problem, dtype: str, zeros: Callable[..., KVPages] = KVPages.zeros
) -> tuple[KVPages, oracle.Problem]:
    """The problem's tokens in a quantised pool, poisoned elsewhere, and the problem whose K and V are what it holds."""
    pages = problem.kv_pages
    sizes = (pages.num_layers, pages.num_blocks, pages.block_size, pages.num_kv_heads, pages.head_dim)
    k, v = (jnp.asarray(np.concatenate(x), jnp.float32) for x in (problem.keys, problem.values))
    empty = poisoned(zeros(*sizes, dtype))
    pool = write_kv(empty, problem.layer, k, v, jnp.asarray(slots(problem)))
    keys, values = ([round_trip(x, dtype) for x in rows] for rows in (problem.keys, problem.values))
    return pool, dataclasses.replace(problem, keys=keys, values=values)
