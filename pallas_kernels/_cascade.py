"""Attention of rows that share a prefix: the prefix is read once for the queries of all rows, and merged with the rest.

Two calls of `paged_attention`: one over a single row that holds every query, whose keys are the prefix; one over each
row's own part. Every query sees the whole prefix, so the first needs no mask. A window makes that wrong: what a query
sees of the prefix depends on the query. Where it could matter, one call over the joined tables is made instead.

T query tokens, S rows, Hq query heads, D head_dim, B tokens a block, C blocks of the shared list, P of a table line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._attention import Implementation, paged_attention
from pallas_kernels._kv_pages import KVPages
from pallas_kernels._merge import merge_attention_states

State = tuple[jax.Array, jax.Array]  # out [T, Hq, D] and lse [T, Hq]
Attend = Callable[..., Any]  # paged_attention with q, the pool and the common options; gives a State


def cascade_attention(
    q: jax.Array,
    kv_pages: KVPages,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    shared_block_ids: jax.Array,
    shared_len: jax.typing.ArrayLike,
    *,
    layer: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    sliding_window: jax.typing.ArrayLike | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    causal: bool = True,
    max_query_len: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`paged_attention` over rows that begin with the same tokens, which are read once for all of them.

    The sequence of row r is the shared_len tokens of shared_block_ids and then the seq_lens[r] tokens of its own table
    line; the first of these lies at the start of the line's first block, also where the prefix ends inside a block.
    Query i of n is its token shared_len + seq_lens[r] - n + i. Where shared_len is a whole number of blocks this equals
    `paged_attention` with the shared blocks put in front of every line and shared_len added to every length.

    Args:
        q: [num_tokens, num_q_heads, head_dim], as for `paged_attention`.
        kv_pages: the pool.
        block_tables: i32[num_seqs, max_blocks_per_seq], each row's own blocks.
        seq_lens: i32[num_seqs], tokens of each row's own part, those of this step included; 0 is legal.
        query_start_loc: i32[num_seqs + 1]. Queries belong to the row's own part, but for one: a row may ask for the
            prefix's last token. Where causal, a query before that gives NaN.
        shared_block_ids: i32[num_shared_blocks], the prefix's blocks in order; entries past shared_len may hold
            anything.
        shared_len: i32[], tokens of the prefix; may be traced; 0 is legal.
        layer: as for `paged_attention`, like all that follow.
        scale: may be traced.
        sliding_window: may be traced, and may reach into the prefix or end before it. Then shared_len must be a whole
            number of blocks (else, where it is traced, the result is NaN), and a window that leaves out any key is
            computed row by row.
        soft_cap: static.
        sinks: f32[num_q_heads], counted once.
        causal: whether a query sees only keys up to its own position. False: the whole prefix and all its row's keys.
        max_query_len: an upper bound on the queries a row has.
        return_lse: whether to return the log-sum-exp as well.
        implementation: of both calls.
        interpret: of both calls.

    Returns:
        As `paged_attention`. Differentiable likewise.

    Raises:
        ValueError: shapes or dtypes that don't fit together, or an option out of its range.
        NotImplementedError: the implementation that was asked for can't do this.
    """
    _check(kv_pages, shared_block_ids, shared_len, sliding_window)
    own = (block_tables, seq_lens, query_start_loc)
    shared_block_ids, length = shared_block_ids.astype(jnp.int32), jnp.asarray(shared_len, jnp.int32)
    attend: Attend = functools.partial(
        paged_attention,
        q,
        kv_pages,
        layer=layer,
        scale=scale,
        soft_cap=soft_cap,
        return_lse=True,
        implementation=implementation,
        interpret=interpret,
    )
    rest: dict[str, Any] = {"causal": causal, "max_query_len": max_query_len, "sinks": sinks}

    def in_parts() -> State:
        return _merged(attend, own, shared_block_ids, length, rest)

    if sliding_window is None:
        out, lse = in_parts()
    else:
        joined, whole = _joined(own, shared_block_ids, length, kv_pages.block_size)

        def row_by_row() -> State:
            out, lse = attend(*joined, sliding_window=sliding_window, **rest)
            return jnp.where(whole, out, jnp.nan), jnp.where(whole, lse, jnp.nan)

        sees_all = jnp.asarray(sliding_window) >= length + jnp.max(seq_lens, initial=0)
        out, lse = jax.lax.cond(sees_all, in_parts, row_by_row)
    if causal:
        inside = _inside_prefix(q.shape[0], seq_lens, query_start_loc) & (length > 0)
        out, lse = jnp.where(inside[:, None, None], jnp.nan, out), jnp.where(inside[:, None], jnp.nan, lse)
    return (out, lse) if return_lse else out


