"""The mock model, made to repeat itself: each token likes to be followed by its partner, 2 by 3 and 3 by 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mock_model
import numpy as np

from pagedjax.batch import Batch
from pallas_kernels import KVPages

# Dimensions: T token places, N tokens of one sequence, V token ids.

BONUS = 5.0  # the logits are below 4 without it, so that the partner often wins and often does not


class PairedDecoder(mock_model.MockDecoder):
    """Adds a bonus to the partner's logit."""

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None = None
    ) -> tuple[jax.Array, KVPages]:
        bits, kv_pages = super().paged(tokens, kv_pages, batch, implementation=implementation)
        return jnp.concatenate([bits, tokens[:, None].astype(bits.dtype)], axis=1), kv_pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        partner = hidden[..., -1:].astype(jnp.int32) ^ 1
        return super().logits(hidden[..., :-1]) + BONUS * (jnp.arange(mock_model.PADDED) == partner)


_raw_logits = mock_model.raw_logits


def paired_logits(tokens: Sequence[int], *salts: Any) -> np.ndarray:
    """f64[N, V], of `PairedDecoder`."""
    return _raw_logits(tokens, *salts) + BONUS * np.eye(mock_model.VOCAB)[np.asarray(tokens) ^ 1]
