"""The step: one jitted program from engine state and counts to engine state and a small result.

Each inner step appends to the block table, runs the decoder over the packed new tokens, samples for every row whose
known tokens are all computed, and writes the samples into the row state. The first inner step computes what the plan
says; each further one the token that every participating row has just sampled.

Blocks are appended inside the loop, a token a row at a time, rather than reserved before it and truncated after: a row
that stops early then never holds a block it does not use, and the host has made sure that there are enough.

Dimensions: T token places (static), S = min(T, R) sample slots, R rows, K inner steps at most (static), V vocabulary,
M = MAX_LOGPROBS, F blocks that can become full.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pagedjax import block_table
from pagedjax.batch import Batch, make_batch
from pagedjax.block_table import BlockTable
from pagedjax.config import ModelConfig
from pagedjax.logprobs import TokenLogprobs, token_logprobs
from pagedjax.plan import AT_LENGTH, NO_TOKEN, RUNNING, STOPPED
from pagedjax.row_sampling import NO_LOGPROBS
from pagedjax.row_state import RowState
from pagedjax.sampler import sample
from pagedjax.sampling_params import MAX_LOGPROBS
from pallas_kernels import KVPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything that lives on the device between steps; donated to each step."""

    kv_pages: KVPages
    table: BlockTable
    rows: RowState

    @staticmethod
    def zeros(
        model: ModelConfig, *, num_blocks: int, block_size: int, kv_dtype: Any, max_num_seqs: int, max_model_len: int
    ) -> EngineState:
        """An empty pool of `num_blocks` blocks (the null block included), and `max_num_seqs` rows at rest."""
        return EngineState(
            kv_pages=KVPages.zeros(
                model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim, kv_dtype
            ),
            table=block_table.create(num_blocks, block_size, max_num_seqs, -(-max_model_len // block_size)),
            rows=RowState.zeros(max_num_seqs, max_model_len),
        )


NUM_COUNTS = 3  # in DeviceResult.packed: num_free_blocks, ok, how many of `filled` are blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceResult:
    """What a step leaves for the host. `packed` is always fetched; the rest only where somebody asked for logprobs."""

    packed: jax.Array  # i32[2 * K * R + R + 3 + F]: tokens [K, R], finish [K, R], seq_lens [R], the counts, filled [F]
    sampled: TokenLogprobs  # [K, R], of the sampled tokens
    prompt: TokenLogprobs  # [T], of the token that follows each computed one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Samples:
    """The loop's output buffers, written one inner step at a time."""

    tokens: jax.Array  # i32[K, R]
    finish: jax.Array  # i32[K, R]
    logprobs: TokenLogprobs  # [K, R]


def step(
    model: Any,
    state: EngineState,
    num_new_tokens: jax.Array,
    num_steps: jax.Array,
    *,
    num_tokens: int,
    max_steps: int,
    num_vocab_tokens: int,
    implementation: str | None,
    retain_filled: bool = False,
    window: int | None = None,
) -> tuple[EngineState, DeviceResult]:
    """Runs `num_steps` inner steps.

    Args:
        model: a decoder with its parameters: `config`, `paged` and `logits` as `pagedjax.decoder.Decoder` has them.
        state: the engine state; donate it.
        num_new_tokens: i32[R] tokens of each row in the first inner step; rows with 0 sit the whole step out.
        num_steps: i32[], 1 .. max_steps. More than 1 only where every row has at most one new token.
        num_tokens: T, at least the sum of `num_new_tokens`.
        max_steps: K.
        num_vocab_tokens: V without padding: ids that can be drawn are below it.
        implementation: of the attention.
        retain_filled: take a reference, the prefix cache's, to every block that becomes full, and tell its id.
        window: give back what lies behind a sliding window of this many tokens that every layer has; None: nothing.

    Returns:
        The state after the step, and its result.
    """
    num_rows = num_new_tokens.shape[0]
    Carry = tuple[EngineState, _Samples, TokenLogprobs, jax.Array]

    def inner(index: jax.Array, carry: Carry) -> Carry:
        state, samples, prompt, ok = carry
        going = (num_new_tokens > 0) & state.rows.active
        counts = jnp.where(going, jnp.where(index == 0, num_new_tokens, 1), 0)
        table, copies, fits = block_table.append(state.table, counts)
        counts = jnp.where(fits, counts, 0)
        kv_pages = pallas_kernels.copy_blocks(state.kv_pages, copies.src, copies.dst, copies.count)
        batch = make_batch(table, counts, num_tokens)
        tokens = state.rows.tokens.at[batch.rows, batch.positions].get(mode="fill", fill_value=0)
        hidden, kv_pages = model.paged(tokens, kv_pages, batch, implementation=implementation)
        prompt = _prompt_logprobs(model, hidden, state.rows, batch, prompt, num_vocab_tokens)
        ready = (counts > 0) & (table.seq_lens == state.rows.num_tokens)
        rows, samples = _sample(model, hidden, state.rows, batch, ready, index, samples, num_vocab_tokens)
        return EngineState(kv_pages, table, rows), samples, prompt, ok & fits

    samples = _Samples(
        tokens=jnp.full((max_steps, num_rows), NO_TOKEN, jnp.int32),
        finish=jnp.full((max_steps, num_rows), RUNNING, jnp.int32),
        logprobs=_no_logprobs(max_steps, num_rows),
    )
    carry = (state, samples, _no_logprobs(num_tokens), jnp.bool_(True))
    seq_lens = state.table.seq_lens
    state, samples, prompt, ok = jax.lax.fori_loop(0, num_steps, inner, carry)
    table, filled, num_filled = state.table, jnp.zeros(0, jnp.int32), jnp.int32(0)
    if retain_filled:
        num_active = min(num_tokens, num_rows)
        filled, num_filled = _filled(table, seq_lens, num_active, num_tokens + (max_steps - 1) * num_active)
        table = block_table.retain(table, filled)
    if window is not None:
        table = block_table.free_outside_window(table, window)
    counts = jnp.stack([table.num_free_blocks, ok.astype(jnp.int32), num_filled])
    packed = jnp.concatenate([samples.tokens.ravel(), samples.finish.ravel(), table.seq_lens, counts, filled])
    state = dataclasses.replace(state, table=table)
    return state, DeviceResult(packed, samples.logprobs, prompt)


def _filled(
    table: BlockTable, seq_lens: jax.Array, num_active: int, num_new_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks that rows have filled since they had `seq_lens` i32[R] tokens: at most `num_active` rows, and
    `num_new_tokens` tokens in sum.

    Returns:
        i32[F] ids, row after row, `NULL_BLOCK` past the last; and how many, i32[].
    """
    first = seq_lens // table.block_size
    ends = jnp.cumsum(table.seq_lens // table.block_size - first)  # [R]
    # A row fills at most ceil(n / B) blocks with n tokens.
    places = jnp.arange(num_new_tokens // table.block_size + num_active, dtype=jnp.int32)  # [F]
    row = jnp.minimum(jnp.searchsorted(ends, places, side="right"), table.max_num_seqs - 1)
    before = jnp.where(row > 0, ends[jnp.maximum(row - 1, 0)], 0)
    column = jnp.minimum(first[row] + places - before, table.max_blocks_per_seq - 1)
    filled = jnp.where(places < ends[-1], table.block_tables[row, column], block_table.NULL_BLOCK)
    return filled, ends[-1]


def _no_logprobs(*shape: int) -> TokenLogprobs:
    return TokenLogprobs(
        token=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        top=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def _sample(
    model: Any,
    hidden: jax.Array,
    rows: RowState,
    batch: Batch,
    ready: jax.Array,
    index: jax.Array,
    samples: _Samples,
    num_vocab_tokens: int,
) -> tuple[RowState, _Samples]:
    """Draws the next token of every row that is `ready` bool[R], and records it.

    Sample slots are compacted: slot s draws for row `slots[s]`, and surplus slots write nowhere.
    """
    num_rows = ready.shape[0]
    num_slots = min(hidden.shape[0], num_rows)
    slots = jnp.nonzero(ready, size=num_slots, fill_value=num_rows)[0].astype(jnp.int32)  # [S]
    row = jnp.minimum(slots, num_rows - 1)
    logits = model.logits(hidden[batch.query_start_loc[row + 1] - 1])  # [S, V]
    sampling = rows.sampling.gather(row).keep(slots < num_rows)  # surplus slots ask for nothing
    positions = rows.num_tokens[row]  # [S] of the token being drawn
    token_ids = sample(
        logits,
        sampling,
        positions,
        rows.tokens,
        rows.prompt_len[row],
        num_vocab_tokens=num_vocab_tokens,
        token_rows=row,
    )
    logprobs = token_logprobs(logits, token_ids, sampling.num_logprobs, num_vocab_tokens=num_vocab_tokens)

    # Stop ids are masked until min_tokens, so one that is drawn counts.
    is_stop = jnp.any(token_ids[:, None] == sampling.stop_ids, axis=1)
    at_end = positions + 1 >= rows.end_len[row]
    finish = jnp.where(is_stop, STOPPED, jnp.where(at_end, AT_LENGTH, RUNNING)).astype(jnp.int32)
    rows = dataclasses.replace(
        rows,
        tokens=rows.tokens.at[slots, positions].set(token_ids, mode="drop"),
        num_tokens=rows.num_tokens.at[slots].add(1, mode="drop"),
        active=rows.active.at[slots].set(finish == RUNNING, mode="drop"),
    )

    def record(buffer: jax.Array, values: jax.Array) -> jax.Array:
        return buffer.at[index, slots].set(values, mode="drop")

    return rows, jax.tree.map(record, samples, _Samples(token_ids, finish, logprobs))


def _prompt_logprobs(
    model: Any, hidden: jax.Array, rows: RowState, batch: Batch, buffers: TokenLogprobs, num_vocab_tokens: int
) -> TokenLogprobs:
    """Logprobs of the prompt token that follows each computed one, where a row wants them.

    The LM head runs on S tokens at a time, so `[T, V]` never exists; without a taker nothing runs.
    """
    num_tokens, num_rows = hidden.shape[0], rows.num_tokens.shape[0]
    size = min(num_tokens, num_rows)
    row = jnp.minimum(batch.rows, num_rows - 1)
    following = batch.positions + 1  # [T]
    wanted = (
        (batch.rows < num_rows) & (following >= rows.prompt_logprobs_from[row]) & (following < rows.prompt_len[row])
    )
    targets = rows.tokens.at[row, following].get(mode="fill", fill_value=0)
    num_wanted = jnp.where(wanted, MAX_LOGPROBS, NO_LOGPROBS)

    def tile(index: jax.Array, buffers: TokenLogprobs) -> TokenLogprobs:
        start = jnp.minimum(index * size, num_tokens - size)  # the last tile may overlap the one before

        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        found = token_logprobs(
            model.logits(part(hidden)), part(targets), part(num_wanted), num_vocab_tokens=num_vocab_tokens
        )
        return jax.tree.map(
            lambda buffer, values: jax.lax.dynamic_update_slice_in_dim(buffer, values, start, 0), buffers, found
        )

    num_tiles = jnp.where(jnp.any(wanted), -(-num_tokens // size), 0)
    return jax.lax.fori_loop(0, num_tiles, tile, buffers)
