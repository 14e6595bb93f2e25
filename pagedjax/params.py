"""Parameters on their way into the engine: checked against the model, put on the device, never copied there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

# Where a parameter belongs, by its path and itself; as `pagedjax.tensor_parallel.TensorParallel.param_sharding`.
ShardingOf = Callable[[tuple[str, ...], Any], Sharding]


def place_params(params: Any, like: Any, sharding_of: ShardingOf | None = None) -> Any:
    """Parameters as a state like `like`, on the device; arrays that are where they belong are used as they are.

    Args:
        params: an nnx.State, a nested dict of arrays with the same names, or a module that has them. What of `like` is
            no nnx.Param, such as a dropout's random key, may be left out and stays as it is.
        like: an nnx.State of arrays or shapes.
        sharding_of: where each belongs; None: arrays stay where they are, and what is none goes to the default device.

    Raises:
        ValueError: a parameter is missing, unexpected, no array, traced, deleted, or of another shape or dtype; it is
            named.
    """
    placed = {}
    for key, value, variable in _matched(params, like):
        if sharding_of is not None:
            value = _put(value, sharding_of(tuple(map(str, key)), value))
        placed[key] = variable.replace(value if isinstance(value, jax.Array) else jnp.asarray(value))
    return nnx.from_flat_state(placed)


def replace_params(params: Any, present: Any) -> Any:
    """Parameters for a program that runs with `present` ones: as `place_params`, but no array moves.

    Args:
        params: as in `place_params`; what is no array of jax is put where the present one is.
        present: an nnx.State of arrays.

    Raises:
        ValueError: as in `place_params`, or an array is sharded otherwise than the present one.
    """
    placed = {}
    for key, value, variable in _matched(params, present):
        sharding = _value(variable).sharding
        if isinstance(value, jax.Array) and not value.sharding.is_equivalent_to(sharding, value.ndim):
            raise ValueError(
                f"parameter {_name(key)} has {value.sharding}, and the engine {sharding}; place it so before "
                "(pagedjax.tensor_parallel.param_shardings tells how), since the engine makes no copies"
            )
        placed[key] = variable.replace(_put(value, sharding))
    return nnx.from_flat_state(placed)


def check_on_one_device(params: Any) -> None:
    """A ValueError where a parameter lies on several devices; it is named."""
    for key, variable in nnx.to_flat_state(params):
        num_devices = len(_value(variable).sharding.device_set)
        if num_devices > 1:
            raise ValueError(f"parameter {_name(key)} lies on {num_devices} devices; give the engine their mesh=")


def param_dtype(params: Any) -> jnp.dtype:
    """The dtype that the parameters' activations have: random keys and counters have no say."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    return jnp.result_type(*(dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)))


def device_bytes(params: Any) -> int:
    """Bytes that one device has of them."""
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params))
    sizes = (leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return sum(int(np.prod(shape)) * size for shape, size in zip(shards, sizes, strict=True))


def _matched(params: Any, like: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(path, value, the variable of `like`) of each parameter, checked."""
    given, expected = _flat(params), _flat(like)
    flat = {key: variable for key, variable in expected.items() if _may_be_left_out(variable)} | given
    if flat.keys() != expected.keys():
        missing = sorted(_name(key) for key in expected.keys() - flat.keys())
        extra = sorted(_name(key) for key in flat.keys() - expected.keys())
        raise ValueError(f"the parameters do not match the model: missing {missing}, unexpected {extra}")
    for key, variable in expected.items():
        value = _value(flat[key])
        _check(_name(key), value, _value(variable))
        yield key, value, variable


def _flat(params: Any) -> dict[tuple[Any, ...], Any]:
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if not isinstance(params, Mapping):
        raise ValueError(
            f"the parameters are a {type(params).__name__}; pass nnx.state(model), or a nested dict of arrays with "
            "the same names"
        )
    return dict(nnx.to_flat_state(params if isinstance(params, nnx.State) else nnx.State(params)))


def _may_be_left_out(variable: Any) -> bool:
    """Whether a trainer that hands over its parameters alone does not have it."""
    return isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.Param)


def _check(name: str, value: Any, want: Any) -> None:
    """Raises ValueError for what can't take the place of an array like `want`."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(f"parameter {name} is a shape without values; pass params= with arrays")
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"parameter {name} is a {type(value).__name__}; pass an array")
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"parameter {name} is traced; call the engine outside of jit and grad, with the arrays that come out of "
            "them, or generate inside with pagedjax.generate"
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(f"parameter {name} was donated or deleted; pass live arrays")
    if value.shape == want.shape and value.dtype == want.dtype:
        return
    remedy = "cast it, or make the engine's model in that dtype (Decoder.abstract(config, dtype))"
    if value.shape != want.shape:
        remedy = "pass parameters of a model with its config"
    raise ValueError(
        f"parameter {name} is {value.dtype}{list(value.shape)}; the engine has {want.dtype}{list(want.shape)}; {remedy}"
    )


def _put(value: Any, sharding: Sharding) -> jax.Array:
    """A value with a sharding: itself, where it lies so already, whatever its own sharding is called."""
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if value.is_fully_addressable == sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
    # Every process has all of the value and hands its own devices their parts: nothing is sent.
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _name(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
