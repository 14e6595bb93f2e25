"""The parameter tree written down once more agrees with the model's own and with what the loaders allocate."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import ModelConfig
from pagedjax.decoder import Decoder
from pagedjax.loaders import gguf, layout
from pagedjax.loaders.param_shapes import flatten, float_dtype, param_shapes

PLAIN = ModelConfig("llama", 10, 6, 5, 3, 4, 2, 8, 64, tie_word_embeddings=True)
FULL = dataclasses.replace(PLAIN, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True, tie_word_embeddings=False)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_same_tree_everywhere(config):
    expected = flatten(param_shapes(config))
    places = layout.places(config, gguf.NAMES)
    assert {name: leaf.shape for name, leaf in flatten(layout.allocate(places, np.dtype("f4"))).items()} == expected
    state = nnx.state(Decoder.abstract(config), nnx.Param)
    found = {
        ".".join(str(key.key) for key in path if hasattr(key, "key")): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    }
    assert found == expected


def test_float_dtype():
    assert float_dtype("bfloat16") == jnp.bfloat16
    assert float_dtype(np.dtype("float32")) == np.float32
    for wrong in ("float64", "int32", "floaty", jnp.float8_e4m3fn):
        with pytest.raises(ValueError, match="parameters can be float32, bfloat16, float16"):
            float_dtype(wrong)
