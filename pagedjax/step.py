"""The step: one jitted program from engine state and counts to engine state and a small result.

Each inner step appends to the block table, runs the decoder over the packed new tokens, samples for every row whose
known tokens are all computed, and writes the samples into the row state. The first inner step computes what the plan
says; each further one the token that every participating row has just sampled.

A step that verifies proposals (`pagedjax.speculation`) computes them behind that token, draws at every place, and takes
back the K/V of those that were not drawn.

Blocks are appended inside the loop, a token a row at a time, rather than reserved before it and truncated after: a row
that stops early then never holds a block it does not use, and the host has made sure that there are enough.

Dimensions: T token places (static), R rows, K inner steps at most (static), k proposals a row at most (static, 0 for
none), L = K (1 + k) lines of results, S sample slots: min(T, R), with proposals min(T, R (1 + k)), V vocabulary,
F blocks that can become full.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pagedjax import block_table
from pagedjax.batch import Batch, make_batch
from pagedjax.block_table import BlockTable
from pagedjax.config import ModelConfig
from pagedjax.head_sharding import HeadSharding
from pagedjax.logprobs import TokenLogprobs, token_logprobs
from pagedjax.plan import AT_LENGTH, NO_TOKEN, RUNNING, STOPPED
from pagedjax.row_sampling import NO_LOGPROBS
from pagedjax.row_state import RowState
from pagedjax.sample_slots import SampleSlots, every_place, last_places
from pagedjax.sampled_logprobs import SampledLogprobs, sampled_logprobs
from pagedjax.sampler import sample
from pagedjax.sampling_params import MAX_LOGPROBS
from pagedjax.speculation import keep, propose
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
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: Any,
        max_num_seqs: int,
        max_model_len: int,
        heads: HeadSharding | None = None,
    ) -> EngineState:
        """An empty pool of `num_blocks` blocks (the null block included), and `max_num_seqs` rows at rest."""
        make_pool = functools.partial(KVPages.zeros, num_kv_heads=model.num_kv_heads) if heads is None else heads.zeros
        return EngineState(
            kv_pages=make_pool(
                num_layers=model.num_layers,
                num_blocks=num_blocks,
                block_size=block_size,
                head_dim=model.head_dim,
                dtype=kv_dtype,
            ),
            table=block_table.create(num_blocks, block_size, max_num_seqs, -(-max_model_len // block_size)),
            rows=RowState.zeros(max_num_seqs, max_model_len),
        )


NUM_COUNTS = 4  # in DeviceResult.packed: num_free_blocks, ok, how many of `filled` are blocks, num_proposed_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceResult:
    """What a step leaves for the host. `packed` is always fetched; the rest only where somebody asked for logprobs."""

    packed: jax.Array  # i32[2 * L * R + R + 4 + F]: tokens [L, R], finish [L, R], seq_lens [R], the counts, filled [F]
    sampled: TokenLogprobs  # [L, R], of the sampled tokens
    drawn: SampledLogprobs  # [L, R], of the same under the distribution they were drawn from
    prompt: TokenLogprobs  # [T], of the token that follows each computed one

    def lines(self, num_lines: int, num_rows: int) -> jax.Array:
        """i32[2, L, R]: the tokens, and whether they end their rows."""
        return self.packed[: 2 * num_lines * num_rows].reshape(2, num_lines, num_rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Samples:
    """What an inner step draws, [S], and the loop's buffers of it, [L, R], written 1 + k lines at a time."""

    tokens: jax.Array  # i32
    finish: jax.Array  # i32
    logprobs: TokenLogprobs
    drawn: SampledLogprobs


