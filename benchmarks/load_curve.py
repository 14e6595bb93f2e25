"""Latency against load, and throughput under full load, of paged and contiguous K/V in the same memory.

The measure is the paper's (Kwon et al., 2023, section 6): seconds from arrival to the end over the tokens generated,
averaged over requests that arrive at random.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence

import numpy as np
from simulated_chip import A100_13B, H100_8B, ChipModel
from simulation import Setup, Simulation
from traces import LENGTHS

from pagedjax import capacity
from pagedjax.engine_config import EngineConfig

BLOCK_SIZE = 16

Lengths = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A model on a chip, and the variants that share its memory.

    Attributes:
        setups: the variants; the first is the engine's own.
        rates: requests a second at which latency is looked at, ascending.
        most_latency: seconds a token from which on a variant counts as overloaded, and higher rates are left out.
        num_requests: enough to fill the memory many times over.
    """

    name: str
    model: ChipModel
    setups: tuple[Setup, ...]
    rates: tuple[float, ...]
    most_latency: float
    num_requests: int


def _setups(num_blocks: int, max_model_len: int, max_num_seqs: int, row_lens: Sequence[int]) -> tuple[Setup, ...]:
    """Paged as the engine does it, paged with every final length known, and contiguous rows of these lengths."""
    paged = Setup("paged", num_blocks - 1, max_num_seqs, max_model_len, BLOCK_SIZE)
    oracle = dataclasses.replace(paged, name="paged, final length reserved", watermark=0.0, reserves=True)
    rows = (Setup.contiguous(num_blocks * BLOCK_SIZE, row_len) for row_len in row_lens)
    return (paged, oracle, *rows)


SCENARIOS = (
    # 80 GiB * 0.9 - 16 GiB of weights = 56 GiB, of 2 MiB a block.
    Scenario(
        "8B model, 80 GiB",
        H100_8B,
        _setups(28_672, 8192, 1024, (8192, 2048)),
        (10, 20, 30, 40, 45, 50, 55, 60, 65, 70, 75, 80),
        0.15,
        5000,
    ),
    # 15.7k slots, as in the paper's table 1.
    Scenario(
        "OPT-13B, 40 GB",
        A100_13B,
        _setups(981, 2048, 256, (2048,)),
        (0.4, 0.8, 1.0, 1.2, 1.6, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0, 4.4),
        1.0,
        1000,
    ),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of one run. Means are over simulated time; those "while waiting" over the part in which anyone waits.

    Attributes:
        rate: requests a second, or None: all at once.
        latency: mean over requests, of seconds a generated token.
        first_token: seconds from arrival, mean over requests.
        tokens_per_second: generated tokens over the whole run.
        full_tokens_per_second: the same while anyone waits.
        num_running: rows, while anyone waits.
        live_share: tokens with K/V over the slots of the blocks held, while anyone waits.
        pool_share: tokens with K/V over all slots, while anyone waits.
        num_preemptions: times a row had to give way.
        num_running_by_steps: rows, while anyone waits, averaged over steps.
        num_running_planned: what `pagedjax.capacity` says that would be; None where requests arrive at random.
        num_steps: of the engine.
        host_us: median over steps, of the host's CPU time without the block table.
    """

    scenario: str
    setup: str
    rate: float | None
    num_requests: int
    latency: float
    first_token: float
    tokens_per_second: float
    full_tokens_per_second: float
    num_running: float
    live_share: float
    pool_share: float
    num_preemptions: int
    num_running_by_steps: float
    num_running_planned: float | None
    num_steps: int
    host_us: float


def sharegpt_lengths(num_requests: int, seed: int = 0) -> Lengths:
    """Prompt and output tokens, drawn as `traces.LENGTHS` says."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (lengths.draw(num_requests, rng) for lengths in LENGTHS["sharegpt"])
    return list(zip(prompts, outputs, strict=True))


def run(scenario: Scenario, setup: Setup, lengths: Lengths, rate: float | None, seed: int = 0) -> Run:
    """Simulates requests that arrive at `rate` a second with exponential gaps, the same but for scale at every rate."""
    arrivals = None
    if rate is not None:
        arrivals = (np.cumsum(np.random.default_rng(seed).exponential(1.0, len(lengths))) / rate).tolist()
    simulation = Simulation(setup, scenario.model)
    gc.collect()
    gc.freeze()
    finished = simulation.run(lengths, arrivals)
    gc.unfreeze()
    line = simulation.timeline
    seconds, waits = np.array(line.seconds), np.array(line.num_waiting) > 0
    if not waits.any():
        waits = np.ones_like(waits)
    num_kv_tokens = line.mean("num_kv_tokens")
    return Run(
        scenario=scenario.name,
        setup=setup.name,
        rate=rate,
        num_requests=len(lengths),
        latency=float(np.mean([request.normalised_latency for request in finished])),
        first_token=float(np.mean([request.first_token - request.arrival for request in finished])),
        tokens_per_second=sum(request.num_output_tokens for request in finished) / simulation.chip.now,
        full_tokens_per_second=float(np.array(line.num_drawn)[waits].sum() / seconds[waits].sum()),
        num_running=line.mean("num_running"),
        live_share=num_kv_tokens / (line.mean("num_used_blocks") * setup.block_size),
        pool_share=num_kv_tokens / (setup.num_usable_blocks * setup.block_size),
        num_preemptions=simulation.scheduler.num_preemptions,
        num_running_by_steps=float(np.array(line.num_running)[waits].mean()),
        num_running_planned=planned_running(setup, lengths) if rate is None and not setup.reserves else None,
        num_steps=len(line.seconds),
        host_us=1e6 * float(np.median(line.host_seconds)),
    )


def planned_running(setup: Setup, lengths: Lengths) -> float | None:
    """Rows that run on average while requests wait, as the planner has it, which knows nothing of the simulation."""
    plan = capacity.plan(
        capacity.KVShape(num_layers=1, num_kv_heads=1, head_dim=1),
        num_blocks=setup.num_usable_blocks + 1,
        block_size=setup.block_size,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        watermark=setup.watermark,
        trace=lengths,
    )
    return plan.mean_running_waiting


def full_load(scenario: Scenario, lengths: Lengths) -> Iterator[Run]:
    """Every variant with all requests at once."""
    for setup in scenario.setups:
        yield run(scenario, setup, lengths, None)


def curve(scenario: Scenario, lengths: Lengths) -> Iterator[Run]:
    """Every variant at every rate, up to the first at which it is overloaded, with as many inner steps as the engine
    takes by default."""
    for setup in scenario.setups:
        setup = dataclasses.replace(setup, decode_steps=EngineConfig.decode_steps)
        for rate in scenario.rates:
            point = run(scenario, setup, lengths, rate)
            yield point
            if point.latency > scenario.most_latency:
                break
