"""What a workload takes at least on this CPU: its matrix products, and one read of the K/V that is live in each step.

Run it from the root of the repository, with nothing else running:

    JAX_PLATFORMS=cpu python benchmarks/floor.py --workload one.json two.json --dtype float32

Measured, each the fastest of a few tries: the products of all layers and of the LM head with jax, for some numbers of
rows, in that arrangement of the weights that is fastest for the number (see `products`); and how
fast memory is read: by numpy's sum of a large array, a thread a core, or by the products of the fewest rows, whichever
is faster.

Computed for a workload: the steps that it takes where nothing waits but for a row; in each of them every running row
gets its token and prompts the rest of `max_num_batched_tokens`. A step costs the products of as many rows as it has
tokens, between measured numbers a straight line and without padding; those of the head for the rows that draw; and the
K/V of the tokens that its rows see, at the speed of memory. No norms, rotations, softmax, sampling or host: an engine's
wall time divided by `total_s` says how far it is from that. What prompts have in common counts for each of them, so
prefix caching may do with less. `single_stream_ms` is all weights at the speed of memory, what a token of one row
takes at least.

Prints tables and a line of JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import platform
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import traces
from products import Curve, Weights, fastest, measure_products
from traces import Trace

from pagedjax import ModelConfig
from pagedjax.loaders import load_checkpoint

ROWS = (1, 4, 16, 64, 256, 512)
READ_BYTES = 2**29  # far more than any cache


# What a workload needs


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step computes, at least."""

    num_tokens: int
    num_samples: int  # rows whose logits are needed
    num_live: int  # tokens whose K/V is read


@dataclasses.dataclass
class Row:
    """A request that runs, counted in tokens."""

    prompt: int  # to be computed
    output: int  # to be drawn
    live: int = 0  # with K/V

    def advance(self, room: int) -> int:
        """Computes the token drawn last, or as much of the prompt as there is room for; how many these are."""
        count = min(self.prompt, room) if self.prompt else 1
        self.prompt = max(self.prompt - count, 0)
        self.output -= not self.prompt
        self.live += count
        return count


def schedule(trace: Trace, max_num_seqs: int, max_num_batched_tokens: int) -> list[Step]:
    """The steps of a workload whose requests are all there at once."""
    waiting, running, steps = deque(trace.requests), list[Row](), list[Step]()
    while waiting or running:
        while waiting and len(running) < min(max_num_seqs, max_num_batched_tokens):
            request = waiting.popleft()
            running.append(Row(request.prompt_len, request.output_len))
        decoding, prefilling = [row for row in running if not row.prompt], [row for row in running if row.prompt]
        room = max_num_batched_tokens - sum(row.advance(1) for row in decoding)
        taking_part = [*decoding]
        for row in prefilling:
            if room:
                room -= row.advance(room)
                taking_part.append(row)
        num_samples = sum(not row.prompt for row in taking_part)
        steps.append(Step(max_num_batched_tokens - room, num_samples, sum(row.live for row in taking_part)))
        running = [row for row in running if row.output]
    return steps


@dataclasses.dataclass(frozen=True)
class Floor:
    """Seconds that a workload takes at least."""

    steps: int
    products_s: float
    kv_s: float
    total_s: float
    tok_per_s: float

    @classmethod
    def of(
        cls, trace: Trace, steps: Sequence[Step], layers: Curve, head: Curve, kv_token_bytes: int, bandwidth: float
    ) -> Floor:
        """Of products' curves, the bytes that a token's K/V has in all layers, and bytes a second."""
        products = sum(layers.at(step.num_tokens) + head.at(step.num_samples) for step in steps)
        kv = sum(step.num_live for step in steps) * kv_token_bytes / bandwidth
        return cls(len(steps), products, kv, products + kv, trace.num_output_tokens / (products + kv))


# What is measured


def sum_bandwidth(num_bytes: int, repeats: int) -> float:
    """Bytes a second that numpy sums, float32, a thread a core."""
    num_threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        return num_bytes / fastest(lambda: list(threads.map(np.sum, parts)), repeats)


def cpu() -> str:
    """What makes figures of two machines comparable, or not: the CPU and its widest vectors."""
    path = pathlib.Path("/proc/cpuinfo")
    if not path.exists():
        return platform.machine()
    lines = (text.split(":", 1) for text in path.read_text().splitlines() if ":" in text)
    fields = {name.strip(): value.strip() for name, value in lines}
    flags = fields.get("flags", "").split()
    widest = next((flag for flag in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if flag in flags), "")
    return f"{fields.get('model name', platform.machine())} family {fields.get('cpu family', '?')} {widest}".rstrip()


