"""The example's GPT as its author might have trained it: with dropout, and with a number of positions of his own."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import own_model

MAX_LEN = 40


class OwnGPT(own_model.PagedGPT):
    """Has variables that are no parameters: the dropout's random key and its counter."""

    config = dataclasses.replace(own_model.PagedGPT.config, max_position_embeddings=MAX_LEN)

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.places = nnx.Embed(MAX_LEN, own_model.WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return super().logits(self.dropout(hidden))
