"""What the block table costs: decode attention alone, over blocks anywhere in the pool against contiguous rows.

Run it from the root of the repository: `python benchmarks/indirection.py`. Same rows, same lengths, all layers of the
model, the ways in turn in one process; the blocks of a row are scattered over the pool. Prints a table and one line of
JSON.

S rows, L layers, N blocks, H KV heads, G query heads a KV head, D head size, P blocks a table line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import contiguous
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import KVPages

BLOCK_SIZES = (8, 16, 32, 64)
CONTIGUOUS = "contiguous"
LOADS = ((2, 200), (2, 1000), (16, 200), (32, 100))  # rows, tokens each


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the attention; SmolLM2-135M's."""

    num_layers: int = 30
    num_kv_heads: int = 3
    group_size: int = 3
    head_dim: int = 64


def attend_paged(shape: Shape, num_rows: int, num_tokens: int, block_size: int) -> Callable[[], jax.Array]:
    """A call that attends in all layers, over scattered blocks."""
    per_row = -(-num_tokens // block_size)
    tables = 1 + np.random.default_rng(0).permutation(num_rows * per_row).reshape(num_rows, per_row)  # [S, P]
    return _attend(shape, num_rows, num_tokens, tables, block_size, pallas_kernels.paged_attention)


def attend_contiguous(shape: Shape, num_rows: int, num_tokens: int, max_row_len: int) -> Callable[[], jax.Array]:
    """The same over rows of `max_row_len` slots."""
    rows = 1 + np.random.default_rng(0).permutation(num_rows)[:, None]
    return _attend(shape, num_rows, num_tokens, rows, max_row_len, contiguous.attention)


def _attend(
    shape: Shape, num_rows: int, num_tokens: int, tables: np.ndarray, block_size: int, attention: Callable
) -> Callable[[], jax.Array]:
    sizes = (shape.num_layers, int(tables.max()) + 1, block_size, shape.num_kv_heads, shape.head_dim)
    pages = KVPages.zeros(*sizes, jnp.float32)
    pages = dataclasses.replace(pages, pool=jax.random.normal(jax.random.key(0), pages.pool.shape))
    q = jax.random.normal(jax.random.key(1), (num_rows, shape.num_kv_heads * shape.group_size, shape.head_dim))
    block_tables, starts = jnp.asarray(tables, jnp.int32), jnp.arange(num_rows + 1, dtype=jnp.int32)
    seq_lens = jnp.full(num_rows, num_tokens, jnp.int32)

    @jax.jit
    def all_layers(q: jax.Array, pages: KVPages, block_tables: jax.Array, seq_lens: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return q + attention(x, pages, block_tables, seq_lens, starts, layer=layer, max_query_len=1), None

        return jax.lax.scan(body, q, jnp.arange(shape.num_layers, dtype=jnp.int32))[0]

    return lambda: jax.block_until_ready(all_layers(q, pages, block_tables, seq_lens))


def compare(
    num_rows: int, num_tokens: int, max_row_len: int, repeats: int, shape: Shape | None = None
) -> dict[str, float]:
    """Seconds of each way, by block size; the median of the repeats."""
    shape = shape or Shape()
    ways = {str(size): attend_paged(shape, num_rows, num_tokens, size) for size in BLOCK_SIZES}
    ways[CONTIGUOUS] = attend_contiguous(shape, num_rows, num_tokens, max_row_len)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for attend in ways.values():
        attend()
    for _ in range(repeats):
        for name, attend in ways.items():
            start = time.perf_counter()
            attend()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--row-len", type=int, default=2048, help="slots of a contiguous row")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    results = {}
    names = [*map(str, BLOCK_SIZES), CONTIGUOUS]
    print(f"ms for all layers{'':<7}" + "".join(f"{name:>12}" for name in names) + f"{'16 / contiguous':>18}")
    for num_rows, num_tokens in LOADS:
        found = compare(num_rows, num_tokens, options.row_len, options.repeats)
        load = f"{num_rows} rows of {num_tokens}"
        cells = "".join(f"{1e3 * found[name]:>12.2f}" for name in names)
        print(f"{load:<24}{cells}{found['16'] / found[CONTIGUOUS]:>18.3f}", flush=True)
        results[load] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main()
