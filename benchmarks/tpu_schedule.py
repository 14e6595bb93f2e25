"""What the TPU's compiler makes of the kernels' inner loops, without a TPU: bundles a tile of keys against its copies.

Each kernel is compiled for a chip that need not be there, and the compiler writes out its final schedule: the VLIW
bundles in the order in which the core issues them, about one a cycle. For the innermost loop that holds matrix products
(the unmasked one) this counts the bundles that one tile of keys takes, and sets them against the time that the tile's
copies from HBM take at the chip's full bandwidth, and its products at the peak of the matrix unit. The longest of the
three bounds the kernel.

What these figures are not: a run on silicon. They leave out stalls (a load from VMEM that misses its slot, a copy that
is late), the latency of HBM, what happens between rows, and other programs on the chip. The clocks are assumptions;
bandwidths and peaks are the published ones. Use the figures to compare variants of a kernel, not to promise a speed.

It needs libtpu, and takes about a minute a line: `python benchmarks/tpu_schedule.py --chips v5e v6e`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention

from pallas_kernels import KVPages, device_free, paged_attention
from pallas_kernels._tpu import decode, prefill, prefill_kernel

NUM_LAYERS, NUM_BLOCKS, NUM_ROWS, BLOCKS_PER_ROW = 2, 4096, 64, 512
IN_TREE_KEYS_PER_TILE = 512  # of jax's kernel, whose default is tuned on chips
VREG_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore and its share of the chip's memory bandwidth."""

    clock_ghz: float
    gb_per_second: float
    bf16_tflops: float