def step(
    model: Any,
    state: EngineState,
    num_new_tokens: jax.Array,
    num_steps: jax.Array,
    num_proposals: jax.Array | int = 0,
    *,
    num_tokens: int,
    max_steps: int,
    max_proposals: int = 0,
    num_vocab_tokens: int,
    implementation: str | None,
    retain_filled: bool = False,
    window: int | None = None,
    batch_invariant: bool = False,
) -> tuple[EngineState, DeviceResult]:
    """Runs `num_steps` inner steps.

    Args:
        model: a decoder with its parameters: `config`, `paged` and `logits` as `pagedjax.decoder.Decoder` has them.
        state: the engine state; donate it.
        num_new_tokens: i32[R] tokens of each row in the first inner step; rows with 0 sit the whole step out.
        num_steps: i32[], 1 .. max_steps. More than 1 only where every row has at most one new token.
        num_proposals: i32[], 0 .. max_proposals: most proposals of a row in each inner step.
        num_tokens: T, at least the sum of `num_new_tokens`; with proposals, 1 + num_proposals for each of them.
        max_steps: K.
        max_proposals: k; above 0 every row that takes part computes its last token, and no prompt logprobs are wanted.
        num_vocab_tokens: V without padding: ids that can be drawn are below it.
        implementation: of the attention.
        retain_filled: take a reference, the prefix cache's, to every block that becomes full, and tell its id.
        window: give back what lies behind a sliding window of this many tokens that every layer has; None: nothing.
        batch_invariant: attend token by token, so that how a prompt is cut changes no bit.

    Returns:
        The state after the step, and its result.
    """
    num_rows, num_lines = num_new_tokens.shape[0], max_steps * (1 + max_proposals)
    Carry = tuple[jax.Array, EngineState, _Samples, TokenLogprobs, jax.Array, jax.Array]

    def goes_on(rows: RowState) -> jax.Array:
        return (num_new_tokens > 0) & rows.active  # [R]

    def goes_on_somewhere(carry: Carry) -> jax.Array:
        index, state = carry[:2]
        return (index < num_steps) & jnp.any(goes_on(state.rows))

    def inner(carry: Carry) -> Carry:
        index, state, samples, prompt, num_proposed, ok = carry
        rows = state.rows
        going = goes_on(rows)
        counts = jnp.where(going, jnp.where(index == 0, num_new_tokens, 1), 0)
        if max_proposals:
            rows, proposed = propose(rows, jnp.where(going, num_proposals, 0), max_proposals)
            counts, num_proposed = counts + proposed, num_proposed + jnp.sum(proposed)
        table, copies, fits = block_table.append(state.table, counts)
        counts = jnp.where(fits, counts, 0)
        kv_pages = pallas_kernels.copy_blocks(state.kv_pages, copies.src, copies.dst, copies.count)
        batch = make_batch(table, counts, num_tokens, 1 + max_proposals if max_proposals else None)
        tokens = rows.tokens.at[batch.rows, batch.positions].get(mode="fill", fill_value=0)
        seen = batch.by_token() if batch_invariant else batch
        hidden, kv_pages = model.paged(tokens, kv_pages, seen, implementation=implementation)
        if max_proposals:
            slots = every_place(batch, index, max_proposals)
        else:
            prompt = _prompt_logprobs(model, hidden, rows, batch, prompt, num_vocab_tokens)
            ready = (counts > 0) & (table.seq_lens == rows.num_tokens)
            slots = last_places(batch, ready, rows.num_tokens, index)
        head_rows = min(num_tokens, num_rows) if batch_invariant else slots.rows.shape[0]
        drawn = _draw(model, hidden, rows, slots, num_vocab_tokens, head_rows)
        if max_proposals:
            slots = keep(slots, drawn.tokens, drawn.finish == RUNNING, rows, batch)
        rows = _advance(rows, slots, drawn.tokens, drawn.finish)
        if max_proposals:  # K/V of the new last token is not there, as in any step
            table = block_table.truncate(table, jnp.where(counts > 0, rows.num_tokens - 1, table.seq_lens))
        samples = _record(samples, slots, drawn)
        return index + 1, EngineState(kv_pages, table, rows), samples, prompt, num_proposed, ok & fits

    samples = _Samples(
        tokens=jnp.full((num_lines, num_rows), NO_TOKEN, jnp.int32),
        finish=jnp.full((num_lines, num_rows), RUNNING, jnp.int32),
        logprobs=_no_logprobs(num_lines, num_rows),
        drawn=SampledLogprobs.none(num_lines, num_rows),
    )
    carry = (jnp.int32(0), state, samples, _no_logprobs(num_tokens), jnp.int32(0), jnp.bool_(True))
    seq_lens = state.table.seq_lens
    _, state, samples, prompt, num_proposed, ok = jax.lax.while_loop(goes_on_somewhere, inner, carry)
    table, filled, num_filled = state.table, jnp.zeros(0, jnp.int32), jnp.int32(0)
    if retain_filled:
        num_active = min(num_tokens, num_rows)
        num_later = (max_steps - 1) * (num_tokens if max_proposals else num_active)
        filled, num_filled = _filled(table, seq_lens, num_active, num_tokens + num_later)
        table = block_table.retain(table, filled)
    if window is not None:
        table = block_table.free_outside_window(table, window)
    counts = jnp.stack([table.num_free_blocks, ok.astype(jnp.int32), num_filled, num_proposed])
    packed = jnp.concatenate([samples.tokens.ravel(), samples.finish.ravel(), table.seq_lens, counts, filled])
    state = dataclasses.replace(state, table=table)
    return state, DeviceResult(packed, samples.logprobs, samples.drawn, prompt)


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