def _merged(
    attend: Attend,
    own: tuple[jax.Array, jax.Array, jax.Array],
    shared_block_ids: jax.Array,
    shared_len: jax.Array,
    options: dict[str, Any],
) -> State:
    """The prefix for all queries as one row that has them, and each row's own part."""
    every_query = jnp.stack([jnp.zeros_like(own[2][-1]), own[2][-1]])
    prefix_out, prefix_lse = attend(shared_block_ids[None], shared_len[None], every_query, causal=False)
    own_out, own_lse = attend(*own, **options)
    if options["sinks"] is not None:
        # A part in which a query sees no key leaves the sinks out; they still count beside the prefix's keys.
        only_prefix = (own_lse == -jnp.inf) & (prefix_lse > -jnp.inf)
        own_lse = jnp.where(only_prefix, options["sinks"].astype(own_lse.dtype), own_lse)
    return merge_attention_states(prefix_out, prefix_lse, own_out, own_lse)


def _joined(
    own: tuple[jax.Array, jax.Array, jax.Array], shared_block_ids: jax.Array, shared_len: jax.Array, block_size: int
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The arguments of one call over shared and own blocks, tables [S, C + P]; and whether that is possible."""
    block_tables, seq_lens, query_start_loc = own
    width = block_tables.shape[1]
    num_shared = shared_len // block_size
    column = jnp.arange(shared_block_ids.shape[0] + width, dtype=jnp.int32)
    shared = shared_block_ids[jnp.minimum(column, shared_block_ids.shape[0] - 1)]
    own_ids = block_tables[:, jnp.clip(column - num_shared, 0, width - 1)]
    tables = jnp.where(column < num_shared, shared, own_ids)
    return (tables, seq_lens + shared_len, query_start_loc), shared_len % block_size == 0


def _inside_prefix(num_tokens: int, seq_lens: jax.Array, query_start_loc: jax.Array) -> jax.Array:
    """bool[T]: queries that come before the last token of the prefix."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(query_start_loc[1:], token, side="right"), seq_lens.shape[0] - 1)
    own_position = seq_lens[row] - query_start_loc[row + 1] + token
    return (own_position < -1) & (token < query_start_loc[-1])


def _check(
    kv_pages: KVPages,
    shared_block_ids: jax.Array,
    shared_len: jax.typing.ArrayLike,
    sliding_window: jax.typing.ArrayLike | None,
) -> None:
    if shared_block_ids.ndim != 1 or shared_block_ids.shape[0] == 0:
        raise ValueError(
            f"shared_block_ids has shape {shared_block_ids.shape}; it must be a vector of at least one block, "
            "whatever shared_len"
        )
    if not jnp.issubdtype(shared_block_ids.dtype, jnp.integer):
        raise ValueError(f"shared_block_ids has dtype {shared_block_ids.dtype}; it must be int32")
    if jnp.ndim(shared_len) or not jnp.issubdtype(jnp.result_type(shared_len), jnp.integer):
        raise ValueError(f"shared_len is {shared_len}; it must be one integer, the tokens of the prefix")
    if not isinstance(shared_len, int):
        return
    room = shared_block_ids.shape[0] * kv_pages.block_size
    if not 0 <= shared_len <= room:
        raise ValueError(f"shared_len is {shared_len}; shared_block_ids has room for 0 to {room} tokens")
    if sliding_window is not None and shared_len % kv_pages.block_size:
        raise ValueError(
            f"shared_len is {shared_len} and a block {kv_pages.block_size} tokens; with a sliding_window the prefix "
            "must be whole blocks: leave its last tokens to the rows"
        )
