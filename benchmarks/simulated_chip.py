"""A chip that computes no model: the real block table, and a clock that advances as a stated model of the chip says.

It takes the place of `pagedjax.runner.Runner` in an engine whose scheduler and bookkeeping are the real ones. Every row
draws a token when its known tokens are all computed and ends by length, as the step does it; no K/V exists. Prefix
caching, forks and proposals are not simulated.

Letters: R rows, N blocks in the pool.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import numpy as np

from pagedjax import block_table
from pagedjax.block_table import BlockTable
from pagedjax.plan import AT_LENGTH, NO_TOKEN, RUNNING, StepPlan, StepResult
from pagedjax.step_clock import StepClock

TOKEN = 0  # every token that is drawn


@dataclasses.dataclass(frozen=True)
class ChipModel:
    """Seconds of a step: reading the weights, computing its tokens, and reading the K/V of the rows that take part.

    At the published peaks, one after the other: a model, not a measurement. A real chip reaches a part of its peaks,
    which stretches the time axis, and overlaps some of the work; neither changes which variant is ahead.

    Attributes:
        weights_bytes: read once a step.
        flops_per_token: 2 a parameter.
        kv_bytes_per_token: read once a step for every token with K/V of each row that takes part.
        bytes_per_second: peak memory bandwidth.
        flops_per_second: peak of dense matrix products.
    """

    name: str
    weights_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    bytes_per_second: float
    flops_per_second: float

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Of an inner step that computes `num_tokens` and whose rows hold `num_kv_tokens`."""
        num_bytes = self.weights_bytes + self.kv_bytes_per_token * num_kv_tokens
        return num_bytes / self.bytes_per_second + self.flops_per_token * num_tokens / self.flops_per_second

    def __str__(self) -> str:
        step_ms = 1e3 * self.weights_bytes / self.bytes_per_second
        token_us = 1e6 * self.flops_per_token / self.flops_per_second
        kv_ns = 1e9 * self.kv_bytes_per_token / self.bytes_per_second
        return f"{self.name}: {step_ms:.3g} ms + {token_us:.3g} us a token + {kv_ns:.3g} ns a KV token"


# 8 billion parameters (32 layers, 8 KV heads of 128) in 16 bits on an H100 SXM of 80 GB: NVIDIA's data sheet says
# 3.35 TB/s and 989 TFLOP/s (dense, bfloat16).
H100_8B = ChipModel("8B on H100", 16 * 2**30, 2 * 8.03e9, 128 * 2**10, 3.35e12, 989e12)

# The smallest setting of the PagedAttention paper (Kwon et al., 2023, table 1): OPT-13B (40 layers of width 5,120, no
# grouped heads) on an A100 of 40 GB: NVIDIA's data sheet says 1,555 GB/s and 312 TFLOP/s.
A100_13B = ChipModel("OPT-13B on A100", 26e9, 2 * 13e9, 2 * 40 * 5120 * 2, 1.555e12, 312e12)


@dataclasses.dataclass(frozen=True)
class State:
    """What an engine may look at."""

    table: BlockTable


@functools.partial(jax.jit, donate_argnums=0)
def _apply(
    table: BlockTable, releases: jax.Array, num_new_tokens: jax.Array
) -> tuple[BlockTable, jax.Array, jax.Array, jax.Array]:
    """The block table's part of a step. Donated: else every step would copy arrays of the pool's size."""
    table = block_table.release(table, releases)
    table, _, ok = block_table.append(table, num_new_tokens)
    # Copies for the host: the table's own arrays are donated to the next call.
    return table, table.seq_lens + 0, table.num_free_blocks + 0, ok


class SimulatedChip:
    """Runs plans on the block table and in numpy.

    Args:
        model: how long a step takes.
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens a block.
        max_num_seqs: R.
        max_model_len: tokens a row.
    """

    def __init__(
        self, model: ChipModel, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model = model
        self.now = 0.0  # simulated seconds
        self.clock = StepClock()
        self.cpu_seconds = 0.0  # of the thread, spent in this class
        table = block_table.create(num_blocks, block_size, max_num_seqs, -(-max_model_len // block_size))
        self.state = State(jax.tree.map(lambda leaf: leaf + 0, table))  # every leaf its own buffer: each is donated
        self.num_tokens = np.zeros(max_num_seqs, np.int32)  # of each row, known
        self.end_len = np.zeros(max_num_seqs, np.int32)
        self.seq_lens = np.zeros(max_num_seqs, np.int32)  # tokens of each row with K/V
        self.num_free_blocks = num_blocks - 1
        self.num_in_plan = 0  # rows that took part in the last step
        self.num_drawn = 0  # tokens drawn in it

    def run(self, plan: StepPlan) -> StepResult:
        """Applies a plan and lets its time pass."""
        start = time.thread_time()
        counts = plan.num_new_tokens
        scheduled = counts > 0
        self.num_in_plan = int(scheduled.sum())
        ok = self._change(plan, counts + np.where(scheduled, plan.num_steps - 1, 0).astype(np.int32))
        for admission in plan.admits:
            sequence = admission.sequence
            row = sequence.row
            self.num_tokens[row], self.end_len[row] = sequence.num_tokens, sequence.end_len
        # Inner steps after the first have a token a row, and the scheduler asks for none that a row would not take.
        drew = scheduled & (self.seq_lens - (plan.num_steps - 1) == self.num_tokens)
        tokens = np.full((plan.num_steps, len(counts)), NO_TOKEN, np.int32)
        finish = np.full_like(tokens, RUNNING)
        tokens[:, drew] = TOKEN
        self.num_tokens[drew] += plan.num_steps
        self.num_drawn = int(drew.sum()) * plan.num_steps
        finish[-1, drew & (self.num_tokens >= self.end_len)] = AT_LENGTH
        num_kv_tokens, num_new_tokens = int(self.seq_lens[scheduled].sum()), int(counts.sum())
        for later in reversed(range(plan.num_steps)):  # inner steps after this one, a token a row each
            self.now += self.model.seconds(num_new_tokens, num_kv_tokens - later * self.num_in_plan)
            num_new_tokens = self.num_in_plan
        result = StepResult(tokens, finish, self.seq_lens, self.num_free_blocks, np.zeros(0, np.int32), ok)
        self.cpu_seconds += time.thread_time() - start
        return result

    def change_rows(self, plan: StepPlan) -> None:
        """Applies a plan without tokens."""
        self._change(plan, np.zeros_like(self.num_tokens))

    def check_params(self) -> None:
        """There are none."""

    def reset(self) -> None:
        """An engine asks for this after a failure, which a simulation does not survive."""
        raise RuntimeError("the simulation failed; the error before this one says why")

    def _change(self, plan: StepPlan, num_new_tokens: np.ndarray) -> bool:
        releases = np.zeros(len(num_new_tokens), bool)
        releases[plan.releases] = True
        table, seq_lens, num_free_blocks, ok = _apply(self.state.table, releases, num_new_tokens)
        self.state = State(table)
        self.seq_lens, self.num_free_blocks = np.asarray(seq_lens), int(num_free_blocks)
        return bool(ok)