def _draw(
    model: Any, hidden: jax.Array, rows: RowState, slots: SampleSlots, num_vocab_tokens: int, head_rows: int
) -> _Samples:
    """What is drawn, [S]; `finish` is whether each token would end its row."""
    num_rows = rows.num_tokens.shape[0]
    row = jnp.minimum(slots.rows, num_rows - 1)
    logits = _logits(model, hidden[slots.places], head_rows)  # [S, V]
    sampling = rows.sampling.gather(row).keep(slots.rows < num_rows)  # surplus slots ask for nothing
    history = (slots.positions, rows.tokens, rows.prompt_len[row])
    token_ids = sample(logits, sampling, *history, num_vocab_tokens=num_vocab_tokens, token_rows=row)
    drawn = sampled_logprobs(logits, sampling, *history, token_ids, num_vocab_tokens=num_vocab_tokens, token_rows=row)
    logprobs = token_logprobs(logits, token_ids, sampling.num_logprobs, num_vocab_tokens=num_vocab_tokens)

    # Stop ids are masked until min_tokens, so one that is drawn counts.
    is_stop = jnp.any(token_ids[:, None] == sampling.stop_ids, axis=1)
    at_end = slots.positions + 1 >= rows.end_len[row]
    finish = jnp.where(is_stop, STOPPED, jnp.where(at_end, AT_LENGTH, RUNNING)).astype(jnp.int32)
    return _Samples(token_ids, finish, logprobs, drawn)


def _logits(model: Any, hidden: jax.Array, head_rows: int) -> jax.Array:
    """[S, V]; a matrix product has at most `head_rows` rows, so that it can have the same shape in every step."""
    num_slots, size = hidden.shape
    if num_slots <= head_rows:
        return model.logits(hidden)
    tiles = jnp.pad(hidden, ((0, -num_slots % head_rows), (0, 0))).reshape(-1, head_rows, size)
    logits = jax.lax.map(model.logits, tiles)
    return logits.reshape(-1, logits.shape[-1])[:num_slots]


def _advance(rows: RowState, slots: SampleSlots, token_ids: jax.Array, finish: jax.Array) -> RowState:
    """Appends the drawn tokens to their rows, and ends those that are to end."""
    ended = jnp.where(finish == RUNNING, rows.num_tokens.shape[0], slots.rows)  # a row's last token at most
    return dataclasses.replace(
        rows,
        tokens=rows.tokens.at[slots.rows, slots.positions].set(token_ids, mode="drop"),
        num_tokens=rows.num_tokens.at[slots.rows].add(1, mode="drop"),
        active=rows.active.at[ended].set(False, mode="drop"),
    )


def _record(samples: _Samples, slots: SampleSlots, drawn: _Samples) -> _Samples:
    """Writes what was drawn, [S], where the result has it."""
    return jax.tree.map(lambda buffer, x: buffer.at[slots.lines, slots.rows].set(x, mode="drop"), samples, drawn)


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

    def all_tiles(buffers: TokenLogprobs) -> TokenLogprobs:
        return jax.lax.fori_loop(0, -(-num_tokens // size), tile, buffers)

    # Not a loop of no turns: XLA would take the product of a single tile out of it, and compute it in every step.
    return jax.lax.cond(jnp.any(wanted), all_tiles, lambda buffers: buffers, buffers)
