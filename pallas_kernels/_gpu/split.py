"""Split KV: a row's keys are cut into splits, each split of each KV head is one item of work, and the parts are merged.

How many splits a row has depends on its own length only (and on static shapes), never on the batch: a row's result has
the same bits whoever its mates are. The items of all rows stand one after another in a list, so that the kernel's
programs share them out without an empty one.

T query tokens, S rows, H KV heads, G query heads a KV head, Q queries a row at most, N columns (query, head of the
group) with padding, D head_dim, E the same with padding, M most splits a row, W = S * M.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64  # keys that the kernel takes at once: the M of Hopper's matrix unit
LEAST_TILES_PER_SPLIT = 4
# A long row alone has about this many items, one a multiprocessor (an H100 or H200 has 132).
ITEMS_OF_A_LONG_ROW = 128
MOST_SPLITS = 64
LOWEST = -1e30  # the running maximum before the first key; finite, so that a difference is never NaN

# The columns of an item: where it lies, what its keys and queries are.
ROW, SPLIT, FIRST_TILE, END_TILE, SEQ_LEN, FIRST_POSITION, FIRST_KEY, _UNUSED = range(8)
ITEM_SIZE = 8


class Work(NamedTuple):
    """What the kernel has to do."""

    items: jax.Array  # i32[W, ITEM_SIZE]; those from `num_items` on are meaningless
    num_items: jax.Array  # i32[], for each KV head
    first_split: jax.Array  # i32[S]: the splits of row r are [first_split[r], end_split[r])
    end_split: jax.Array  # i32[S]


class Parts(NamedTuple):
    """Attention over some keys that can still be joined with attention over others."""

    value: jax.Array  # f32[..., H, E, N]: the sum of 2^(score - maximum) * v, in the last D of E
    maximum: jax.Array  # f32[..., H, N]: of the scores, in units of log2(e); LOWEST where no key was seen
    total: jax.Array  # f32[..., H, N]: the sum of 2^(score - maximum)


def most_splits(num_kv_heads: int, table_tokens: int) -> int:
    """M: enough that one long row occupies the chip, and no more than a full table line has."""
    wanted = min(max(ITEMS_OF_A_LONG_ROW // num_kv_heads, 1), MOST_SPLITS)
    return min(wanted, math.ceil(table_tokens / (TILE * LEAST_TILES_PER_SPLIT)))


def list_work(
    seq_lens: jax.Array,  # i32[S]
    query_lens: jax.Array,  # i32[S]; 0 for a row that is not to be done
    sliding_window: jax.Array | None,  # i32[]
    largest: int,  # M
) -> Work:
    """The items, row after row, split after split; splits wholly before the window are left out."""
    num_rows = seq_lens.shape[0]
    tiles = _ceil_div(seq_lens, TILE)
    tiles_per_split = jnp.maximum(LEAST_TILES_PER_SPLIT, _ceil_div(tiles, largest))
    position = seq_lens - query_lens  # of the row's first query
    first_key = jnp.zeros_like(seq_lens)
    if sliding_window is not None:
        first_key = jnp.maximum(position - sliding_window + 1, 0)
    first_tile = jnp.minimum(first_key // TILE, tiles)
    end_split = jnp.where(query_lens > 0, _ceil_div(tiles, tiles_per_split), 0)
    first_split = jnp.minimum(first_tile // tiles_per_split, end_split)

    ends = jnp.cumsum(end_split - first_split)  # [S]: the items up to and with row r
    item = jnp.arange(num_rows * largest, dtype=jnp.int32)
    # Rows whose items all stand before this one; a comparison with every row, as a search would be a loop of steps.
    row = jnp.minimum((ends[None, :] <= item[:, None]).sum(1, dtype=jnp.int32), num_rows - 1)
    split = end_split[row] - (ends[row] - item)
    of_row = tiles_per_split[row]
    columns = {
        ROW: row,
        SPLIT: split,
        FIRST_TILE: jnp.maximum(split * of_row, first_tile[row]),
        END_TILE: jnp.minimum((split + 1) * of_row, tiles[row]),
        SEQ_LEN: seq_lens[row],
        FIRST_POSITION: position[row],
        FIRST_KEY: first_key[row],
    }
    items = jnp.stack([columns.get(column, item) for column in range(ITEM_SIZE)], axis=1)
    return Work(items, ends[-1], first_split, end_split)


def pack_queries(
    q: jax.Array,  # [T, Hq, D]
    query_start_loc: jax.Array,  # i32[S + 1]
    num_kv_heads: int,
    max_query_len: int,  # Q
    num_columns: int,  # N
    padded_dim: int,
) -> jax.Array:
    """[S, H, N, padded_dim]: a row's queries of a KV head as columns query * G + head of the group; zeros elsewhere."""
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // num_kv_heads
    tokens = jnp.minimum(query_start_loc[:-1, None] + jnp.arange(max_query_len), num_tokens - 1)  # [S, Q]
    packed = q[tokens].reshape(-1, max_query_len, num_kv_heads, group, head_dim)  # [S, Q, H, G, D]
    packed = packed.transpose(0, 2, 1, 3, 4).reshape(-1, num_kv_heads, max_query_len * group, head_dim)
    return jnp.pad(packed, ((0, 0), (0, 0), (0, num_columns - packed.shape[2]), (0, padded_dim - head_dim)))


