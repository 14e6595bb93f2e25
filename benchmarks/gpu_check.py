"""Checks and measures the Hopper kernels on a GPU: right against the reference, how fast against the chip and others.

Every part stands alone: a failure is printed and the next part runs. The last line is JSON with all results.

S rows, T query tokens, H KV heads, D head_dim, B block size, C tokens of context.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import gpu_peers
import jax
import jax.numpy as jnp

from pallas_kernels import KVPages, paged_attention

SECONDS = 280  # no part starts later
LARGEST_ERROR = 2e-2  # as a share of the largest element; bfloat16 keeps 2^-9 of each
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of rows of one context length; query_len tokens a row."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rows: int = 8
    query_len: int = 1
    block_size: int = 16
    dtype: str = "bfloat16"
    options: tuple[tuple[str, Any], ...] = ()  # of paged_attention
    sinks: bool = False
    permuted: bool = True  # False: the blocks stand in order, as in a contiguous cache

    @property
    def kv_bytes(self) -> int:
        """What a decode step has to read."""
        scale = 4 if jnp.dtype(self.dtype).itemsize == 1 else 0
        token = 2 * self.num_kv_heads * (self.head_dim * jnp.dtype(self.dtype).itemsize + scale)
        return self.rows * self.context * token

    @property
    def flops(self) -> int:
        """Of causal attention of a whole prompt."""
        return 2 * self.rows * self.num_q_heads * self.head_dim * self.context * (self.context + 1)


CHECKS = {
    "llama-3-8b": Case(32, 8, 128, 1000),
    "qwen3": Case(16, 8, 128, 777),
    "head_dim 64, sinks, window": Case(64, 8, 64, 1000, options=(("sliding_window", 128),), sinks=True),
    "head_dim 256, cap": Case(8, 4, 256, 500, options=(("soft_cap", 50.0),)),
    "head_dim 80": Case(8, 8, 80, 300),
    "int8": Case(32, 8, 128, 1000, dtype="int8"),
    "int8, head_dim 64": Case(32, 8, 64, 1000, dtype="int8"),
    "float8": Case(32, 8, 128, 1000, dtype="float8_e4m3fn"),
    "4 queries a row": Case(32, 8, 128, 1000, query_len=4),
    "block size 64, long": Case(32, 8, 128, 9000, rows=2, block_size=64),
    "prefill": Case(32, 8, 128, 700, rows=2, query_len=300),
    "prefill, int8": Case(32, 8, 128, 300, rows=1, query_len=300, dtype="int8"),
}
INTERPRETED = ("llama-3-8b", "prefill, int8")  # one of each kernel
DECODE = Case(32, 8, 128, 4096, rows=64)
DECODES = {
    "bfloat16": DECODE,
    "contiguous": dataclasses.replace(DECODE, block_size=64, permuted=False),
    "int8": dataclasses.replace(DECODE, dtype="int8"),
    "one row of 32768": dataclasses.replace(DECODE, context=32768, rows=1),
    "head_dim 64": dataclasses.replace(DECODE, head_dim=64, num_q_heads=64),
}
PREFILL = Case(32, 8, 128, 8192, rows=1, query_len=8192)


def tiny(case: Case) -> Case:
    """The case as far as the interpreter gets with it."""
    query_len = min(case.query_len, 12)
    heads = max(1, case.num_q_heads // case.num_kv_heads)
    return dataclasses.replace(
        case, num_q_heads=heads, num_kv_heads=1, context=40, rows=1, query_len=query_len, block_size=32
    )


def inputs(case: Case) -> tuple[Any, ...]:
    """Random arguments of paged_attention, the pool's scales and stale slots included."""
    blocks = -(-case.context // case.block_size)
    shape = (1, case.rows * blocks + 1, case.block_size, case.num_kv_heads, case.head_dim)
    abstract = jax.eval_shape(lambda: KVPages.zeros(*shape, case.dtype))
    kv_pages = jax.tree.map(functools.partial(noise, jax.random.key(0)), abstract)
    order = jnp.arange(case.rows * blocks)
    order = jax.random.permutation(jax.random.key(1), order) if case.permuted else order
    return (
        jax.random.normal(jax.random.key(2), (case.rows * case.query_len, case.num_q_heads, case.head_dim), "bfloat16"),
        kv_pages,
        (order.reshape(case.rows, blocks) + 1).astype(jnp.int32),
        jnp.full(case.rows, case.context, jnp.int32),
        jnp.arange(case.rows + 1, dtype=jnp.int32) * case.query_len,
    )


def noise(key: jax.Array, x: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == jnp.int8:
        return jax.random.randint(key, x.shape, -127, 128, jnp.int8)
    if x.dtype == jnp.float32:  # scales
        return jax.random.uniform(key, x.shape, minval=0.005, maxval=0.015)
    wide = jax.random.normal(key, x.shape, "bfloat16")
    return (wide * 50).astype(x.dtype) if x.dtype.itemsize == 1 else wide.astype(x.dtype)


class Check:
    """What one run of the program finds out."""

    def __init__(self, interpret: bool):
        self.interpret = interpret
        self.started = time.monotonic()
        self.results: dict[str, Any] = {"failed": []}

    def part(self, name: str, function: Callable[[], Any]) -> None:
        """Runs a part, whatever becomes of it, and keeps what it returns."""
        if time.monotonic() - self.started > SECONDS and not self.interpret:
            print(f"{name}: skipped, {SECONDS} s are over", flush=True)
            self.results["failed"].append(f"{name} (skipped)")
            return
        try:
            result = function()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"{name}: FAILED, {type(error).__name__}: {str(error)[:500]} ({last.filename}:{last.lineno})",
                flush=True,
            )
            self.results["failed"].append(name)
            return
        print(f"{name}: {result}", flush=True)
        self.results[name] = result

    def size(self, case: Case) -> Case:
        return tiny(case) if self.interpret else case

    def attend(self, case: Case, implementation: str, *arguments: Any) -> jax.Array:
        sinks = jnp.linspace(-2, 2, case.num_q_heads) if case.sinks else None
        return paged_attention(
            *arguments,
            layer=0,
            max_query_len=case.query_len,
            sinks=sinks,
            implementation=implementation,
            interpret=self.interpret and implementation == "gpu",
            **dict(case.options),
        )

    def accuracy(self, case: Case) -> dict[str, float]:
        """The largest difference from the float32 reference; raises where it is too large."""
        case = self.size(case)
        arguments = inputs(case)
        wide = (arguments[0].astype(jnp.float32), *arguments[1:])
        expected = jax.jit(functools.partial(self.attend, case, "reference"))(*wide)
        got = jax.jit(functools.partial(self.attend, case, "gpu"))(*arguments).astype(jnp.float32)
        error = float(jnp.abs(got - expected).max() / jnp.abs(expected).max())
        if not error < LARGEST_ERROR:
            raise ValueError(f"the error is {error:.3g} of the largest element, {LARGEST_ERROR} is allowed")
        return {"error": error}

    def seconds(self, step: Callable[..., jax.Array], x: jax.Array, *arguments: Any, steps: int = 20) -> float:
        """Of one step: the median of some runs of a chain of steps, each on the outcome of the one before."""
        steps = 1 if self.interpret else steps

        @jax.jit
        def chain(x: jax.Array, *arguments: Any) -> jax.Array:
            return jax.lax.fori_loop(0, steps, lambda _, x: x + 1e-3 * step(x, *arguments).astype(x.dtype), x)

        chain(x, *arguments).block_until_ready()
        times = []
        for _ in range(1 if self.interpret else REPEATS):
            start = time.perf_counter()
            chain(x, *arguments).block_until_ready()
            times.append((time.perf_counter() - start) / steps)
        return statistics.median(times)

    def copy_bandwidth(self) -> dict[str, float]:
        """Of a device copy, bytes read and written."""
        x = jnp.ones((1 << 10 if self.interpret else 1 << 30,), jnp.bfloat16)
        took = self.seconds(lambda x: x, x)  # the chain itself reads and writes x once
        return {"GB/s": 2 * x.nbytes / took / 1e9}

    def matmul(self) -> dict[str, float]:
        n = 64 if self.interpret else 8192
        x = jax.random.normal(jax.random.key(0), (n, n), "bfloat16") / n
        return {"TFLOP/s": 2 * n**3 / self.seconds(lambda x, y: x @ y, x, x) / 1e12}

    def decode(self, case: Case) -> dict[str, float]:
        case = self.size(case)
        q, *rest = inputs(case)
        took = self.seconds(functools.partial(self.attend, case, "gpu"), q, *rest)
        return self.with_share({"us": took * 1e6, "GB/s": case.kv_bytes / took / 1e9}, "GB/s", "device copy")

    def prefill(self) -> dict[str, float]:
        case = self.size(PREFILL)
        q, *rest = inputs(case)
        took = self.seconds(functools.partial(self.attend, case, "gpu"), q, *rest)
        return self.with_share({"us": took * 1e6, "TFLOP/s": case.flops / took / 1e12}, "TFLOP/s", "matmul")

    def peer(self, make: Callable[..., Any], case: Case, unit: str) -> dict[str, float]:
        """Another implementation on a contiguous or paged cache of the same sizes."""
        case = self.size(case)
        step, q, *rest = make(case)
        took = self.seconds(step, q, *rest)
        work, roof = (case.kv_bytes / 1e9, "device copy") if unit == "GB/s" else (case.flops / 1e12, "matmul")
        return self.with_share({"us": took * 1e6, unit: work / took}, unit, roof)

    def with_share(self, result: dict[str, float], unit: str, roof: str) -> dict[str, float]:
        if roof in self.results:
            result[f"share of {roof}"] = result[unit] / self.results[roof][unit]
        return result

    def overhead(self) -> dict[str, float]:
        """Of paging: the same kernel with permuted blocks of 16 against blocks of 64 that stand in order."""
        return {"paged / contiguous": self.results["decode, bfloat16"]["us"] / self.results["decode, contiguous"]["us"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="tiny shapes in the interpreter, on a CPU")
    check = Check(parser.parse_args().interpret)
    device = jax.devices()[0]
    about = {"device": device.device_kind, "jax": jax.__version__, "python": platform.python_version()}
    check.results |= about | {"capability": str(getattr(device, "compute_capability", "none"))}
    print(about, flush=True)

    for name, case in CHECKS.items() if not check.interpret else [(name, CHECKS[name]) for name in INTERPRETED]:
        check.part(f"check, {name}", functools.partial(check.accuracy, case))
    check.part("device copy", check.copy_bandwidth)
    check.part("matmul", check.matmul)
    for name, case in list(DECODES.items())[: 2 if check.interpret else None]:
        check.part(f"decode, {name}", functools.partial(check.decode, case))
    check.part("overhead of paging", check.overhead)
    check.part("prefill", check.prefill)
    if not check.interpret:
        check.part("peer, Triton paged_attention", lambda: check.peer(gpu_peers.triton_paged, DECODE, "GB/s"))
        check.part("peer, cuDNN decode", lambda: check.peer(gpu_peers.cudnn_decode, DECODE, "GB/s"))
        check.part("peer, cuDNN prefill", lambda: check.peer(gpu_peers.cudnn_prefill, PREFILL, "TFLOP/s"))
    check.results["seconds"] = time.monotonic() - check.started
    print(json.dumps(check.results))
    return 1 if check.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
