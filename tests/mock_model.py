"""A model without a transformer whose next token is an exact function of every token before it, and its oracle.

The mock decoder writes each token's id into the KV pool and hashes all ids that it reads back through the block table,
so a wrong block, a stale slot or a missing copy changes the logits. The logits are small multiples of 1/128, exact in
float32. The oracle computes the same hash in NumPy from the token ids alone, without pool, rows or steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_sampler
from flax import nnx

import pallas_kernels
from pagedjax import CompletionOutput, ModelConfig, SamplingParams
from pagedjax.batch import Batch
from pallas_kernels import KVPages

# Dimensions: T token places, R rows, M tokens a row's blocks hold, N tokens of one sequence, V token ids.

VOCAB = 32  # tokens; the embedding has PADDED rows, and the padding has the largest logits of all
PADDED = 40
MAX_MODEL_LEN = 48
NUM_LAYERS = 2
CONFIG = ModelConfig("mock", PADDED, 32, 32, NUM_LAYERS, 1, 1, 8, MAX_MODEL_LEN, num_tokens=VOCAB)


def mix(value: Any, place: Any) -> Any:
    """A hash of two uint32 arrays, NumPy's or JAX's, that broadcast."""
    u = np.uint32
    x = value * u(0x9E3779B1) ^ (place + u(1)) * u(0x85EBCA77)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = (x ^ (x >> u(shift))) * u(factor)
    return x ^ (x >> u(15))


class MockDecoder(nnx.Module):
    """Has what the engine asks of a decoder. Its one parameter changes the stored K and V, and the logits."""

    def __init__(self, salt: int = 0) -> None:
        self.config = CONFIG
        self.salt = nnx.Param(jnp.float32(salt))

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None = None
    ) -> tuple[jax.Array, KVPages]:
        """Hidden states f32[T, 32], the bits of each token's hash, and the pool with the tokens written."""
        stored = (tokens.astype(jnp.float32) + VOCAB * self.salt[...]) * (2 * NUM_LAYERS)
        hashes = jnp.zeros((batch.block_tables.shape[0], 1), jnp.uint32)
        for layer in range(NUM_LAYERS):
            k = jnp.broadcast_to((stored + 2 * layer)[:, None, None], (*tokens.shape, 1, CONFIG.head_dim))
            kv_pages = pallas_kernels.write_kv(kv_pages, layer, k, k + 1, batch.slot_mapping)
            read = jax.vmap(functools.partial(pallas_kernels.gather_kv, kv_pages, layer))
            for part in read(batch.block_tables, batch.seq_lens):  # [R, M, 1, D]
                places = jnp.arange(part.shape[1], dtype=jnp.uint32)
                hashes = hashes + mix(jnp.round(part[:, :, 0, layer]).astype(jnp.int32).astype(jnp.uint32), places)
        prefixes = jnp.cumsum(hashes, axis=1, dtype=jnp.uint32)  # [R, M]
        found = prefixes.at[batch.rows, batch.positions].get(mode="fill", fill_value=0)  # [T]
        return (found[:, None] >> jnp.arange(32, dtype=jnp.uint32) & 1).astype(jnp.float32), kv_pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[..., PADDED] of the bits f32[..., 32]."""
        hashes = jnp.sum(hidden.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
        hashes = hashes + self.salt[...].astype(jnp.uint32)
        ids = jnp.arange(PADDED, dtype=jnp.uint32)
        values = (mix(hashes[..., None], ids) >> 22).astype(jnp.float32) / 128 - 4
        return jnp.where(ids < VOCAB, values, 100.0)


def raw_logits(tokens: Sequence[int], salts: Sequence[int] | int = 0, logits_salt: int = 0) -> np.ndarray:
    """f64[N, V]: logits after each of the tokens.

    Args:
        tokens: N ids.
        salts: the model's parameter when each token's K and V was computed.
        logits_salt: the same when the logits were.
    """
    places = np.arange(len(tokens), dtype=np.uint32)
    stored = np.asarray(tokens, np.uint32) + np.asarray(salts, np.uint32) * np.uint32(VOCAB)
    parts = 2 * NUM_LAYERS
    hashes = sum(mix(stored * np.uint32(parts) + np.uint32(part), places) for part in range(parts))
    prefixes = np.cumsum(hashes, dtype=np.uint32) + np.uint32(logits_salt)
    return (mix(prefixes[:, None], np.arange(VOCAB, dtype=np.uint32)) >> np.uint32(22)) / 128.0 - 4.0


def logprobs(logits: np.ndarray) -> np.ndarray:
    """f64[..., V] natural-log probabilities."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class Oracle:
    """One sample of a request, token by token, from the definitions.

    Args:
        prompt: its token ids.
        params: how to continue it.
        seed: the seed in force.
        index: which sample.
        end_ids: the model's end tokens.
        max_model_len: of the engine.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        index: int = 0,
        end_ids: Sequence[int] = (),
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.prompt, self.params = list(prompt), params
        self.stop_ids = sorted({*params.stop_token_ids, *(() if params.ignore_eos else end_ids)})
        self.max_new = min(params.max_tokens, max_model_len - len(prompt))
        seed = params.seed if seed is None else seed
        # All positions at once, always as many: one compiled program makes the noise of every test.
        self._noise = np.zeros((MAX_MODEL_LEN, VOCAB))
        if params.temperature:
            assert seed is not None
            positions = list(range(MAX_MODEL_LEN))
            self._noise = numpy_sampler.noise([seed] * MAX_MODEL_LEN, [index] * MAX_MODEL_LEN, positions, VOCAB)

    @property
    def _plain(self) -> bool:
        """Whether the processed logits are the exact raw ones, so that the most likely token is never in doubt."""
        p = self.params
        return not p.temperature and (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0)

    def next(self, output: list[int], logits: np.ndarray | None = None) -> tuple[int, bool]:
        """The token after prompt and output, and whether rounding cannot change it."""
        if logits is None:
            logits = raw_logits(self.prompt + output)[-1]
        processed = numpy_sampler.processed_logits(logits, self.params, self.prompt, output, self.stop_ids)
        gumbel = self._noise[len(self.prompt) + len(output)]
        token, clear = numpy_sampler.draw(processed, self.params, gumbel)
        return token, clear or self._plain

    def generate(self) -> list[int]:
        """The whole output; every draw has to be clear."""
        output: list[int] = []
        while not output or self.reason(output) is None:
            token, clear = self.next(output)
            assert clear, "choose another seed: rounding decides this draw"
            output.append(token)
        return output

    def reason(self, output: Sequence[int]) -> str | None:
        """Why the engine has to end the sequence with the last of these tokens."""
        if output[-1] in self.stop_ids:
            return "stop"
        return "length" if len(output) == self.max_new else None

    def check(self, found: CompletionOutput) -> int:
        """Fails unless every token, the end and the logprobs are right; an aborted one may end early.

        Returns:
            How many draws were too close to call, and not compared.
        """
        output, doubtful = found.token_ids, 0
        logits = raw_logits(self.prompt + output)[len(self.prompt) - 1 :]
        for place, token in enumerate(output):
            expected, clear = self.next(output[:place], logits[place])
            doubtful += not clear
            assert not clear or token == expected, f"token {place} of {output} is {token}, the oracle has {expected}"
        reasons = [self.reason(output[: place + 1]) for place in range(len(output))]
        assert not any(reasons[:-1]), f"{output} goes on after its end: {reasons}"
        if found.finish_reason == "abort":
            assert not reasons or reasons[-1] is None
        else:
            assert found.finish_reason == reasons[-1]
        last_is_stop_token = found.finish_reason == "stop" and output[-1] in self.params.stop_token_ids
        assert found.stop_reason == (output[-1] if last_is_stop_token else None)
        check_logprobs(found.logprobs, self.params.logprobs, logits, output)
        if found.logprobs is not None:
            total = sum(entry[token] for entry, token in zip(found.logprobs, output, strict=True))
            assert found.cumulative_logprob is not None
            assert abs(found.cumulative_logprob - total) < 1e-9
        return doubtful


def check_logprobs(
    found: Sequence[dict[int, float] | None] | None, num_top: int | None, logits: np.ndarray, tokens: Sequence[int]
) -> None:
    """Fails unless each token's entry has the `num_top` most likely ids and the token, with their values.

    Args:
        found: the engine's, or None.
        num_top: what was asked for.
        logits: f64[>= N, V], raw, that each token was drawn from or follows.
        tokens: N.
    """
    if num_top is None:
        assert found is None
        return
    assert found is not None
    assert len(found) == len(tokens)
    expected = logprobs(logits)
    for entry, values, token in zip(found, expected, tokens, strict=False):
        top = np.argsort(-values, kind="stable")[:num_top]
        assert entry is not None
        assert list(entry) == [*top, *([] if token in top else [token])]
        np.testing.assert_allclose(list(entry.values()), values[list(entry)], atol=2e-5)
