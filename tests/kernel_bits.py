"""What the kernels for CPUs compute of fixed inputs, as a hash; run as a program, of a process of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from pallas_kernels import layer_matmul, paged_attention


def product(dtype: str) -> tuple[Callable[..., Any], tuple]:
    """A product of many tiles, with a tile's rest in each dimension."""
    rng = np.random.default_rng(0)
    x, stack = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((13, 333), (2, 333, 1040)))
    return jax.jit(layer_matmul), (x, stack, jnp.int32(1))


def attention(dtype: str, head_dim: int) -> tuple[Callable[..., Any], tuple]:
    """Decode, whole and chunked prefill and empty rows, with every option."""
    problem = oracle.make(1, [150, 0, 20, 7, 1, 120, 64], [1, 0, 20, 0, 1, 70, 2], dtype=dtype, head_dim=head_dim)

    @jax.jit
    def attend(*arguments: Any) -> Any:
        options = {"soft_cap": 3.0, "sliding_window": 100, "sinks": jnp.asarray([0.5, 1.0, -1.0, 2.0])}
        return paged_attention(*arguments, **options, layer=1, return_lse=True, implementation="cpu")

    return attend, problem.arguments()


# Each a kernel of its own.
PARTS: dict[str, Callable[[], tuple[Callable[..., Any], tuple]]] = {
    "product": lambda: product("float32"),
    "product_bfloat16": lambda: product("bfloat16"),
    "attention": lambda: attention("float32", 64),
    "attention_bfloat16": lambda: attention("bfloat16", 16),
}


def digest(result: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result))).hexdigest()


def digest_of(part: str) -> str:
    function, arguments = PARTS[part]()
    return digest(function(*arguments))


if __name__ == "__main__":
    hashes = {part: digest_of(part) for part in sys.argv[1:]}
    from pallas_kernels._cpu import call_frame

    hits = [sum(compiled.cache_hits for compiled in call_frame._kept), len(call_frame._kept)]
    print(json.dumps({"hashes": hashes, "from_cache": hits}))
