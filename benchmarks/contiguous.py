"""Contiguous KV, the opponent of paging: every row owns S_max slots in one piece, used or not.

It is the same engine with one block a row: a block of S_max tokens is a contiguous row, an admission takes it, it never
grows, and `LLM.stats` counts it as it counts blocks. Only how a tile of keys is found differs: a slice of the row,
without a table to go through. Tiles are as long as the paged ones, and the softmax, the grouping of rows and the work
that short rows spare are the very same code.

T tokens, S rows, L layers, N blocks, H KV heads, B = S_max tokens a row, K keys of a tile, D head size, E >= 2 D.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pagedjax import Decoder
from pagedjax.attention import Attend
from pagedjax.batch import Batch
from pallas_kernels import KVPages
from pallas_kernels._xla import decode, prefill
from pallas_kernels._xla.problem import KEYS_PER_TILE, Problem


def options(num_slots: int, max_row_len: int) -> dict[str, Any]:
    """What an engine is given so that its pool of `num_slots` is contiguous rows of `max_row_len` slots.

    The null block is a row of its own, beside the budget: nobody writes it, and it is not counted against the rows.
    """
    num_rows = num_slots // max_row_len
    if num_rows < 1:
        raise ValueError(f"{num_slots} slots hold no row of {max_row_len}; raise the one or lower the other")
    return {
        "block_size": max_row_len,
        "num_blocks": num_rows + 1,
        "max_num_seqs": num_rows,
        "max_model_len": max_row_len,
        "watermark": 0.0,  # rows do not grow, so none is kept free for that
        "enable_prefix_caching": False,
    }


class RowProblem(Problem):
    """Attention over contiguous rows: `block_tables` i32[S, 1] says which row of the pool is whose."""

    @property
    def keys_per_tile(self) -> int:
        return math.gcd(KEYS_PER_TILE, self.kv_pages.block_size)

    def read_tile(self, rows: jax.Array, tiles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        num_layers, num_blocks, num_kv_heads, row_len, line = self.kv_pages.pool.shape  # [L, N, H, B, E]
        size, head_dim = self.keys_per_tile, self.kv_pages.head_dim
        pool = self.kv_pages.pool.reshape(num_layers, num_blocks, num_kv_heads, row_len // size, size, line)
        row = self.block_tables[rows, 0][..., None]
        tile = jnp.minimum(tiles, row_len // size - 1)[..., None]  # behind a window, others may go on
        kv = pool.at[self.layer, row, jnp.arange(num_kv_heads), tile].get(mode="promise_in_bounds")  # [..., H, K, E]
        position = tiles[..., None] * size + jnp.arange(size)
        k, v = kv[..., :head_dim], kv[..., head_dim : 2 * head_dim]
        return position, k.astype(self.dtype), v.astype(self.dtype)


def attention(
    q: jax.Array,  # [T, Hq, D]
    kv_pages: KVPages,
    block_tables: jax.Array,  # i32[S, 1]
    seq_lens: jax.Array,  # i32[S]
    query_start_loc: jax.Array,  # i32[S + 1]
    *,
    layer: jax.Array,
    sliding_window: jax.Array | None = None,
    max_query_len: int | None = None,
) -> jax.Array:
    """What `pallas_kernels.paged_attention` computes on a CPU, over contiguous rows: [T, Hq, D]."""
    if not kv_pages.kv_on_lanes or kv_pages.is_quantised:
        raise ValueError("contiguous rows are written for pools with K and V side by side that are not quantised")
    num_tokens, num_q_heads, head_dim = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (num_tokens, kv_pages.num_kv_heads, num_q_heads // kv_pages.num_kv_heads)
    problem = RowProblem(
        q=q.reshape(*grouped, head_dim),
        kv_pages=kv_pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        layer=jnp.asarray(layer, jnp.int32),
        scale=jnp.asarray(1 / math.sqrt(head_dim), dtype),
        sliding_window=sliding_window,
        sinks=None,
        soft_cap=None,
        causal=True,
    )
    out, lse = jnp.zeros((*grouped, head_dim), q.dtype), jnp.full(grouped, -jnp.inf, dtype)
    out, lse = decode.attend(problem, out, lse)
    longest = num_tokens if max_query_len is None else max_query_len
    if longest > 1:
        out, _ = prefill.attend(problem, out, lse, longest)
    return out.reshape(q.shape)


class ContiguousDecoder(Decoder):
    """The decoder over contiguous rows: same parameters, same layers."""

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None = None
    ) -> tuple[jax.Array, KVPages]:
        """As `Decoder.paged`; there is one implementation of the attention."""

        def attend_in(layer: jax.Array, window: jax.Array | None) -> Attend:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: KVPages) -> tuple[jax.Array, KVPages]:
                kv_pages = pallas_kernels.write_kv(kv_pages, layer, k, v, batch.slot_mapping)
                out = attention(
                    q,
                    kv_pages,
                    batch.block_tables,
                    batch.seq_lens,
                    batch.query_start_loc,
                    layer=layer,
                    sliding_window=window,
                    max_query_len=batch.max_query_len,
                )
                return out, kv_pages

            return attend

        return self._run(tokens, batch.positions, attend_in, kv_pages)
