"""x times the matrix of one layer, of the stacked weights as they lie: nothing is cut out, copied or packed.

The columns are divided over the threads. A thread walks its part of the matrix in panels of PANEL lines, a panel in
tiles as wide as the registers hold, and fetches the next tile into the cache while it computes one.

Dimensions: T rows of x, L layers, K and N a matrix's input and output size.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from numba import njit

from pallas_kernels._cpu import call_frame, vectors

PANEL = 96  # lines; fewer fit the cache better for few rows, more pass x and y through it less often for many
MOST_BFLOAT16_ROWS = 16  # with more, XLA's own product of bfloat16 is the faster one, by the chip's instructions for it


def can_multiply(x: jax.Array, stack: jax.Array) -> bool:
    """Whether `multiply` takes this x and stack [L, K, N], and is fast at it."""
    if (
        any(a.dtype.name not in vectors.BITS for a in (x, stack))
        or stack.shape[-1] % vectors.LANES
        or vectors.why_not()
    ):
        return False
    return stack.dtype.name == "float32" or math.prod(x.shape[:-1]) <= MOST_BFLOAT16_ROWS


def multiply(
    x: jax.Array, stack: jax.Array, layer: jax.typing.ArrayLike, num_rows: jax.typing.ArrayLike | None
) -> jax.Array:
    """x [..., K] times stack[layer], stack [L, K, N]: [..., N] in x's dtype, summed in float32; 0 from num_rows on."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    shape = jax.ShapeDtypeStruct((rows.shape[0], stack.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(_target(vectors.BITS[stack.dtype.name]), shape, vmap_method="sequential")
    numbers = jnp.stack([jnp.asarray(n, jnp.int32) for n in (layer, rows.shape[0] if num_rows is None else num_rows)])
    return call(rows, stack, numbers).reshape(*x.shape[:-1], stack.shape[-1]).astype(x.dtype)


@functools.cache
def _target(bits: int) -> str:
    name = f"pagedjax_product_{bits}"
    call_frame.register(name, _kernel(bits), _num_items)
    return name


def _kernel(bits: int) -> Any:
    product, width = vectors.product(bits), bits // 8
    ahead = width * vectors.TILE_COLUMNS

    @njit
    @call_frame.named(bits)
    def kernel(frame, item, num_items):  # type: ignore[no-untyped-def]
        x, x_shape = call_frame.argument(frame, 0)
        stack, stack_shape = call_frame.argument(frame, 1)
        layer, wanted_rows = call_frame.integers(call_frame.argument(frame, 2)[0], 2)
        y, _ = call_frame.result(frame, 0)
        num_rows, num_layers, num_terms, num_columns = x_shape[0], stack_shape[0], stack_shape[1], stack_shape[2]
        layer = min(max(layer + num_layers if layer < 0 else layer, 0), num_layers - 1)
        w = stack + width * layer * num_terms * num_columns
        num_tiles = -(-num_columns // vectors.TILE_COLUMNS)
        first = num_tiles * item // num_items * vectors.TILE_COLUMNS
        last = min(num_tiles * (item + 1) // num_items * vectors.TILE_COLUMNS, num_columns)
        for row in range(num_rows):
            call_frame.floats(y + 4 * (row * num_columns + first), last - first)[:] = 0
        next_panel = width * (PANEL * num_columns - (last - first - vectors.TILE_COLUMNS))
        for term in range(0, num_terms, PANEL):
            product(
                min(wanted_rows, num_rows),
                last - first,
                y + 4 * first,
                4 * num_columns,
                x + 4 * term,
                4 * num_terms,
                w + width * (term * num_columns + first),
                width * num_columns,
                min(PANEL, num_terms - term),
                ahead,
                next_panel,
            )

    return kernel


@njit
def _num_items(frame, num_threads):  # type: ignore[no-untyped-def]
    _, stack_shape = call_frame.argument(frame, 1)
    return max(1, min(num_threads, -(-stack_shape[2] // vectors.TILE_COLUMNS)))
