"""`layer_matmul`: x times the matrix of one layer, of the stacked weights of all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _platform


def layer_matmul(
    x: jax.Array, stack: jax.Array, layer: jax.typing.ArrayLike, num_rows: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """x @ stack[layer] inside a loop over layers, on a CPU without taking the matrix out of the stack.

    XLA for CPU copies a layer's weights out of a stack before it multiplies, and packs them anew for every product: a
    step of a few rows is nothing but reading weights, and that more than doubles it. The kernel for CPUs reads them
    once, where they lie; a row's result is the same bits whatever rows are beside it. Where it can't (other dtypes, N
    not a multiple of the machine's vector) or is slower (bfloat16, where x has more than 16 rows), and elsewhere than
    on a CPU, it is x @ stack[layer] at full precision.

    For inference: it has no gradient.

    Args:
        x: [..., K].
        stack: [num_layers, K, N], float32 or bfloat16 for the kernel.
        layer: i32[], which matrix; may be traced.
        num_rows: i32[], rows of x [T, K] that count, the first ones; may be traced. The kernel computes no others, and
            gives 0 for them. None: all.

    Returns:
        [..., N] in x's dtype; what is beyond `num_rows` means nothing.

    Raises:
        ValueError: stack has not three axes, or not as many lines as x has columns.
    """
    if stack.ndim != 3 or stack.shape[0] == 0 or stack.shape[1] != x.shape[-1]:
        raise ValueError(
            f"stack has shape {stack.shape} and x {x.shape}; they must be [num_layers, K, N], at least one layer, and "
            "[..., K]"
        )
    if _platform.device_of_this_trace().platform == "cpu":
        from pallas_kernels import _cpu  # numba is imported where it is used

        if _cpu.can_multiply(x, stack):
            return _cpu.multiply(x, stack, layer, num_rows)
    matrix = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    return jnp.dot(x, matrix, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)