def finish(
    parts: Parts,  # [S, ...]
    sinks: jax.Array | None,  # f32[Hq]
    head_dim: int,
    max_query_len: int,  # Q
    group: int,  # G
) -> tuple[jax.Array, jax.Array]:
    """out f32[S, Q, Hq, D] and lse f32[S, Q, Hq] of joined parts; 0 and -inf where no key was seen."""
    num_rows, num_kv_heads = parts.maximum.shape[:2]
    grouped = (num_rows, num_kv_heads, max_query_len, group)
    in_use = slice(max_query_len * group)
    maximum = parts.maximum[..., in_use].reshape(grouped)
    total = parts.total[..., in_use].reshape(grouped)
    value = jnp.swapaxes(parts.value[..., -head_dim:, in_use], 2, 3).reshape(*grouped, head_dim)

    seen = total != 0  # the largest score gives a term of 1; a NaN has been seen, and shows
    weight = jnp.ones_like(maximum)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group) * math.log2(math.e)
        with_sink = jnp.maximum(maximum, sink)
        weight = jnp.exp2(maximum - with_sink)
        maximum, total = with_sink, total * weight + jnp.exp2(sink - with_sink)
    total = jnp.where(seen, total, 1)
    out = jnp.where(seen[..., None], value * (weight / total)[..., None], 0)
    lse = jnp.where(seen, (maximum + jnp.log2(total)) * math.log(2), -jnp.inf)
    out, lse = (jnp.swapaxes(x, 1, 2).reshape(num_rows, max_query_len, -1, *x.shape[4:]) for x in (out, lse))
    return out, lse


def scatter_to_tokens(
    x: jax.Array,  # [S, Q, ...]
    query_start_loc: jax.Array,  # i32[S + 1]
    done: jax.Array,  # bool[S]: rows whose values count
    num_tokens: int,  # T
    fill: float,
) -> jax.Array:
    """[T, ...]: the value of each token that is a query of a row that is done, `fill` elsewhere."""
    num_rows, max_query_len = x.shape[:2]
    token = jnp.arange(num_tokens)
    row = (query_start_loc[1:] <= token[:, None]).sum(1)
    in_row = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    query = token - query_start_loc[row]
    valid = in_row & done[row] & (query < max_query_len)
    values = x[row, jnp.clip(query, 0, max_query_len - 1)]
    return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 2)), values, fill)


def _ceil_div(a: jax.Array, b: jax.typing.ArrayLike) -> jax.Array:
    return (a + b - 1) // b
