"""How long an engine takes from nothing to its first token, and the memory that this takes at most.

Run it from the root of the repository:

    JAX_PLATFORMS=cpu python benchmarks/startup.py --model smollm2-135m-instruct --dtype float32

Every start is a process of its own. The `cold` one finds no compiled programs (a temporary folder in place of the
user's, given by PAGEDJAX_CACHE, and of numba's), the `warm` one what the cold one has left there
(`pagedjax.compile_cache`).

Seconds, one part after another: `import` from the start of the interpreter until the package is there; `load` is
LLM.load, weights, tokenizer and pool; `first_token` a prompt of a few tokens, with the programs that it needs;
`compile` is LLM.warmup, all others. `to_first_token_s` is load and first token together.

`peak_rss_mb` is the most that was resident up to the end, and `peak_after_mb` up to the end of each part. The baseline
is a process that has imported and compiled the same programs for a model of as many layers and heads that is next to
nothing in size, so `ratio` = (peak - baseline) / (weights + pool) is 1 where loading holds nothing twice.

Prints a table, and a line of JSON a start.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

CACHE_DIR, JAX_CACHE_DIR, NUMBA_CACHE_DIR = "PAGEDJAX_CACHE", "JAX_COMPILATION_CACHE_DIR", "NUMBA_CACHE_DIR"
PARTS = ("import", "load", "first_token", "compile")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TINY_VOCAB, TINY_SIZE, TINY_HEAD_DIM = 16, 16, 16  # a vector each, so that the same kernels are compiled
MIB = 2**20


def peak_rss_mb() -> float:
    """The resident high-water mark of this process in MiB, from Linux: getrusage would count what started it too."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


# In a process of its own


def start(task: dict[str, Any]) -> dict[str, Any]:
    """Takes the parts one by one; what the parent is told.

    Args:
        task: `model` (a source for LLM.load, or the layers and heads of a tiny one), `dtype`, `options` of the engine,
            and `spawned`, when the process was, on the clock of `time.perf_counter`.
    """
    ends, peaks = [task["spawned"]], []

    def end_of_part() -> None:
        ends.append(time.perf_counter())
        peaks.append(peak_rss_mb())

    import jax

    from pagedjax import LLM, SamplingParams, compile_cache

    end_of_part()
    model, dtype, options = task["model"], task["dtype"], task["options"]
    with compile_cache.programs_kept():  # as LLM.load does by itself, and the baseline is not loaded
        llm = LLM.load(model, dtype, **options) if isinstance(model, str) else _tiny(model, dtype, options)
        end_of_part()
        llm.add_request("first", PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        while llm.has_unfinished_requests():
            llm.step()
        end_of_part()
        llm.warmup()
        end_of_part()
    sizes, plan = llm.model_config, llm.plan
    return {
        "seconds": dict(zip(PARTS, (after - before for before, after in pairwise(ends)), strict=True)),
        "peak_after_mb": dict(zip(PARTS, peaks, strict=True)),
        "weights_mb": plan.params_bytes / MIB,
        "pool_mb": plan.pool_bytes / MIB,
        "num_programs": len(plan.programs),
        "shape": {name: getattr(sizes, name) for name in ("num_layers", "num_q_heads", "num_kv_heads")},
        "jax": jax.__version__,
    }


def _tiny(shape: dict[str, Any], dtype: str, options: dict[str, Any]) -> Any:
    """An engine with the same programs for a model that takes no memory, and a pool that takes none."""
    from flax import nnx

    from pagedjax import LLM, Decoder, ModelConfig
    from pagedjax.engine_config import EngineConfig

    config = EngineConfig(**options)
    model = ModelConfig(
        "llama",
        vocab_size=TINY_VOCAB,
        hidden_size=TINY_SIZE,
        intermediate_size=TINY_SIZE,
        head_dim=TINY_HEAD_DIM,
        max_position_embeddings=config.max_model_len,
        tie_word_embeddings=True,
        **shape,
    )
    num_blocks = 2 + -(-(len(PROMPT) + 1) // config.block_size)
    return LLM(Decoder(model, dtype=dtype, rngs=nnx.Rngs(0)), **options | {"num_blocks": num_blocks})


# In the process that starts them


def spawn(task: dict[str, Any], cache: pathlib.Path) -> dict[str, Any]:
    """What a fresh process says of its start.

    Raises:
        subprocess.CalledProcessError: it failed; it has said why on stderr.
    """
    task = task | {"spawned": time.perf_counter()}  # the clock is the same in all processes
    done = subprocess.run(
        [sys.executable, __file__, "--task", json.dumps(task)],
        env={name: value for name, value in os.environ.items() if name != JAX_CACHE_DIR}
        | {CACHE_DIR: str(cache), NUMBA_CACHE_DIR: str(cache / "numba")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, dtype: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A cold start and a warm one, each beside its baseline."""
    from pagedjax.loaders import checkpoint

    path, _ = checkpoint.resolve(model)  # fetched to the user's folder, not to those of the starts
    lines = []
    with tempfile.TemporaryDirectory(prefix="pagedjax-startup-") as folder:
        caches = pathlib.Path(folder)
        for cache in ("cold", "warm"):
            found = spawn({"model": str(path), "dtype": dtype, "options": options}, caches / "model")
            tiny = {"model": found["shape"], "dtype": dtype, "options": options}
            baseline = spawn(tiny, caches / "baseline")
            lines.append({"model": model, "dtype": dtype, "cache": cache} | summary(found, baseline))
    return lines


def summary(found: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """A start beside the one of its baseline: the line of JSON."""
    peak, least = (start["peak_after_mb"][PARTS[-1]] for start in (found, baseline))
    shown = {name: found[name] for name in ("seconds", "peak_after_mb", "weights_mb", "pool_mb", "num_programs", "jax")}
    return shown | {
        "to_first_token_s": found["seconds"]["load"] + found["seconds"]["first_token"],
        "total_s": sum(found["seconds"].values()),
        "peak_rss_mb": peak,
        "baseline_rss_mb": least,
        "ratio": (peak - least) / (found["weights_mb"] + found["pool_mb"]),
    }


def table(lines: list[dict[str, Any]]) -> str:
    first = lines[0]
    held = f"weights {first['weights_mb']:,.0f} MiB, pool {first['pool_mb']:,.0f} MiB, {first['num_programs']} programs"
    columns = (*PARTS, "to 1st token", "peak MiB", "baseline", "ratio")
    shown = [f"{first['model']}, {first['dtype']}: {held}; seconds", f"{'cache':<6}" + _cells(columns)]
    for line in lines:
        seconds = [f"{line['seconds'][part]:.2f}" for part in PARTS]
        memory = [f"{line['peak_rss_mb']:,.0f}", f"{line['baseline_rss_mb']:,.0f}", f"{line['ratio']:.2f}"]
        shown.append(f"{line['cache']:<6}" + _cells([*seconds, f"{line['to_first_token_s']:.2f}", *memory]))
    return "\n".join(shown)


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>13}" for cell in cells)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What to load and how: sizes as the peers are measured with."""
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what LLM.load takes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--decode-steps", type=int, default=8)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--num-blocks", type=int, help="of the pool; default: the engine's")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # what a process that was spawned is to do
    options = vars(parser.parse_args(arguments))
    model, dtype, task = (options.pop(name) for name in ("model", "dtype", "task"))
    if task is not None:
        print(json.dumps(start(json.loads(task))))
        return []
    lines = measure(model, dtype, options)
    print(table(lines))
    for line in lines:
        print(json.dumps(line))
    return lines


if __name__ == "__main__":
    main()
