"""Generation as one pure function, for use inside a caller's own `jit`, `scan` or `shard_map`.

The pool is made, filled and thrown away inside: prompts are computed but for their last token, a prompt's samples fork
its blocks, and a loop draws token after token until every row has ended. Where requests come and go, or prompts differ
much in length, `LLM` does more with less memory; the tokens are the same.

Dimensions: P prompts, n samples of each, R = P n rows, T tokens of the longest prompt, N tokens generated at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax import block_table
from pagedjax.batch import make_batch
from pagedjax.memory import kv_pool_dtype
from pagedjax.params import param_dtype
from pagedjax.plan import NO_TOKEN, STOPPED
from pagedjax.row_sampling import RowSampling, row_values
from pagedjax.row_state import RowState
from pagedjax.sampling_params import SamplingParams
from pagedjax.step import EngineState, step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generated:
    """What `generate` gives; the samples of a prompt are neighbours."""

    tokens: jax.Array  # i32[R, N] an end token included, and NO_TOKEN (-1) from there on
    lengths: jax.Array  # i32[R] how many there are
    stopped: jax.Array  # bool[R] whether the last is an end token; else the length ended the row
    logprobs: jax.Array | None  # f32[R, N] of each token, from the raw logits, 0 past the last; None if not asked for
    sampled_logprobs: jax.Array | None  # f32[R, N] under the distribution it was drawn from; 0 past the last, or None
    kept_masses: (
        jax.Array | None
    )  # f32[R, N] of that, what the cuts kept before renormalising; 1 past the last, or None


def generate(
    graphdef: Any,
    params: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    *,
    max_new_tokens: int,
    sampling_params: SamplingParams | None = None,
    end_ids: Iterable[int] = (),
    block_size: int = 16,
    prefill_tokens: int | None = None,
    kv_cache_dtype: str = "auto",
    num_vocab_tokens: int | None = None,
    attention: str | None = None,
) -> Generated:
    """Completes prompts.

    Args:
        graphdef: of the model, from `nnx.split`.
        params: its parameters, from there too.
        tokens: i32[P, T] prompts, padded on the right.
        lengths: i32[P]; a prompt of length 0 gets no tokens.
        seeds: integers [P], or u32[P, 2] the high and the low word of larger ones; see `SamplingParams.seed`.
        max_new_tokens: N, static. A row ends before where the model has no more positions.
        sampling_params: how to draw, for all prompts; None is `SamplingParams()`. Its `n` is the samples of each,
            `logprobs` may be None or 0; N and the seeds are arguments of their own.
        end_ids: tokens that end a row, unless `ignore_eos` is set; `stop_token_ids` do so anyway.
        block_size: tokens a KV block.
        prefill_tokens: prompt tokens computed at a time; None is all of them.
        kv_cache_dtype, attention: as in `EngineConfig`.
        num_vocab_tokens: ids that can be drawn are below it; None: those of the model's config.

    Returns:
        `Generated`.

    Raises:
        ValueError: the shapes do not belong together, or a parameter asks for what needs a host.
    """
    sampling = sampling_params or SamplingParams()
    _check(tokens, lengths, seeds, sampling, max_new_tokens, prefill_tokens)
    model = nnx.merge(graphdef, params)
    (num_prompts, length), n = tokens.shape, sampling.n
    limit = model.config.max_position_embeddings
    if length > limit:
        raise ValueError(f"prompts are {length} tokens wide, and the model has {limit} positions; shorten them")
    num_rows = num_prompts * n
    own_blocks = -(-max_new_tokens // block_size) + 1  # of a sample, the shared tail that it copies among them
    prompt_blocks = -(-length // block_size)
    state = EngineState.zeros(
        model.config,
        num_blocks=num_prompts * prompt_blocks + num_rows * own_blocks + 1,
        block_size=block_size,
        kv_dtype=kv_pool_dtype(kv_cache_dtype, param_dtype(params)),
        max_num_seqs=num_rows,
        max_model_len=length + max_new_tokens,
    )
    stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(end_ids))
    rows = _rows(state.rows, tokens, lengths, seeds, sampling, sorted(stop_ids))
    rows = dataclasses.replace(rows, end_len=jnp.minimum(rows.num_tokens + max_new_tokens, limit))
    state = dataclasses.replace(state, rows=rows)
    known = jnp.zeros(num_rows, jnp.int32).at[::n].set(jnp.maximum(lengths - 1, 0))  # the first sample's part
    state = _prefill(model, state, known, min(prefill_tokens or tokens.size, tokens.size), attention)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    table = block_table.fork(state.table, jnp.where(row % n > 0, row - row % n, -1))
    _, result = step(
        model,
        dataclasses.replace(state, table=table),
        rows.active.astype(jnp.int32),
        jnp.int32(max_new_tokens),
        num_tokens=num_rows,
        max_steps=max_new_tokens,
        num_vocab_tokens=num_vocab_tokens or model.config.num_tokens or model.config.vocab_size,
        implementation=attention,
    )
    drawn, finish = result.lines(max_new_tokens, num_rows)
    return Generated(
        tokens=drawn.T,
        lengths=jnp.sum(drawn != NO_TOKEN, axis=0, dtype=jnp.int32),
        stopped=jnp.any(finish == STOPPED, axis=0),
        logprobs=None if sampling.logprobs is None else result.sampled.token.T,
        sampled_logprobs=result.drawn.token.T if sampling.sampled_logprobs else None,
        kept_masses=result.drawn.kept_mass.T if sampling.sampled_logprobs else None,
    )


def _rows(
    rows: RowState,
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    sampling: SamplingParams,
    stop_ids: list[int],
) -> RowState:
    """The rows of all samples, before anything is computed, and without an end."""
    n, num_rows = sampling.n, rows.num_tokens.shape[0]
    lengths = jnp.repeat(lengths.astype(jnp.int32), n)
    values = row_values(sampling, seed=0, sample_index=0, stop_ids=stop_ids)
    same: RowSampling = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_rows, *leaf.shape)), values)
    if seeds.ndim == 1:
        seeds = jnp.stack([jnp.zeros_like(seeds), seeds], axis=1)
    own = dataclasses.replace(
        same,
        seed=jnp.repeat(seeds.astype(jnp.uint32), n, axis=0),
        sample_index=jnp.arange(num_rows, dtype=jnp.int32) % n,
    )
    return RowState(
        tokens=rows.tokens.at[:, : tokens.shape[1]].set(jnp.repeat(tokens.astype(jnp.int32), n, axis=0)),
        num_tokens=lengths,
        prompt_len=lengths,
        end_len=lengths,
        prompt_logprobs_from=lengths,
        active=lengths > 0,
        sampling=own,
    )


def _prefill(
    model: Any, state: EngineState, num_known: jax.Array, num_tokens: int, implementation: str | None
) -> EngineState:
    """Computes the first `num_known` i32[R] tokens of each row, `num_tokens` of all rows at a time."""

    def is_left(state: EngineState) -> jax.Array:
        return jnp.any(state.table.seq_lens < num_known)

    def compute(state: EngineState) -> EngineState:
        left = num_known - state.table.seq_lens
        counts = jnp.clip(num_tokens - (jnp.cumsum(left) - left), 0, left)
        table, _, _ = block_table.append(state.table, counts)  # no block is shared yet, and there are enough
        batch = make_batch(table, counts, num_tokens)
        tokens = state.rows.tokens.at[batch.rows, batch.positions].get(mode="fill", fill_value=0)
        _, kv_pages = model.paged(tokens, state.kv_pages, batch, implementation=implementation)
        return EngineState(kv_pages, table, state.rows)

    return jax.lax.while_loop(is_left, compute, state)


def _check(
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    sampling: SamplingParams,
    max_new_tokens: int,
    prefill_tokens: int | None,
) -> None:
    for name, array in (("tokens", tokens), ("lengths", lengths), ("seeds", seeds)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} are {array.dtype}; give integers")
    num_prompts = tokens.shape[0]
    shapes = f"tokens {list(tokens.shape)}, lengths {list(lengths.shape)}, seeds {list(seeds.shape)}"
    if tokens.ndim != 2 or lengths.shape != (num_prompts,) or seeds.shape not in ((num_prompts,), (num_prompts, 2)):
        raise ValueError(f"{shapes} do not belong together; give [P, T], [P] and [P] (or [P, 2]: high and low words)")
    if 0 in tokens.shape:
        raise ValueError(f"{shapes}: there is nothing to complete; give at least one prompt of one token")
    if max_new_tokens < 1 or (prefill_tokens is not None and prefill_tokens < 1):
        raise ValueError(f"max_new_tokens={max_new_tokens} and prefill_tokens={prefill_tokens} must be at least 1")
    host = {
        "stop": bool(sampling.stop),
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "cache_salt": sampling.cache_salt is not None,
        "seed": sampling.seed is not None,
        "logprobs": sampling.logprobs not in (None, 0),
    }
    refused = [name for name, is_set in host.items() if is_set]
    if refused:
        raise ValueError(
            f"sampling_params: {refused} have no meaning here (logprobs may be None or 0, and seeds are an argument); "
            "leave them out, or use LLM"
        )
