"""pagedjax.params: which trees are taken, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own_gpt
import pytest
from flax import nnx

from pagedjax.params import device_bytes, param_dtype, place_params, replace_params

MODEL = own_gpt.OwnGPT(nnx.Rngs(0))
STATE = nnx.state(MODEL)  # with the dropout's key and counter
PARAMS = nnx.state(MODEL, nnx.Param)


def paths(params: Any) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)}


def with_norm_scale(value: Any) -> dict[str, Any]:
    """The parameters as a nested dict, one of them replaced."""
    plain = nnx.to_pure_dict(PARAMS)
    return plain | {"norm": plain["norm"] | {"scale": value}}


def test_random_keys_and_counters_have_no_dtype_of_their_own() -> None:
    assert param_dtype(STATE) == jnp.float32
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    assert param_dtype(place_params(halved, nnx.merge_state(STATE, halved))) == jnp.bfloat16
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(PARAMS)]
    assert sum(sizes) < device_bytes(STATE) < sum(sizes) + 100


@pytest.mark.parametrize("place", [place_params, replace_params])
def test_what_is_no_parameter_stays_where_it_is_left_out(place: Callable[..., Any]) -> None:
    other = jax.tree.map(lambda leaf: leaf + 1, PARAMS)
    placed = place(other, STATE)
    assert paths(placed) == paths(STATE) > paths(PARAMS)
    present, given, found = (dict(nnx.to_flat_state(state)) for state in (STATE, other, placed))
    for path, variable in found.items():
        assert variable.get_value() is given.get(path, present[path]).get_value()
    with pytest.raises(ValueError, match=r"missing \['norm.scale'\], unexpected \[\]"):
        place(
            {name: part for name, part in nnx.to_pure_dict(PARAMS).items() if name != "norm"}
            | {"norm": {"bias": np.zeros(64, np.float32)}},
            STATE,
        )


def test_a_module_stands_for_its_state() -> None:
    assert jax.tree.leaves(place_params(MODEL, STATE))[0] is jax.tree.leaves(STATE)[0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "the parameters are a NoneType; pass nnx.state"),
        (nnx.split(MODEL), r"the parameters are a tuple; pass nnx.state\(model\)"),
        (with_norm_scale(1.0), "parameter norm.scale is a float; pass an array"),
        (with_norm_scale([1.0] * 64), "parameter norm.scale is a list; pass an array"),
        (
            with_norm_scale(jnp.zeros(64, jnp.bfloat16)),
            r"norm.scale is bfloat16\[64\]; the engine has float32\[64\]; cast it, or .*Decoder.abstract",
        ),
        (with_norm_scale(np.zeros(3, np.float32)), r"norm.scale is float32\[3\]; .* a model with its config"),
        (with_norm_scale(jax.ShapeDtypeStruct((64,), jnp.float32)), "norm.scale is a shape without values"),
    ],
    ids=["None", "tuple", "float", "list", "dtype", "shape", "abstract"],
)
def test_the_message_names_what_is_wrong(params: Any, message: str) -> None:
    for place in (place_params, replace_params):
        with pytest.raises(ValueError, match=message):
            place(params, STATE)


def test_parameters_of_a_function_that_is_being_traced() -> None:
    with pytest.raises(ValueError, match=r"parameter .* is traced; call the engine outside of jit and grad"):
        jax.jit(lambda params: place_params(params, STATE))(PARAMS)
