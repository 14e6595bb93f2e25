"""Paged attention on a CPU, beside dense attention and beside what the machine's memory and arithmetic allow.

Run it from the root of the repository, with nothing else running:

    JAX_PLATFORMS=cpu python benchmarks/attention.py

Every case goes through all layers of the model, as a step of the engine does, in float32, and is measured five ways in
turn; the medians count:

- `cpu_ms`, `xla_ms`: `pallas_kernels.paged_attention`, these implementations, in a scan over the layers, over blocks
  scattered in the pool.
- `dense_ms`: the same arithmetic on contiguous K and V: two einsums and a softmax, a layer after another, and no row
  is padded.
- `read_ms`: numpy's sum of as many bytes as the live K/V has, a thread a core (`floor.sum_bandwidth`). What fits in a
  cache is read from there, here and there.
- `product_ms`: the FLOPs of the visible pairs of query and key at the rate of one large matrix product.

`of_limit` is the larger of the last two over `cpu_ms`. Prints a table and a line of JSON a case.

C rows alike, Q queries and K keys of a row, T tokens, L layers, H KV heads, G query heads a KV head, D head size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from floor import cpu, sum_bandwidth
from indirection import Shape
from products import fastest

import pallas_kernels
from pallas_kernels import KVPages

BLOCK_SIZE = 16
PRODUCT_SIZE = 1024  # of a square product: far more arithmetic than memory
COLUMNS = ("cpu_ms", "xla_ms", "dense_ms", "read_ms", "product_ms", "of_limit")
HIGHEST = jax.lax.Precision.HIGHEST

Layer = tuple[jax.Array, jax.Array]  # k, v [C, H, K, D]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows alike: the last `num_queries` of `num_keys` tokens ask."""

    count: int
    num_queries: int
    num_keys: int

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        earlier = self.num_keys - self.num_queries
        return self.count * (self.num_queries * earlier + self.num_queries * (self.num_queries + 1) // 2)


def decode(*rows: tuple[int, int]) -> tuple[Rows, ...]:
    """Rows of one query, from counts and lengths."""
    return tuple(Rows(count, 1, num_keys) for count, num_keys in rows)


CASES: dict[str, tuple[Rows, ...]] = {
    "decode 1 x 200": decode((1, 200)),
    "decode 16 x 200": decode((16, 200)),
    "decode 64 x 200": decode((64, 200)),
    "decode 64 x 25 to 600": decode((8, 600), (16, 100), (8, 25), (16, 200), (8, 400), (8, 50)),
    "prefill 1 x 512": (Rows(1, 512, 512),),
    "prefill 4 x 128": (Rows(4, 128, 128),),
    "mixed 16 x 200, 1 x 128": (*decode((16, 200)), Rows(1, 128, 128)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows in one step, and what they cost at least."""

    name: str
    rows: tuple[Rows, ...]
    shape: Shape

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys of every row, i32[S] each."""
        counts = [rows.count for rows in self.rows]
        queries = np.repeat([rows.num_queries for rows in self.rows], counts)
        keys = np.repeat([rows.num_keys for rows in self.rows], counts)
        return queries.astype(np.int32), keys.astype(np.int32)

    @property
    def live_bytes(self) -> int:
        """Of the K and V that the queries see."""
        token = 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * 4
        return token * int(self.lengths[1].sum())

    @property
    def flops(self) -> int:
        """Of the products of queries and keys, and of weights and values."""
        pair = 4 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.group_size * self.shape.head_dim
        return pair * sum(rows.num_pairs for rows in self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """A case's arrays, the K and V twice."""

    q: jax.Array  # [T, H * G, D]
    dense: list[list[Layer]]  # by layer and `Case.rows`
    kv_pages: KVPages
    block_tables: jax.Array  # i32[S, P], of blocks anywhere
    seq_lens: jax.Array  # i32[S]
    query_start_loc: jax.Array  # i32[S + 1]

    @classmethod
    def of(cls, case: Case) -> Inputs:
        rng, shape = np.random.default_rng(0), case.shape
        queries, keys = case.lengths
        num_blocks = -(-keys // BLOCK_SIZE)
        ids = np.split(1 + rng.permutation(num_blocks.sum()), np.cumsum(num_blocks)[:-1])
        tables = np.zeros((len(ids), num_blocks.max()), np.int32)
        for row, blocks in enumerate(ids):
            tables[row, : len(blocks)] = blocks
        positions = [np.arange(num_keys) for num_keys in keys]
        slots = [tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for row, at in enumerate(positions)]
        slot_mapping = jnp.asarray(np.concatenate(slots), jnp.int32)

        heads = (shape.num_kv_heads, shape.head_dim)
        pages = KVPages.zeros(shape.num_layers, int(num_blocks.sum()) + 1, BLOCK_SIZE, *heads, jnp.float32)
        write = jax.jit(pallas_kernels.write_kv, donate_argnums=0)
        dense = []
        for layer in range(shape.num_layers):
            k, v = (rng.standard_normal((len(slot_mapping), *heads), np.float32) for _ in range(2))
            pages = write(pages, layer, jnp.asarray(k), jnp.asarray(v), slot_mapping)
            dense.append(list(zip(split(k, case.rows), split(v, case.rows), strict=True)))
        q_heads = shape.num_kv_heads * shape.group_size
        q = rng.standard_normal((queries.sum(), q_heads, shape.head_dim), np.float32)
        starts = jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32)
        return cls(jnp.asarray(q), dense, pages, jnp.asarray(tables), jnp.asarray(keys), starts)


def split(x: np.ndarray, rows: Sequence[Rows]) -> list[jax.Array]:
    """[all rows' keys, H, D] as [C, H, K, D] each."""
    sizes = [one.count * one.num_keys for one in rows]
    parts = np.split(x, np.cumsum(sizes)[:-1])
    by_row = [part.reshape(one.count, one.num_keys, *x.shape[1:]) for part, one in zip(parts, rows, strict=True)]
    return [jnp.asarray(part.swapaxes(1, 2)) for part in by_row]


# What is measured


def paged(implementation: Literal["cpu", "xla"], case: Case, inputs: Inputs) -> Callable[[], jax.Array]:
    """A call that gives [T, H * G, D] of the last layer; each layer's queries come from the one before."""
    max_query_len = max(rows.num_queries for rows in case.rows)

    @jax.jit
    def all_layers(q: jax.Array, kv_pages: KVPages, *where: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            found = pallas_kernels.paged_attention(
                x, kv_pages, *where, layer=layer, max_query_len=max_query_len, implementation=implementation
            )
            assert isinstance(found, jax.Array)  # the LSE was not asked for
            return q + found, None

        return jax.lax.scan(body, q, jnp.arange(kv_pages.num_layers, dtype=jnp.int32))[0]

    where = (inputs.block_tables, inputs.seq_lens, inputs.query_start_loc)
    return lambda: jax.block_until_ready(all_layers(inputs.q, inputs.kv_pages, *where))


def dense(case: Case, inputs: Inputs) -> Callable[[], jax.Array]:
    """The same over contiguous K and V."""

    @jax.jit
    def all_layers(q: jax.Array, layers: list[list[Layer]]) -> jax.Array:
        ends = np.cumsum([rows.count * rows.num_queries for rows in case.rows])
        x = q
        for layer in layers:
            found = [
                attend(part.reshape(rows.count, rows.num_queries, *q.shape[1:]), *kv).reshape(part.shape)
                for part, rows, kv in zip(jnp.split(x, ends[:-1]), case.rows, layer, strict=True)
            ]
            x = q + jnp.concatenate(found)
        return x

    return lambda: jax.block_until_ready(all_layers(inputs.q, inputs.dense))


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dense causal attention: q [C, Q, H * G, D], the last of the tokens of k and v [C, H, K, D]."""
    num_queries, num_keys = q.shape[1], k.shape[2]
    grouped = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[3]) / math.sqrt(q.shape[3])  # [C, Q, H, G, D]
    scores = jnp.einsum("cqhgd,chkd->chgqk", grouped, k, precision=HIGHEST)
    visible = np.tri(num_queries, num_keys, num_keys - num_queries, dtype=bool)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("chgqk,chkd->cqhgd", weights, v, precision=HIGHEST).reshape(q.shape)


def product(size: int) -> Callable[[], jax.Array]:
    """A call of a square product."""
    x = jnp.ones((size, size), jnp.float32)
    compiled = jax.jit(lambda a, b: jnp.dot(a, b, precision=HIGHEST)).lower(x, x).compile()
    return lambda: jax.block_until_ready(compiled(x, x))


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """The case's figures, medians of the repeats. Each call follows another of its own, which does not count."""
    inputs = Inputs.of(case)
    calls = {
        "cpu_ms": paged("cpu", case, inputs),
        "xla_ms": paged("xla", case, inputs),
        "dense_ms": dense(case, inputs),
        "product_ms": product(PRODUCT_SIZE),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, "read_ms")}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(fastest(call, 1))
        seconds["read_ms"].append(case.live_bytes / sum_bandwidth(case.live_bytes, 1))
    found: dict[str, Any] = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    found["product_ms"] *= case.flops / (2 * PRODUCT_SIZE**3)
    found["of_limit"] = max(found["read_ms"], found["product_ms"]) / found["cpu_ms"]
    found["gb_per_s"] = case.live_bytes / found["read_ms"] / 1e6
    found["gflop_per_s"] = case.flops / found["product_ms"] / 1e6
    return {"case": case.name, "live_bytes": case.live_bytes, "flops": case.flops} | found


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", default=list(CASES), help="by name")
    parser.add_argument("--layers", type=int, default=Shape.num_layers)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    shape = Shape(num_layers=options.layers)
    about = {"cpu": cpu(), "cores": os.cpu_count(), "jax": jax.__version__, "python": platform.python_version()}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':<25}" + "".join(f"{name:>15}" for name in COLUMNS), flush=True)
    lines = []
    for name in options.only:
        found = measure(Case(name, CASES[name], shape), options.repeats)
        print(f"{name:<25}" + "".join(f"{found[column]:>15.2f}" for column in COLUMNS), flush=True)
        lines.append(about | dataclasses.asdict(shape) | {"block_size": BLOCK_SIZE} | found)
    for line in lines:
        print(json.dumps(line))
    return lines


if __name__ == "__main__":
    main()
