"""Parameters on their way into the engine: checked against the model, put on the device, never copied there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def place_params(params: Any, like: Any) -> Any:
    """Parameters as a state like `like`, on the device; arrays that are there already stay where they are.

    Args:
        params: an nnx.State, or a nested dict of arrays with the same names.
        like: an nnx.State of arrays or shapes.

    Raises:
        ValueError: a parameter is missing, unexpected, deleted, or of another shape or dtype; it is named.
    """
    if not isinstance(params, nnx.State):
        params = nnx.State(params)
    flat, expected = dict(nnx.to_flat_state(params)), dict(nnx.to_flat_state(like))
    if flat.keys() != expected.keys():
        missing = sorted(".".join(map(str, key)) for key in expected.keys() - flat.keys())
        extra = sorted(".".join(map(str, key)) for key in flat.keys() - expected.keys())
        raise ValueError(f"the parameters do not match the model: missing {missing}, unexpected {extra}")
    placed = {}
    for key, variable in expected.items():
        value, name = _value(flat[key]), ".".join(map(str, key))
        if isinstance(value, jax.ShapeDtypeStruct):
            raise ValueError(f"parameter {name} is a shape without values; pass params= with arrays")
        if isinstance(value, jax.Array) and value.is_deleted():
            raise ValueError(f"parameter {name} was donated or deleted; pass live arrays")
        want = _value(variable)
        if value.shape != want.shape or value.dtype != want.dtype:
            raise ValueError(
                f"parameter {name} is {value.dtype}{list(value.shape)}; the engine has {want.dtype}{list(want.shape)}"
            )
        placed[key] = variable.replace(value if isinstance(value, jax.Array) else jnp.asarray(value))
    return nnx.from_flat_state(placed)


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def param_dtype(params: Any) -> jnp.dtype:
    """The dtype that the parameters' activations have."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    return jnp.result_type(*dtypes)
