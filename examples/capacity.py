"""What a block size costs, before anything runs: `python examples/capacity.py`.

Small blocks waste less in each sequence's last one, and make block tables longer. Shown for one length, and for
requests with the lengths of a chat workload, which also say how many rows a pool will run. Needs no device.
"""

from __future__ import annotations

import argparse
import math
import random
import sys

from pagedjax import capacity

MEAN_PROMPT, MEAN_OUTPUT = 161, 338  # tokens of ShareGPT conversations
PRINTED_SIZE = 16  # the engine's default, whose plan is printed whole
SPREAD = 1.0  # of the logarithm of a length
# What is planned for unless a model is named: 8 billion parameters in 16 bits.
SIZES_8B = capacity.KVShape(num_layers=32, num_kv_heads=8, head_dim=128, params_bytes=16 * 2**30)


def chat_trace(num_requests: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output lengths, lognormal around the means, each at most `longest`."""
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return min(max(round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)), 1), longest)

    return [(draw(MEAN_PROMPT), draw(MEAN_OUTPUT)) for _ in range(num_requests)]


def show(title: str, costs: tuple[capacity.BlockSizeCost, ...]) -> None:
    """One line a block size."""
    print(title)
    print("block size   blocks   worst waste   slots with a token   table entries")
    for cost in costs:
        print(
            f"{cost.block_size:>10}   {cost.num_blocks:>6,.1f}   {cost.worst_waste:>11}   {cost.utilization:>18.1%}   "
            f"{cost.table_length:>13,}"
        )
    print()


def run(options: argparse.Namespace) -> None:
    """Prints the tables."""
    if options.tokens < 1 or options.max_model_len < 4:
        raise ValueError("--tokens is at least 1, and --max-model-len at least 4")
    trace = chat_trace(options.requests, options.max_model_len // 4)
    plans = [
        capacity.plan(
            SIZES_8B if options.model is None else options.model,
            options.memory,
            block_size=size,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max(512, 2 * options.max_num_seqs),
            trace=trace,
        )
        for size in capacity.BLOCK_SIZES
    ]
    show(f"One sequence of {options.tokens:,} tokens", capacity.cost_at(options.tokens))
    show(f"{len(trace):,} requests, averaged over their lives", capacity.cost_over_life(trace))
    print(f"The same requests on {options.memory}, run through the scheduler's rules")
    print("block size    blocks   rows while some wait   preemptions   slots with a token")
    for plan in plans:
        assert plan.replay is not None
        rows = "nobody waits" if plan.mean_running_waiting is None else f"{plan.mean_running_waiting:,.1f}"
        print(
            f"{plan.block_size:>10}   {plan.num_blocks:>7,}   {rows:>20}   {plan.replay.num_preemptions:>11,}   "
            f"{plan.live_share:>18.1%}"
        )
    print()
    print(next(plan for plan in plans if plan.block_size == PRINTED_SIZE))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", help="a config.json, a folder, ...; default: 8 billion parameters in 16 bits")
    options.add_argument("--memory", default="24GiB", help="of the device, an amount or an accelerator's name")
    options.add_argument("--tokens", type=int, default=1000, help="length of the one sequence")
    options.add_argument("--requests", type=int, default=600, help="requests of the trace")
    options.add_argument("--max-model-len", type=int, default=2048, help="tokens a sequence")
    options.add_argument("--max-num-seqs", type=int, default=256, help="rows")
    try:
        run(options.parse_args())
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
