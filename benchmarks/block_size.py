"""What the block size decides, measured: waste in last blocks, length of the block table, speed.

Run it from the root of the repository: `python benchmarks/block_size.py`. The same trace in the same memory for each
size; small blocks waste little and make long tables. Prints a table and one line of JSON. What the size does to
attention alone is in `indirection.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import replay
import traces
import variants
from traces import Trace
from variants import Model

BLOCK_SIZES = (8, 16, 32, 64)
COLUMNS = (
    ("table length", "table_length", "d"),
    ("waste", "waste", ".1%"),
    ("worst waste", "worst_waste", "d"),
    ("rows", "running_mean", ".2f"),
    ("steps", "inner_steps", "d"),
    ("preempted", "preemptions", "d"),
    ("seconds", "seconds", ".2f"),
    ("tok/s", "tokens_per_second", ".1f"),
)


def sweep(
    model: Model, trace: Trace, num_slots: int, max_model_len: int, repeats: int, **options: Any
) -> dict[int, dict[str, Any]]:
    """Figures by block size: of an observed replay, and the median of timed ones that take turns."""
    lineup = {size: variants.paged(num_slots, max_model_len, block_size=size, **options) for size in BLOCK_SIZES}
    engines = dict(zip(lineup, variants.build(lineup.values(), model), strict=True))
    results: dict[int, dict[str, Any]] = {}
    for size, llm in engines.items():
        replayed, timeline = replay.observed(llm, lineup[size], trace)
        results[size] = replayed.figures() | timeline.figures(trace)
        results[size] |= {
            "table_length": llm.config.max_blocks_per_seq,
            "worst_waste": size - 1,  # slots of a sequence
            "waste": 1 - results[size]["live_of_allocated"],
        }
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in engines}
    for _ in range(repeats):
        for size, llm in engines.items():
            runs[size].append(replay.timed(llm, lineup[size], trace).figures())
    for size, found in runs.items():
        for key in found[0] if found else ():
            results[size][key] = statistics.median(run[key] for run in found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what LLM.load takes")
    parser.add_argument("--trace", default="sharegpt-short", help=f"a workload file, or one of {list(traces.LENGTHS)}")
    parser.add_argument("--requests", type=int, default=64, help="most requests of the trace")
    parser.add_argument("--slots", type=int, default=4096, help="tokens of KV memory, the null block included")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="timed replays; 0: the clock of the observed one")
    options = parser.parse_args()
    model = Model.load(options.model)
    trace = traces.load(options.trace, options.requests, model.tokenizer.encode)
    rows = {"max_num_batched_tokens": options.max_num_batched_tokens, "max_num_seqs": options.max_num_seqs}
    results = sweep(model, trace, options.slots, options.max_model_len, options.repeats, **rows)
    print(f"{'block_size':<10}" + "".join(f"{heading:>14}" for heading, _, _ in COLUMNS))
    for size, figures in results.items():
        print(f"{size:<10}" + "".join(f"{format(figures[key], form):>14}" for _, key, form in COLUMNS))
    print(json.dumps({"trace": trace.name, "block_sizes": results}))


if __name__ == "__main__":
    main()
