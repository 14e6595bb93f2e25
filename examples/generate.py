"""Generate text with a real model: `python examples/generate.py "What is the capital of France?"`.

Prompts come from the arguments, from a file with one prompt a line, or from standard input. Each is a message to the
model's chat template; `--raw` continues the text as it stands instead. Text goes to stdout, progress and figures to
stderr.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

from _arguments import load, parser, sampling_params

from pagedjax import LLM, RequestOutput
from pagedjax.loaders import FetchError

DEFAULT_PROMPT = "Explain in two sentences why the sky is blue."


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Arguments, then the file, then standard input if it is not a terminal, then the default."""
    prompts = list(options.prompts)
    if options.file is not None:
        prompts += [line for line in options.file.read_text().splitlines() if line.strip()]
    if not prompts and not sys.stdin.isatty():
        prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
    return prompts or [DEFAULT_PROMPT]


def show(prompt: str, output: RequestOutput) -> None:
    """One request's texts."""
    print(f"> {prompt}")
    for completion in output.outputs:
        label = f"[{completion.index}] " if len(output.outputs) > 1 else ""
        print(f"{label}{completion.text.strip()}", end="\n\n")


def run(options: argparse.Namespace) -> LLM:
    """Loads, generates, prints."""
    prompts = read_prompts(options)
    params = sampling_params(options, n=options.n)
    llm = load(options)
    print(llm.plan, file=sys.stderr)
    has_template = getattr(llm.tokenizer, "chat_template", None) is not None
    if options.raw or not has_template:
        inputs = list(prompts)
    else:
        inputs = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(inputs, params)
    seconds = time.perf_counter() - start
    for prompt, output in zip(prompts, outputs, strict=True):
        show(prompt, output)
    stats = llm.stats()
    generating = max(seconds - stats.compile_seconds, 1e-9)
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    print(
        f"{num_tokens} tokens in {generating:.1f} s ({num_tokens / generating:.1f} tokens/s), after "
        f"{stats.compile_seconds:.1f} s of compilation; KV usage at its peak {stats.peak_kv_usage:.1%}",
        file=sys.stderr,
    )
    return llm


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("prompts", nargs="*", help="prompts; default: the file, standard input, or an example")
    options.add_argument("--file", type=pathlib.Path, default=None, help="a text file with one prompt a line")
    options.add_argument("--raw", action="store_true", help="continue the text without a chat template")
    options.add_argument("-n", type=int, default=1, help="samples a prompt")
    try:
        run(options.parse_args())
    except (ValueError, OSError, FetchError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
