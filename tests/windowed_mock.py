"""The mock model with sliding windows: a layer's part of the hash covers the tokens that its window shows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mock_engine
import numpy as np
from mock_model import CONFIG, NUM_LAYERS, VOCAB, MockDecoder, mix

import pallas_kernels
from pagedjax import LLM
from pagedjax.batch import Batch
from pallas_kernels import KVPages

# Dimensions: T token places, R rows, M tokens a row's blocks hold.

WINDOWS: dict[str, tuple[int | None, ...]] = {"local": (6, 4), "local and global": (4, None)}  # of each layer


class WindowedDecoder(MockDecoder):
    """Layer i sees `windows[i]` tokens, the query's own among them; None is all."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        super().__init__()
        self.config = dataclasses.replace(CONFIG, sliding_windows=windows)

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None = None
    ) -> tuple[jax.Array, KVPages]:
        """As the mock's; what lies behind a window cancels out, whatever is read there."""
        found = jnp.zeros(tokens.shape, jnp.uint32)
        for layer, window in enumerate(self.config.sliding_windows or ()):
            stored = tokens.astype(jnp.float32) * (2 * NUM_LAYERS) + 2 * layer
            k = jnp.broadcast_to(stored[:, None, None], (*tokens.shape, 1, CONFIG.head_dim))
            kv_pages = pallas_kernels.write_kv(kv_pages, layer, k, k + 1, batch.slot_mapping)
            read = jax.vmap(functools.partial(pallas_kernels.gather_kv, kv_pages, layer))
            for part in read(batch.block_tables, batch.seq_lens):  # [R, M, 1, D]
                places = jnp.arange(part.shape[1], dtype=jnp.uint32)
                hashes = mix(jnp.round(part[:, :, 0, layer]).astype(jnp.int32).astype(jnp.uint32), places)
                sums = jnp.cumsum(hashes, axis=1, dtype=jnp.uint32)  # [R, M]
                found += sums.at[batch.rows, batch.positions].get(mode="fill", fill_value=0)
                if window is not None:
                    behind = jnp.where(batch.positions >= window, batch.positions - window, part.shape[1])
                    found -= sums.at[batch.rows, behind].get(mode="fill", fill_value=0)
        return (found[:, None] >> jnp.arange(32, dtype=jnp.uint32) & 1).astype(jnp.float32), kv_pages


def greedy(prompt: Sequence[int], windows: tuple[int | None, ...], max_tokens: int) -> list[int]:
    """What the model generates, from the token ids alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        places = np.arange(len(tokens), dtype=np.uint32)
        total = np.uint32(0)
        for layer, window in enumerate(windows):
            for part in (2 * layer, 2 * layer + 1):
                hashes = mix(np.asarray(tokens, np.uint32) * np.uint32(2 * NUM_LAYERS) + np.uint32(part), places)
                total = np.sum([total, *hashes[-(window or len(tokens)) :]], dtype=np.uint32)
        logits = mix(np.asarray([total]), np.arange(VOCAB, dtype=np.uint32)) >> np.uint32(22)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


@functools.cache
def engine(kind: str, **options: Any) -> LLM:
    """An engine on a model with these of the `WINDOWS`, with room for eight rows; made once for all tests."""
    sizes = {"num_blocks": 70, "max_num_seqs": 8}
    return LLM(WindowedDecoder(WINDOWS[kind]), **mock_engine.OPTIONS | sizes | options)


def num_used(llm: LLM) -> int:
    """Blocks that rows hold, by the device's account."""
    held = np.asarray(llm._runner.state.table.block_tables)
    return len(np.unique(held[held > 0]))
