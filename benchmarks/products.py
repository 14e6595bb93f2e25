"""A model's matrix products on this machine: seconds by the number of rows, in a few arrangements of the weights.

Weights are random and have the model's sizes. What lies between the products of a layer is left out, but for the least
that uses all of every result.

Dimensions: L layers, T rows of a product, E hidden size, V vocabulary, K and N a matrix's input and output size.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import ModelConfig
from pallas_kernels import layer_matmul

Multiply = Callable[[jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds that a product takes by its rows.

    Attributes:
        rows: ascending.
        seconds: of each.
        arrangements: of the weights, the fastest for each.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    arrangements: tuple[str, ...]

    @classmethod
    def fastest(cls, found: dict[str, dict[int, float]]) -> Curve:
        """From seconds by arrangement and rows. More rows may do for fewer, where that is faster."""
        rows = sorted({count for seconds in found.values() for count in seconds})
        best, chosen = [], []
        for count in rows:
            enough = [(s, name) for name, seconds in found.items() for size, s in seconds.items() if size >= count]
            seconds, name = min(enough)
            best.append(seconds)
            chosen.append(name)
        return cls(tuple(rows), tuple(best), tuple(chosen))

    def at(self, count: int) -> float:
        """Seconds for so many rows; 0 for none.

        Raises:
            ValueError: they are more than were measured.
        """
        if count > self.rows[-1]:
            raise ValueError(f"{count} rows are more than the {self.rows[-1]} that were measured; raise --rows")
        return float(np.interp(count, self.rows, self.seconds)) if count else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Random matrices of a model's sizes, [L, K, N] each, scaled so that a chain of them neither grows nor fades."""

    qkv: jax.Array
    out: jax.Array
    gate_up: jax.Array
    down: jax.Array
    embedding: jax.Array  # [V, E], the head of a model that ties it

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> Weights:
        rng = np.random.default_rng(0)
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        def stack(size_in: int, size_out: int, num_terms: int) -> jax.Array:
            shape = (config.num_layers, size_in, size_out)
            matrix = rng.standard_normal(shape, np.float32) / math.sqrt(size_in * num_terms)
            return jnp.asarray(matrix.astype(jnp.dtype(dtype)))

        head = rng.standard_normal((config.vocab_size, hidden), np.float32) / math.sqrt(hidden)
        return cls(
            qkv=stack(hidden, q_size + 2 * kv_size, 1),
            out=stack(q_size, hidden, 3),  # of the sum of q, k and v
            gate_up=stack(hidden, 2 * inner, 1),
            down=stack(inner, hidden, 2),  # of the sum of both halves
            embedding=jnp.asarray(head.astype(jnp.dtype(dtype))),
        )

    @property
    def stacks(self) -> tuple[jax.Array, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def num_layer_weights(self) -> int:
        return sum(stack.size for stack in self.stacks)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks) + self.embedding.nbytes


def layer_products(x: jax.Array, matrices: Sequence[Any], q_size: int, multiply: Multiply) -> jax.Array:
    """A layer's products of x [T, E], each from the last, with the least between them that uses all of every result."""
    qkv, out, gate_up, down = matrices
    product = multiply(x, qkv)
    q, k, v = jnp.split(product, [q_size, (q_size + product.shape[1]) // 2], axis=1)
    x = multiply(q + jnp.tile(k + v, q_size // k.shape[1]), out)
    gate, up = jnp.split(multiply(x, gate_up), 2, axis=1)
    return multiply(gate + up, down)


def unrolled(x: jax.Array, layers: Sequence[Any], q_size: int, multiply: Multiply = jnp.dot) -> jax.Array:
    for matrices in layers:
        x = layer_products(x, matrices, q_size, multiply)
    return x


def scanned(x: jax.Array, stacks: tuple[jax.Array, ...], q_size: int) -> jax.Array:
    return jax.lax.scan(lambda x, matrices: (layer_products(x, matrices, q_size, jnp.dot), None), x, stacks)[0]


def kernel(x: jax.Array, stacks: tuple[jax.Array, ...], q_size: int) -> jax.Array:
    def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
        return layer_products(x, stacks, q_size, lambda x, stack: layer_matmul(x, stack, layer)), None

    return jax.lax.scan(body, x, jnp.arange(len(stacks[0]), dtype=jnp.int32))[0]


def transposed(x: jax.Array, layers: Sequence[Any], q_size: int) -> jax.Array:
    return unrolled(x, layers, q_size, lambda x, matrix: jnp.einsum("tk,nk->tn", x, matrix))


def arrangements(weights: Weights) -> dict[str, tuple[Callable[..., jax.Array], Any]]:
    """Ways to hold all layers' matrices, each with the function of x [T, E] and them."""
    apart = [tuple(stack[layer] for stack in weights.stacks) for layer in range(len(weights.qkv))]
    turned = [tuple(jnp.asarray(np.ascontiguousarray(np.asarray(m).T)) for m in matrices) for matrices in apart]
    return {
        "[L, K, N], a scan": (scanned, weights.stacks),
        "[L, K, N], layer_matmul": (kernel, weights.stacks),
        "L [K, N], unrolled": (unrolled, apart),
        "L [N, K], unrolled": (transposed, turned),
    }


def heads(weights: Weights) -> dict[str, tuple[Callable[..., jax.Array], Any]]:
    """Ways to hold the LM head, each with the function of x [T, E] and it, which gives float32 logits [T, V]."""

    def by(product: str) -> Callable[..., jax.Array]:
        return lambda x, head: jnp.einsum(product, x, head, preferred_element_type=jnp.float32)

    turned = jnp.asarray(np.ascontiguousarray(np.asarray(weights.embedding).T))
    return {"[V, E]": (by("te,ve->tv"), weights.embedding), "[E, V]": (by("te,ev->tv"), turned)}


def measure_products(config: ModelConfig, weights: Weights, rows: Sequence[int], repeats: int) -> tuple[Curve, Curve]:
    """Of all layers, and of the head."""
    dtype, q_size = weights.embedding.dtype, config.num_q_heads * config.head_dim
    inputs = {count: jnp.ones((count, config.hidden_size), dtype) for count in rows}

    def timed(function: Callable[..., jax.Array], held: Any, **static: int) -> dict[int, float]:
        found = {}
        for count, x in inputs.items():
            program = jax.jit(lambda x, held: function(x, held, **static)).lower(x, held).compile()
            found[count] = fastest(lambda: jax.block_until_ready(program(x, held)), repeats)  # noqa: B023
        return found

    layers = {name: timed(function, held, q_size=q_size) for name, (function, held) in arrangements(weights).items()}
    head = {name: timed(function, held) for name, (function, held) in heads(weights).items()}
    return Curve.fastest(layers), Curve.fastest(head)


def fastest(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
