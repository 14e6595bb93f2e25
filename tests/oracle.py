"""Attention as its definition says, in float64 NumPy on contiguous K and V; and random paged problems to compare with.

Nothing here reads the pool: the oracle sees each sequence's K and V as they were drawn, before they were paged.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages, paged_attention, write_kv

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sequences of known K and V, and the same in a pool whose every other slot is NaN."""

    q: np.ndarray  # [num_tokens, num_q_heads, head_dim], a few tokens past the last row included
    keys: list[np.ndarray]  # a sequence each: [seq_len, num_kv_heads, head_dim]
    values: list[np.ndarray]
    query_lens: list[int]
    kv_pages: KVPages
    block_tables: np.ndarray
    layer: int

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array([len(k) for k in self.keys], np.int32)

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    def arguments(self, **changes: Any) -> tuple:
        fields = {
            "q": jnp.asarray(self.q, self.kv_pages.dtype),
            "kv_pages": self.kv_pages,
            "block_tables": jnp.asarray(self.block_tables),
            "seq_lens": jnp.asarray(self.seq_lens),
            "query_start_loc": jnp.asarray(self.query_start_loc),
        }
        return tuple((fields | changes).values())

    def run(self, implementation: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        out, lse = paged_attention(
            *self.arguments(), layer=self.layer, return_lse=True, implementation=implementation, **options
        )
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """out and LSE by the oracle, computed from inputs rounded to the pool's dtype."""
        rounded = [
            np.asarray(jnp.asarray(x, self.kv_pages.dtype), np.float64) for x in (self.q, *self.keys, *self.values)
        ]
        rows = len(self.keys)
        return attend(rounded[0], rounded[1 : 1 + rows], rounded[1 + rows :], self.query_lens, **options)


def attend(
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    query_lens: list[int],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    causal: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    num_tokens, num_q_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros(q.shape)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    token = 0
    for k, v, query_len in zip(keys, values, query_lens, strict=True):
        for i in range(query_len):
            position = len(k) - query_len + i
            visible = [
                j
                for j in range(len(k))
                if not (causal and j > position) and not (sliding_window is not None and j <= position - sliding_window)
            ]
            for head in range(num_q_heads):
                kv_head = head // (num_q_heads // k.shape[1])
                if not visible:
                    continue
                scores = k[visible, kv_head] @ q[token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                every = scores if sinks is None else np.append(scores, np.float64(sinks[head]))
                largest = every.max()
                lse[token, head] = largest + np.log(np.exp(every - largest).sum())
                out[token, head] = np.exp(scores - lse[token, head]) @ v[visible, kv_head]
            token += 1
    return out, lse


def make(
    seed: int,
    seq_lens: list[int],
    query_lens: list[int],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    num_layers: int = 2,
    layer: int = 1,
    max_blocks: int = 12,
    num_blocks: int = 40,
    num_rows: int = 7,
    num_tokens: int = 97,
    fill: float = np.nan,
    padding: int | None = None,
) -> Problem:
    """A random problem. Slots that hold no token are `fill`, table entries past a length are `padding` (or wild).

    Empty rows and tokens without a row fill it up to num_rows and num_tokens: problems share programs.
    """
    empty_rows = [0] * (num_rows - len(seq_lens))
    seq_lens, query_lens = seq_lens + empty_rows, query_lens + empty_rows
    rng = np.random.default_rng(seed)
    keys, values = ([rng.standard_normal((n, num_kv_heads, head_dim)) for n in seq_lens] for _ in range(2))
    q = rng.standard_normal((num_tokens, num_q_heads, head_dim))
    needed = [-(-n // block_size) for n in seq_lens]
    ids = rng.permutation(np.arange(1, num_blocks))
    tables = rng.integers(-1000, 1000, (len(seq_lens), max_blocks)).astype(np.int32)
    if padding is not None:
        tables[:] = padding
    slots = [np.zeros(0, np.int64)]
    for row, (seq_len, count) in enumerate(zip(seq_lens, needed, strict=True)):
        tables[row, :count], ids = ids[:count], ids[count:]
        positions = np.arange(seq_len)
        slots.append(tables[row, positions // block_size] * block_size + positions % block_size)
    empty = KVPages.zeros(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype)
    filled = jax.tree.map(lambda x: jnp.full_like(x, fill), empty)
    flat_k, flat_v = (jnp.asarray(np.concatenate(x), jnp.dtype(dtype)) for x in (keys, values))
    kv_pages = write_kv(filled, layer, flat_k, flat_v, jnp.asarray(np.concatenate(slots), jnp.int32))
    return Problem(q, keys, values, query_lens, kv_pages, tables, layer)


def assert_close(problem: Problem, implementation: Any, **options: Any) -> None:
    """Compares out and LSE with the oracle, in the tolerance of the pool's dtype."""
    tolerance = TOLERANCE[problem.kv_pages.dtype.name]
    expected_out, expected_lse = problem.expected(**{k: v for k, v in options.items() if k != "max_query_len"})
    out, lse = problem.run(implementation, **options)
    np.testing.assert_allclose(out, expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
