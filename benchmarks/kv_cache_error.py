"""What a narrower KV cache costs in accuracy: logprobs of a real text under each kv_cache_dtype, against float32.

Run it from the root of the repository: `python benchmarks/kv_cache_error.py`. The weights are float32 throughout, so
the pool's dtype is the only difference. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from pagedjax import LLM, SamplingParams

LICENSE = pathlib.Path(__file__).parent.parent / "LICENSE"
BASELINE = "float32"
KV_CACHE_DTYPES = (BASELINE, "bfloat16", "int8", "fp8")
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Scored:
    """A text under one kv_cache_dtype; W windows of N tokens, each token but a window's first is predicted."""

    logprobs: np.ndarray  # f64[W, N - 1], of the text's own tokens
    greedy: np.ndarray  # i64[W, N - 1], the most likely token at each place
    bytes_per_token: float


def score(model: str, windows: list[list[int]], kv_cache_dtype: str) -> Scored:
    length = len(windows[0])
    llm = LLM.load(
        model,
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=length + 1,
        block_size=BLOCK_SIZE,
        num_blocks=length // BLOCK_SIZE + 2,
        max_num_seqs=1,
        max_num_batched_tokens=256,
        batch_invariant=True,  # one program, so the same matrix products for every dtype
        decode_steps=1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    logprobs, greedy = [], []
    for window, output in zip(windows, llm.generate(windows, params), strict=True):
        entries: list[dict[int, float]] = output.prompt_logprobs[1:]
        logprobs.append([entry[token] for entry, token in zip(entries, window[1:], strict=True)])
        greedy.append([next(iter(entry)) for entry in entries])
    return Scored(np.array(logprobs), np.array(greedy), llm.plan.block_bytes / BLOCK_SIZE)


def compare(found: Scored, baseline: Scored) -> dict[str, Any]:
    difference = np.abs(found.logprobs - baseline.logprobs)
    return {
        "bytes_per_token": found.bytes_per_token,
        "mean_difference": float(difference.mean()),
        "max_difference": float(difference.max()),
        "perplexity": math.exp(-found.logprobs.mean()),
        "greedy_changed": float((found.greedy != baseline.greedy).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what LLM.load takes")
    parser.add_argument("--text", type=pathlib.Path, default=LICENSE, help="a text file (default: the licence)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of context")
    parser.add_argument("--windows", type=int, default=2, help="most windows of the text")
    options = parser.parse_args()

    tokenizer = LLM.load(options.model, num_blocks=2).tokenizer
    ids = tokenizer.encode(options.text.read_text())
    starts = range(0, len(ids) - options.window + 1, options.window)
    windows = [ids[start : start + options.window] for start in starts][: options.windows]
    if not windows:
        parser.error(f"{options.text} has {len(ids)} tokens; that is less than one window of {options.window}")

    scored = {name: score(options.model, windows, name) for name in KV_CACHE_DTYPES}
    results = {name: compare(found, scored[BASELINE]) for name, found in scored.items()}
    print(f"{'kv_cache_dtype':<16}{'bytes/token':>12}{'mean |d|':>12}{'max |d|':>12}{'perplexity':>12}{'greedy':>10}")
    for name, row in results.items():
        print(
            f"{name:<16}{row['bytes_per_token']:>12,.0f}{row['mean_difference']:>12.5f}{row['max_difference']:>12.5f}"
            f"{row['perplexity']:>12.4f}{row['greedy_changed']:>10.2%}"
        )
    print(
        json.dumps(
            {
                "model": options.model,
                "text": options.text.name,
                "positions": scored[BASELINE].logprobs.size,
                "window": options.window,
                "kv_cache_dtypes": results,
            }
        )
    )


if __name__ == "__main__":
    main()