# What is printed


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is measured, for one model and dtype."""

    layers: Curve
    head: Curve
    layer_weights: int  # numbers in the layers' matrices
    weights_bytes: int  # of layers and head: all that a decode step reads
    kv_token_bytes: int  # in all layers
    summed_per_second: float  # bytes

    @classmethod
    def measure(
        cls, config: ModelConfig, dtype: str, rows: Sequence[int], repeats: int, read_bytes: int = READ_BYTES
    ) -> Machine:
        weights = Weights.of(config, dtype)
        layers, head = measure_products(config, weights, rows, repeats)
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
        summed = sum_bandwidth(read_bytes, repeats)
        return cls(layers, head, weights.num_layer_weights, weights.nbytes, token_bytes, summed)

    @property
    def streamed_per_second(self) -> float:
        """Bytes of weights a second that the products of the fewest rows read."""
        return self.weights_bytes / (self.layers.seconds[0] + self.head.seconds[0])

    @property
    def bandwidth(self) -> float:
        return max(self.summed_per_second, self.streamed_per_second)

    @property
    def bandwidth_from(self) -> str:
        return "numpy's sum" if self.summed_per_second >= self.streamed_per_second else "products of the fewest rows"

    @property
    def single_stream_s(self) -> float:
        return self.weights_bytes / self.bandwidth

    def floor(self, trace: Trace, max_num_seqs: int, max_num_batched_tokens: int) -> Floor:
        steps = schedule(trace, max_num_seqs, max_num_batched_tokens)
        return Floor.of(trace, steps, self.layers, self.head, self.kv_token_bytes, self.bandwidth)

    def figures(self) -> dict[str, Any]:
        return {
            "rows": self.layers.rows,
            "layers_ms": [1e3 * seconds for seconds in self.layers.seconds],
            "head_ms": [1e3 * seconds for seconds in self.head.seconds],
            "layers_arrangement": self.layers.arrangements,
            "head_arrangement": self.head.arrangements,
            "bandwidth_gb_per_s": self.bandwidth / 1e9,
            "bandwidth_from": self.bandwidth_from,
            "weights_bytes": self.weights_bytes,
            "kv_token_bytes": self.kv_token_bytes,
            "single_stream_ms": 1e3 * self.single_stream_s,
        }

    def __str__(self) -> str:
        shown = [f"{'rows':>5}{'layers ms':>11}{'GFLOP/s':>9}{'head ms':>9}  layers held as, head held as"]
        curves = zip(self.layers.rows, self.layers.seconds, self.head.seconds, strict=True)
        for place, (rows, layers, head) in enumerate(curves):
            flops = 2 * rows * self.layer_weights / layers
            held = f"{self.layers.arrangements[place]}; {self.head.arrangements[place]}"
            shown.append(f"{rows:>5}{1e3 * layers:>11.1f}{flops / 1e9:>9.0f}{1e3 * head:>9.1f}  {held}")
        single = f"a single stream {1e3 * self.single_stream_s:.1f} ms a token, {1 / self.single_stream_s:.1f} tok/s"
        speed = f"{self.bandwidth / 1e9:.1f} GB/s by {self.bandwidth_from}"
        shown.append(f"memory {speed}; weights {self.weights_bytes / 1e6:,.0f} MB: {single}")
        return "\n".join(shown)


def table(floors: dict[str, Floor]) -> str:
    names = [field.name for field in dataclasses.fields(Floor)]
    shown = [f"{'at least':<14}" + "".join(f"{name:>12}" for name in names)]
    for workload, floor in floors.items():
        cells = [f"{floor.steps:,}", *(f"{value:,.2f}" for value in dataclasses.astuple(floor)[1:])]
        shown.append(f"{workload:<14}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(shown)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", required=True, type=pathlib.Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what LLM.load takes; its sizes count")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of the products that are measured")
    parser.add_argument("--repeats", type=int, default=7, help="tries, of which the fastest counts")
    options = parser.parse_args(arguments)
    workloads = [traces.read(path) for path in options.workload]
    rows = sorted({*options.rows, options.max_num_batched_tokens})
    machine = Machine.measure(
        load_checkpoint(options.model, options.dtype).config, options.dtype, rows, options.repeats
    )
    floors = {w.name: machine.floor(w, options.max_num_seqs, options.max_num_batched_tokens) for w in workloads}
    about = {"model": options.model, "dtype": options.dtype, "jax": jax.__version__, "cpu": cpu()}
    print(", ".join(about.values()))
    print(machine)
    print(table(floors))
    found = about | machine.figures() | {"workloads": {name: dataclasses.asdict(f) for name, f in floors.items()}}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
