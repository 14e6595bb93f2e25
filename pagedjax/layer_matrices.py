"""Weight matrices of all layers, multiplied where they lie: how the engine's programs read weights on a CPU.

A scan over stacked layers hands every layer a slice, which XLA for CPU copies; `pallas_kernels.layer_matmul` takes the
stack and the number of the layer instead. So the kernels of a state are marked, the same arrays, and the scan over
layers leaves marked ones whole.

Dimensions: L layers, K and N a matrix's input and output size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from pallas_kernels import layer_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerMatrices:
    """What stands for a stacked matrix [L, K, N] in a state."""

    stack: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerMatrix:
    """The matrix [K, N] of one layer, i32[], inside a scan over layers."""

    stack: jax.Array
    layer: jax.Array
    num_rows: jax.Array | None  # of what it is multiplied with: how many count


class Linear(nnx.Linear):
    """nnx.Linear, whose kernel may be a `LayerMatrix`."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        kernel = self.kernel.get_value()
        if not isinstance(kernel, LayerMatrix):
            return super().__call__(inputs, out_sharding)
        y = layer_matmul(inputs, kernel.stack, kernel.layer, kernel.num_rows)
        return y if self.bias is None else y + self.bias[...]


def whole(layers: nnx.State) -> nnx.State:
    """Stacked parameters [L, ...] on one CPU with `LayerMatrices` in place of the kernels, which have to be those of a
    `Linear` of this module; other states as they are."""
    devices = {device for leaf in jax.tree.leaves(layers) for device in leaf.devices()}
    if [device.platform for device in devices] != ["cpu"]:
        return layers
    parts = {}
    for path, variable in nnx.to_flat_state(layers):
        if path[-1] == "kernel":
            variable = variable.replace(LayerMatrices(variable.get_value()))
        parts[path] = variable
    return nnx.from_flat_state(parts)


class ScannedLayers:
    """Parameters of layers as a scan takes them, apart in what is scanned over and what stays whole.

    Args:
        layers: stacked parameters, with `LayerMatrices` or without.
        num_rows: i32[], how many of the scan's tokens count; None: all.
    """

    def __init__(self, layers: nnx.State, num_rows: jax.Array | None) -> None:
        self._leaves, self._structure = jax.tree.flatten(layers, is_leaf=lambda x: isinstance(x, LayerMatrices))
        self._num_rows = num_rows

    @property
    def scanned(self) -> list[jax.Array]:
        """[L, ...] each."""
        return [leaf for leaf in self._leaves if not isinstance(leaf, LayerMatrices)]

    def layer(self, index: jax.Array, slices: list[jax.Array]) -> Any:
        """The parameters of a layer, of its number i32[] and its slices of `scanned`."""
        rest = iter(slices)
        leaves = [
            LayerMatrix(leaf.stack, index, self._num_rows) if isinstance(leaf, LayerMatrices) else next(rest)
            for leaf in self._leaves
        ]
        return jax.tree.unflatten(self._structure, leaves)