CHIPS = {
    "v5e": Chip(1.5, 819, 197),
    "v5p": Chip(1.75, 2765 / 2, 459 / 2),  # two cores a chip
    "v6e": Chip(1.75, 1638, 918),
    "tpu7x": Chip(2.2, 3690, 2307 / 2),  # two cores a chip, which JAX shows as two devices
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at the sizes of a model."""

    kernel: str  # "decode", "prefill" or "in-tree"
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_size: int = 16
    kv_on_lanes: bool | None = None  # None: as the pool chooses
    num_tokens: int = 512  # of prefill
    soft_cap: float | None = None
    window: bool = False
    sinks: bool = False

    @property
    def query_dtype(self) -> Any:
        return jnp.float32 if self.dtype == "float32" else jnp.bfloat16

    @property
    def kv_pages(self) -> KVPages:
        """Shapes alone."""
        sizes = (NUM_LAYERS, NUM_BLOCKS, self.block_size, self.num_kv_heads, self.head_dim)
        pages = jax.eval_shape(lambda: KVPages.zeros(*sizes, self.dtype))
        if self.kv_on_lanes and not pages.kv_on_lanes:
            shape = (NUM_LAYERS, NUM_BLOCKS, self.num_kv_heads, self.block_size, 2 * self.head_dim)
            pages = dataclasses.replace(pages, pool=jax.ShapeDtypeStruct(shape, pages.dtype))
        return pages

    @property
    def prefill(self) -> prefill_kernel.Static:
        """The tiles of the prefill kernel."""
        q = jax.ShapeDtypeStruct((self.num_tokens, self.num_q_heads, self.head_dim), self.query_dtype)
        queries = prefill.query_tile(q, self.kv_pages, self.num_tokens)
        options = (self.soft_cap, True, self.window, self.sinks)
        return prefill_kernel.Static(prefill.key_tile(self.kv_pages), queries, *options, num_cores=1)

    @property
    def queries_per_tile(self) -> int:
        return self.prefill.queries.queries if self.kernel == "prefill" else 1

    @property
    def keys_per_tile(self) -> int:
        if self.kernel == "in-tree":
            return IN_TREE_KEYS_PER_TILE
        return (self.prefill.keys if self.kernel == "prefill" else decode.tile_shape(self.kv_pages)).keys

    @property
    def tile_bytes(self) -> int:
        size = jnp.dtype(self.dtype).itemsize
        per_head = self.head_dim * size + (4 if size == 1 else 0)  # a quantised token has a scale
        return 2 * self.keys_per_tile * self.num_kv_heads * per_head

    @property
    def tile_flops(self) -> int:
        return 4 * self.queries_per_tile * self.keys_per_tile * self.num_q_heads * self.head_dim


LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
CASES = {
    "llama-3-8b decode": Case("decode", **LLAMA),
    "llama-3-8b decode, K and V on lanes": Case("decode", **LLAMA, kv_on_lanes=True),
    "llama-3-8b decode, jax's in-tree kernel": Case("in-tree", **LLAMA),
    "llama-3-8b decode, int8": Case("decode", **LLAMA, dtype="int8"),
    "llama-3-8b decode, float8": Case("decode", **LLAMA, dtype="float8_e4m3fn"),
    "gpt-oss decode": Case("decode", 64, 8, 64, window=True, sinks=True),
    "gemma-2-9b decode": Case("decode", 16, 8, 256, soft_cap=50.0, window=True),
    "llama-3-8b prefill": Case("prefill", **LLAMA),
    "llama-3-8b prefill, K and V on lanes": Case("prefill", **LLAMA, kv_on_lanes=True),
    "llama-3-8b prefill, int8": Case("prefill", **LLAMA, dtype="int8"),
    "llama-3-8b prefill, float32": Case("prefill", **LLAMA, dtype="float32"),
    "qwen3-0.6b prefill": Case("prefill", 16, 8, 128),
    "gpt-oss prefill": Case("prefill", 64, 8, 64, window=True, sinks=True),
    "gemma-2-9b prefill": Case("prefill", 16, 8, 256, soft_cap=50.0, window=True),
}
KERNEL_NAMES = {"decode": "paged_decode", "prefill": "paged_prefill", "in-tree": "ragged_paged_attention|RPA"}


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def function_of(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to compile, and the shapes of its arguments."""
    num_tokens = case.num_tokens if case.kernel == "prefill" else NUM_ROWS
    q = jax.ShapeDtypeStruct((num_tokens, case.num_q_heads, case.head_dim), case.query_dtype)
    tables = (i32(NUM_ROWS, BLOCKS_PER_ROW), i32(NUM_ROWS), i32(NUM_ROWS + 1))
    if case.kernel == "in-tree":
        pool = jax.ShapeDtypeStruct(
            (NUM_BLOCKS, case.block_size, 2 * case.num_kv_heads, case.head_dim), jnp.dtype(case.dtype)
        )
        blocks_per_tile = IN_TREE_KEYS_PER_TILE // case.block_size

        def in_tree(q: Any, pool: Any, tables: Any, lens: Any, starts: Any, rows: Any) -> Any:
            sizes = {"num_kv_pages_per_block": blocks_per_tile, "num_queries_per_block": 1}
            return ragged_paged_attention(q, pool, lens, tables, starts, rows, sm_scale=0.1, **sizes)

        return in_tree, (q, pool, *tables, i32(1))

    def ours(q: Any, pages: Any, tables: Any, lens: Any, starts: Any, layer: Any, window: Any, sinks: Any) -> Any:
        return paged_attention(
            q,
            pages,
            tables,
            lens,
            starts,
            layer=layer,
            sliding_window=window if case.window else None,
            sinks=sinks if case.sinks else None,
            soft_cap=case.soft_cap,
            max_query_len=num_tokens if case.kernel == "prefill" else 1,
            return_lse=True,
            implementation="tpu",
        )

    sinks = jax.ShapeDtypeStruct((case.num_q_heads,), jnp.float32)
    return ours, (q, case.kv_pages, *tables, i32(), i32(), sinks)


def compile_case(chip: str, name: str) -> None:
    target = device_free.target(chip)
    with device_free.tracing_for(target.abstract):
        function, arguments = function_of(CASES[name])
    device_free.compile_for(target, function, *arguments)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Bundles first .. end - 1 of a schedule."""

    first: int
    end: int
    has_products: bool

    def holds(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.end <= self.end


def read_loops(bundles: list[str]) -> list[Loop]:
    """A loop begins at a bundle marked LB and ends with the last branch back to a region that begins there."""
    loops = []
    for first, bundle in enumerate(bundles):
        if not re.match(r"\s*\w+ LB:", bundle):
            continue
        regions = set(re.findall(r"Start region (\d+)", bundle))
        branches = [
            i
            for i in range(first, len(bundles))
            if regions.intersection(re.findall(r"target = \$region(\d+)", bundles[i]))
        ]
        if branches:
            end = branches[-1] + 1
            has_products = any("vmatmul" in x or "vmatpush" in x for x in bundles[first:end])
            loops.append(Loop(first, end, has_products))
    return loops


def bundles_per_tile(loops: list[Loop], case: Case) -> int:
    """Of the cheapest innermost loop with products, which is the one without masks."""
    with_products = [x for x in loops if x.has_products]
    innermost = [x for x in with_products if not any(x.holds(y) for y in with_products)]
    tile = min(innermost, key=lambda x: x.end - x.first)
    turns = case.num_kv_heads // case.prefill.heads_together if case.kernel == "prefill" else 1
    if turns > 1:  # it takes some heads; the loop around it takes a tile
        tile = min((x for x in with_products if x.holds(tile)), key=lambda x: x.end - x.first)
    inside = [x for x in loops if tile.holds(x)]
    total = tile.end - tile.first
    for loop in inside:
        # Loops without products start the copies of blocks.
        total += ((turns if loop.has_products else case.keys_per_tile // case.block_size) - 1) * (loop.end - loop.first)
    return total


def measure(chip: str, name: str) -> dict[str, Any]:
    """Compiles in a process of its own, whose environment asks for the dump, and reads that."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is run: another process may hold the library
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, __file__, "--compile", chip, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            return {"chip": chip, "case": name, "error": done.stderr.strip().splitlines()[-1][:200]}
        schedule, allocations = read_dump(pathlib.Path(folder), KERNEL_NAMES[case.kernel])
    bundles = [x for x in schedule.splitlines() if re.match(r"\s*(0x[0-9a-f]+|0)\s", x)]
    spills = set(re.findall(r"vmem:\[#(allocation\d+_spill)\]", schedule))
    vmem = sum(int(x, 16) for x in re.findall(r"space=vmem, size = (0x[0-9a-f]+)", allocations))
    count = bundles_per_tile(read_loops(bundles), case)
    speed = CHIPS[chip]
    compute_us = count / speed.clock_ghz / 1e3
    copy_us = case.tile_bytes / speed.gb_per_second / 1e3
    product_us = case.tile_flops / speed.bf16_tflops / 1e6  # a product may be issued before the matrix unit can take it
    times = {"copies": copy_us, "bundles": compute_us, "products": product_us}
    bound = max(times, key=times.__getitem__)
    return {
        "chip": chip,
        "case": name,
        "vmem_mib": (vmem + len(spills) * VREG_BYTES) / 2**20,
        "keys": case.keys_per_tile,
        "queries": case.queries_per_tile,
        "bundles_per_tile": count,
        "bundles_per_key": count / case.keys_per_tile,
        "compute_us": compute_us,
        "copy_us": copy_us,
        "bound": bound,
        "peak_share": product_us / times[bound],
    }


def read_dump(folder: pathlib.Path, kernel: str) -> tuple[str, str]:
    """The kernel's final bundles, and the list of its allocations."""

    def newest(ending: str) -> str:
        pattern = re.compile(rf"\d+-[^<]*({kernel})[^<]*-\d+-{ending}\.txt")
        return max(x for x in folder.iterdir() if pattern.fullmatch(x.name)).read_text(errors="replace")

    return newest("final_bundles"), newest("pre-finalize-registers-and-allocations")


HEADER = f"{'':42}{'chip':>6}{'VMEM':>7}{'keys':>6}{'q':>5}{'bundles':>9}{'per key':>9}{'us':>8}{'DMA us':>8}  bound by"


def line(result: dict[str, Any]) -> str:
    start = f"{result['case']:42}{result['chip']:>6}"
    if "error" in result:
        return f"{start}  {result['error']}"
    products = f", {result['peak_share']:.0%} of peak" if result["queries"] > 1 else ""
    tile = f"{result['vmem_mib']:7.1f}{result['keys']:6}{result['queries']:5}{result['bundles_per_tile']:9}"
    times = f"{result['bundles_per_key']:9.2f}{result['compute_us']:8.2f}{result['copy_us']:8.2f}"
    return f"{start}{tile}{times}  {result['bound']}{products}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", action="store_true", help="one line of JSON a result instead of the table")
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_case(*options.compile)
        return
    if not options.json:
        print(
            f"A tile of keys: VMEM in MiB, q queries, bundles, time at the assumed clock and of the copies.\n{HEADER}"
        )
    for name in options.cases:
        for chip in options.chips if options.only in name else ():
            result = measure(chip, name)
            print(json.dumps(result) if options.json else line(result), flush=True)


if __name__ == "__main__":
    main()
