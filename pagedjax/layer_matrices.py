"""Weight matrices of all layers, each an array of its own: how the engine holds them on a CPU.

A scan over stacked layers hands every layer a slice. XLA's CPU products do not read from the middle of an array, so it
copies the slice first, and a decode step of a few rows is nothing but reading weights: the copies take half of it and
more. A branch of a conditional, on the other hand, gets its operands as they are. So each layer's matrix becomes an
array, which on a CPU is the same memory seen otherwise, and a product inside the scan branches on the layer. SmolLM2's
120 products compile in a tenth of a second more for it, and in five for a single row, whose products are LLVM's loops.

Dimensions: L layers, K and N a matrix's input and output size.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ALIGNMENT = 64  # bytes; a host buffer that begins elsewhere is copied when it becomes an array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerMatrices:
    """What stands for a stacked matrix [L, K, N] in a state."""

    matrices: tuple[jax.Array, ...]  # L times [K, N]

    @classmethod
    def views(cls, stacked: jax.Array) -> LayerMatrices:
        """The layers of [L, K, N] on a CPU, without a copy.

        While they live, `stacked` can't be donated: a program it is donated to takes a buffer of its own.
        """
        host = np.asarray(stacked)
        return cls(tuple(jax.device_put(matrix, stacked.sharding, may_alias=True) for matrix in host))

    def of(self, layer: jax.Array) -> LayerMatrix:
        return LayerMatrix(self.matrices, layer)


@dataclasses.dataclass(frozen=True)
class LayerMatrix:
    """The matrix [K, N] of one layer, i32[], inside a scan over layers."""

    matrices: tuple[jax.Array, ...]
    layer: jax.Array

    def multiply(self, x: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
        """x [..., K] times the matrix: [..., N]."""
        products = [functools.partial(_multiply, matrix=matrix, precision=precision) for matrix in self.matrices]
        return jax.lax.switch(self.layer, products, x)


class Linear(nnx.Linear):
    """nnx.Linear, whose kernel may be a `LayerMatrix`."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        kernel = self.kernel.get_value()
        if not isinstance(kernel, LayerMatrix):
            return super().__call__(inputs, out_sharding)
        y = kernel.multiply(inputs, self.precision)
        return y if self.bias is None else y + self.bias[...]


def separate(layers: nnx.State) -> nnx.State:
    """Stacked parameters [L, ...] on one CPU with `LayerMatrices` in place of the kernels; other states as they are.

    A kernel whose layers can't all begin at an aligned address stays stacked: they would be copied.
    """
    devices = {device for leaf in jax.tree.leaves(layers) for device in leaf.devices()}
    if [device.platform for device in devices] != ["cpu"]:
        return layers
    parts = {}
    for path, variable in nnx.to_flat_state(layers):
        kernel = variable.get_value()
        if path[-1] == "kernel" and kernel.nbytes // kernel.shape[0] % ALIGNMENT == 0:
            variable = variable.replace(LayerMatrices.views(kernel))
        parts[path] = variable
    return nnx.from_flat_state(parts)


class ScannedLayers:
    """Parameters of layers as a scan takes them, apart in what is scanned over and what is branched on.

    Args:
        layers: stacked parameters, with `LayerMatrices` or without.
    """

    def __init__(self, layers: nnx.State) -> None:
        self._leaves, self._structure = jax.tree.flatten(layers, is_leaf=lambda x: isinstance(x, LayerMatrices))

    @property
    def scanned(self) -> list[jax.Array]:
        """[L, ...] each."""
        return [leaf for leaf in self._leaves if not isinstance(leaf, LayerMatrices)]

    def layer(self, index: jax.Array, slices: list[jax.Array]) -> Any:
        """The parameters of a layer, of its number i32[] and its slices of `scanned`."""
        rest = iter(slices)
        leaves = [leaf.of(index) if isinstance(leaf, LayerMatrices) else next(rest) for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


def _multiply(x: jax.Array, *, matrix: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
    return jnp.dot(x, matrix, precision=precision)
