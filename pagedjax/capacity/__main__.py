"""What fits a device, from the command line: `python -m pagedjax.capacity --model config.json --memory 80GiB`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, get_args

from pagedjax.capacity.accelerators import ACCELERATORS, Platform
from pagedjax.capacity.planner import plan
from pagedjax.engine_config import KV_CACHE_DTYPES, EngineConfig


def main(arguments: list[str] | None = None) -> int:
    """Prints the plan, or one line that says what is wrong; the exit code."""
    known, unknown = _parser().parse_known_args(arguments)
    options = vars(known) | {name.lstrip("-").replace("-", "_"): None for name in unknown[:1]}  # `plan` refuses it
    as_json = options.pop("json")
    try:
        found = plan(options.pop("model"), options.pop("memory"), **options)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a known model could not be fetched
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)
    return 0


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(accelerator.name for accelerator in ACCELERATORS)
    result = argparse.ArgumentParser(
        prog="python -m pagedjax.capacity",
        description="How many blocks, tokens and sequences fit a device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, help: str, kind: Any = int, default: Any = None, **more: Any) -> None:
        result.add_argument(name, type=kind, default=default, help=help, **more)

    add("--model", "a config.json, its folder, a .gguf file, a checkpoint or a known name", str, required=True)
    add("--memory", f"of one device: 80GiB, 80GB, bytes, or one of {names}", str)
    add("--memory-utilization", "share of it for weights, workspace and K/V", float, EngineConfig.memory_utilization)
    add("--workspace", "what a step needs beside weights and K/V: 1GiB", str, "0")
    add("--num-blocks", "blocks of the pool, the null block included, instead of what fits")
    add("--kv-cache-memory-bytes", "of the pool, instead of what fits: 8GiB", str)
    add("--block-size", "tokens a block", default=EngineConfig.block_size)
    add("--max-model-len", "tokens a sequence; the engine's default is " + str(EngineConfig.max_model_len))
    add("--max-num-seqs", "rows", default=EngineConfig.max_num_seqs)
    add("--max-num-batched-tokens", "tokens a step", default=EngineConfig.max_num_batched_tokens)
    add("--watermark", "share of the blocks that an admission leaves free", float, EngineConfig.watermark)
    add("--dtype", "of the weights: bfloat16, float16, float32; as stored by default", str)
    add("--kv-cache-dtype", "of the pool", str, "auto", choices=KV_CACHE_DTYPES)
    add("--tensor-parallel", "devices that share the model", default=1)
    add("--platform", "whose padding the pool has; implied by an accelerator's name", str, choices=get_args(Platform))
    add("--mean-prompt", "prompt tokens of a request, with --mean-output", float, dest="mean_prompt_len")
    add("--mean-output", "generated tokens of a request", float, dest="mean_output_len")
    add("--trace", "requests in a JSON file: [[prompt_len, output_len], ...]", str)
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


if __name__ == "__main__":
    sys.exit(main())
