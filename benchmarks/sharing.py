"""What sharing blocks saves: prefixes computed once, samples, beams and scored continuations that fork.

Run it from the root of the repository: `python benchmarks/sharing.py`. Ratios are of runs in this one process, on
engines that have compiled what they need. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedjax import LLM, BeamSearchParams, SamplingParams

LICENSE = pathlib.Path(__file__).parent.parent / "LICENSE"
BLOCK_SIZE = 16
REPEATS = 3


def load(model: str, enable_prefix_caching: bool) -> LLM:
    return LLM.load(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=1200,
        max_num_seqs=16,
        max_model_len=2048,
        enable_prefix_caching=enable_prefix_caching,
    )


def forget(llm: LLM) -> None:
    """Empties the prefix cache."""
    llm.update_params(llm._runner.params)


def seconds(run: Callable[[], Any]) -> float:
    """The median of a few runs, after one that compiles."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def computed_tokens(llm: LLM, run: Callable[[], Any]) -> int:
    """How many tokens the model computes the K/V of."""
    total, real = 0, llm._runner.run

    def counted(plan: Any) -> Any:
        nonlocal total
        total += plan.total_new_tokens + (plan.num_steps - 1) * len(plan.scheduled)
        return real(plan)

    llm._runner.run = counted  # type: ignore[method-assign]
    try:
        run()
    finally:
        llm._runner.run = real  # type: ignore[method-assign]
    return total


def peak_blocks(llm: LLM) -> int:
    """Runs what is queued; the most blocks that rows held at once, as the device counts them."""
    peak = 0
    while llm.has_unfinished_requests():
        llm.step()
        table = llm._runner.state.table
        entries = np.asarray(table.block_tables)
        peak = max(peak, len(np.unique(entries[entries != 0])))
    return peak


def same_prefix(cached: LLM, plain: LLM, text: list[int]) -> dict[str, Any]:
    """16 requests at once: 256 shared tokens, 32 of their own, 64 generated."""
    prompts = [text[:256] + text[300 + 32 * i : 332 + 32 * i] for i in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)

    def run(llm: LLM) -> None:
        forget(llm)
        llm.generate(prompts, params, use_tqdm=False)

    # Of the tokens generated the last is not computed.
    found = {name: computed_tokens(llm, lambda llm=llm: run(llm)) - 16 * 63 for name, llm in both(cached, plain)}
    times = {name: seconds(lambda llm=llm: run(llm)) for name, llm in both(cached, plain)}
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "prompt_tokens_computed": found["cached"],
        "prompt_tokens_computed_without": found["plain"],
        "speedup": times["plain"] / times["cached"],
    }


def later_requests(cached: LLM, text: list[int]) -> dict[str, Any]:
    """One after another, 1,024 shared tokens and 32 of their own: seconds to the first token."""
    prompts = [text[:1024] + text[1100 + 32 * i : 1132 + 32 * i] for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for _ in range(2):  # the first round compiles
        forget(cached)
        times = [seconds_once(lambda p=prompt: cached.generate(p, params, use_tqdm=False)) for prompt in prompts]
    later = statistics.median(times[1:])
    return {"first_seconds": times[0], "later_seconds": later, "speedup": times[0] / later}


def scoring(cached: LLM, plain: LLM, text: list[int]) -> dict[str, Any]:
    """4 continuations of 20 tokens of one prompt of 500, against 4 scorings of their own without a cache."""
    prompt, continuations = text[:500], [text[600 + 20 * i : 620 + 20 * i] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def together() -> list[list[float]]:
        forget(cached)
        return [score.token_logprobs for score in cached.score(prompt, continuations)]

    def apart() -> list[list[float]]:
        found = []
        for continuation in continuations:
            (output,) = plain.generate(prompt + continuation, params, use_tqdm=False)
            entries: Any = output.prompt_logprobs[-20:]  # type: ignore[index]
            found.append([entry[token] for entry, token in zip(entries, continuation, strict=True)])
        return found

    difference = np.max(np.abs(np.array(together()) - np.array(apart())))
    return {"speedup": seconds(apart) / seconds(together), "max_difference": float(difference)}


def samples(plain: LLM, text: list[int]) -> dict[str, Any]:
    """8 samples of a prompt of 512 tokens, 32 generated each."""
    plain.add_request(
        "samples", text[:512], SamplingParams(n=8, temperature=1.0, seed=0, max_tokens=32, ignore_eos=True)
    )
    return {"blocks": peak_blocks(plain), "least": 512 // BLOCK_SIZE + 8 * math.ceil(31 / BLOCK_SIZE)}


def beams(plain: LLM, text: list[int]) -> dict[str, Any]:
    """4 beams of a prompt of 512 tokens, 64 generated, without an end token."""
    width, length, max_tokens = 4, 512, 64
    maker, end_ids = plain._maker, plain._maker.end_ids
    maker.end_ids = frozenset()
    params = BeamSearchParams(width=width, max_tokens=max_tokens)
    plain._engine.add(maker.searched("beams", None, text[:length], params))
    blocks = peak_blocks(plain)
    maker.end_ids = end_ids
    unshared = width * math.ceil((length + max_tokens - 1) / BLOCK_SIZE)
    return {"blocks": blocks, "without_sharing": unshared, "saved": 1 - blocks / unshared}


def both(cached: LLM, plain: LLM) -> list[tuple[str, LLM]]:
    return [("cached", cached), ("plain", plain)]


def seconds_once(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    cached, plain = load(options.model, True), load(options.model, False)
    text = cached.tokenizer.encode(LICENSE.read_text())
    results = {
        "same prefix, 16 at once": same_prefix(cached, plain, text),
        "same prefix, one after another": later_requests(cached, text),
        "score": scoring(cached, plain, text),
        "8 samples": samples(plain, text),
        "4 beams": beams(plain, text),
    }
    for llm in (cached, plain):
        llm.audit()
    for name, result in results.items():
        print(f"{name:<32}" + ", ".join(f"{key} {value:.4g}" for key, value in result.items()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
