"""What speculation gains: tokens an inner step and a second, plain and with proposals, side by side in one process.

    python benchmarks/speculation.py --tokens 128 --proposals 4

Both engines answer the same requests in turn, greedily; the best of the repeats counts. The requests differ in how much
their answers repeat what stands there already, which is all that proposals from the history can gain by.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from pagedjax import LLM, SamplingParams
from pagedjax.plan import NO_TOKEN, StepPlan, StepResult

TEXT = (
    "The harbour of the old town lies behind two breakwaters. In winter the fishing boats stay in port, and their "
    "crews mend nets in the sheds along the quay. In summer the ferries bring visitors, who eat grilled fish and "
    "watch the boats come in."
)
REQUESTS = {
    "repeat a text": f"Repeat the following text exactly, word by word, and nothing else.\n\n{TEXT}",
    "change a word": f"Write this text again, with 'vessels' instead of 'boats'.\n\n{TEXT}",
    "free answer": "Tell me something about the history of lighthouses.",
}


class Counter:
    """Counts the inner steps that gave the row of a lone request tokens."""

    def __init__(self, llm: LLM) -> None:
        self.num_steps = 0
        self._run: Callable[[StepPlan], StepResult] = llm._runner.run
        self._decode_steps = llm.config.decode_steps
        llm._runner.run = self.run  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> StepResult:
        result = self._run(plan)
        firsts = result.tokens.reshape(self._decode_steps, -1, result.tokens.shape[1])[:, 0]  # [K, R]
        self.num_steps += int(np.count_nonzero((firsts != NO_TOKEN).any(axis=1)))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--proposals", type=int, default=4, help="num_speculative_tokens of the second engine")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    engines = {
        k: LLM.load(
            options.model,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            max_model_len=1024,
            enable_prefix_caching=False,
            num_speculative_tokens=k,
        )
        for k in (0, options.proposals)
    }
    counters = {k: Counter(llm) for k, llm in engines.items()}
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    for llm in engines.values():
        llm.warmup()
    print(f"{'request':<16} {'k':>2} {'tokens':>6} {'steps':>6} {'tokens/step':>11} {'accepted':>12} {'tokens/s':>8}")
    for name, content in REQUESTS.items():
        messages = [{"role": "user", "content": content}]
        best = dict.fromkeys(engines, float("inf"))
        lines, answers = {}, {}
        for _ in range(options.repeats):
            for k, llm in engines.items():
                before, counters[k].num_steps = llm.stats(), 0
                start = time.perf_counter()
                (output,) = llm.chat(messages, params)
                best[k] = min(best[k], time.perf_counter() - start)
                after, answers[k] = llm.stats(), output.outputs[0].token_ids
                num_tokens, num_steps = len(answers[k]), counters[k].num_steps
                num_proposed = after.num_proposed_tokens - before.num_proposed_tokens
                num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
                accepted = f"{num_accepted}/{num_proposed}"
                lines[k] = f"{num_tokens:>6} {num_steps:>6} {num_tokens / num_steps:>11.2f} {accepted:>12}"
        for k, line in lines.items():
            print(f"{name:<16} {k:>2} {line} {len(answers[k]) / best[k]:>8.1f}")
        if len({tuple(answer) for answer in answers.values()}) > 1:
            print("the answers differ, which rounding may do where two tokens are equally likely")


if __name__ == "__main__":
    main()
