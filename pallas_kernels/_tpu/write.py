"""Writing new tokens into the pool on a TPU: what the kernel needs to know, found by XLA, and its call.

The tokens fall into runs of consecutive slots, and the kernel works on a slab at a time, R slots of one block that are
whole tiles. Slabs are written with many copies in flight, which is safe while no slab belongs to two items of work;
where one does, the items take turns.

A quantised pool is written a whole block at a time, R = B, because the scales of a block are one line.

T tokens, L layers, N blocks, B tokens a block, R slots a slab, H KV heads, M lines of a token (K heads, then V heads;
or H lines with K and V on lanes), E elements a line, F scales a line.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._kv_pages import LANES, KVPages, side_by_side
from pallas_kernels._kv_quantise import quantise
from pallas_kernels._tpu.write_kernel import DROPPED, kernel

MIN_ROWS = 8  # of a tile
BUFFERS = 16
VMEM_BYTES = 8 * 2**20  # of all buffers
MAX_TOKENS = 65536  # two int32 a token lie in SMEM, 1 MiB


def why_not(kv_pages: KVPages, num_tokens: int) -> str | None:
    """What the kernel can't do of what is asked, or None."""
    block_size = kv_pages.block_size
    if kv_pages.dtype.name not in ("bfloat16", "float32", "int8", "float8_e4m3fn"):
        return f"it writes bfloat16, float32, int8 and float8_e4m3fn pools; this one is {kv_pages.dtype.name}"
    if block_size % MIN_ROWS:
        return f"block_size is {block_size}; it must be a multiple of {MIN_ROWS}"
    if kv_pages.is_quantised and block_size & (block_size - 1):
        return f"block_size is {block_size}; with a quantised pool it must be a power of two"
    # XLA orders the axes of a pool of other lines in its own way, and would copy all of it for a kernel.
    if kv_pages.pool.shape[-1] % LANES:
        return f"head_dim is {kv_pages.head_dim} and the pool was made for another chip; on a TPU KVPages.zeros pads it"
    if num_tokens > MAX_TOKENS:
        return f"there are {num_tokens} tokens; it takes {MAX_TOKENS}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def write(
    kv_pages: KVPages, layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, interpret: Any
) -> KVPages:
    """What `write_kv` promises, for what `why_not` does not refuse; the layer is i32[]."""
    rows, scales = MIN_ROWS, None
    if kv_pages.scales is not None:
        rows = kv_pages.block_size
        (k, k_scale), (v, v_scale) = quantise(k, kv_pages.dtype), quantise(v, kv_pages.dtype)
        # A scale for every slot of a block, [T, 2, F]: the kernel takes its token's.
        scales = jnp.repeat(jnp.stack([k_scale, v_scale], axis=1), kv_pages.block_size, axis=2)
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, kv_pages.scales.shape[-1] - scales.shape[-1])))
    k, v = k.astype(kv_pages.dtype), v.astype(kv_pages.dtype)
    on_lanes, line = kv_pages.kv_on_lanes, kv_pages.pool.shape[-1]
    tokens = side_by_side(k, v, line) if on_lanes else jnp.concatenate([k, v], axis=1)  # [T, M, E]
    runs = _find_runs(slot_mapping, kv_pages.num_slots, rows)
    return _call(kv_pages, layer, tokens, scales, runs, rows, interpret)


class Runs(NamedTuple):
    """Where the tokens go, in SMEM. One entry more than there are tokens, so that the kernel may look past the last."""

    slot: Any  # i32[T + 1], or DROPPED
    end: Any  # i32[T + 1], the first later token whose slot does not continue this one's run; T at the end
    take_turns: Any  # i32[1], 1 where a slab belongs to two items


def _find_runs(slot_mapping: jax.Array, num_slots: int, rows: int) -> Runs:
    num_tokens = slot_mapping.shape[0]
    slot = jnp.where((slot_mapping >= 0) & (slot_mapping < num_slots), slot_mapping, DROPPED)
    slot = jnp.pad(slot, (0, 1), constant_values=DROPPED)
    before = jnp.pad(slot[:-1], (1, 0), constant_values=DROPPED)
    continues = jnp.where(slot == DROPPED, before == DROPPED, (slot == before + 1) & (before != DROPPED))
    place = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    breaks = jnp.append(jnp.where(continues, num_tokens, place)[1:], num_tokens)
    end = jax.lax.cummin(breaks, reverse=True)
    # A slab belongs to two items where it has two of their first tokens.
    is_first = (slot != DROPPED) & (~continues | (slot % rows == 0))
    slabs = jnp.sort(jnp.where(is_first, slot // rows, -1 - place))
    return Runs(slot, end, jnp.any(slabs[1:] == slabs[:-1]).astype(jnp.int32)[None])


def _call(
    kv_pages: KVPages,
    layer: jax.Array,
    tokens: jax.Array,
    scales: jax.Array | None,
    runs: Runs,
    rows: int,
    interpret: Any,
) -> KVPages:
    pools, structure = jax.tree.flatten(kv_pages)
    new = [tokens] if scales is None else [tokens, scales]
    slabs = [(*pools[0].shape[2:-2], rows, pools[0].shape[-1]), *(pool.shape[2:] for pool in pools[1:])]
    buffers = [((rows, *x.shape[1:]), slab, x.dtype) for x, slab in zip(new, slabs, strict=True)]
    num_buffers = _num_buffers(buffers)
    scratch = [pltpu.VMEM((num_buffers, *shape), dtype) for *shapes, dtype in buffers for shape in shapes]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars = 1 + len(runs)
    written = pl.pallas_call(
        functools.partial(kernel, num_planes=len(pools), rows=rows, block_size=kv_pages.block_size),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[in_hbm] * (2 * len(pools)),
            out_specs=[in_hbm] * len(pools),
            scratch_shapes=[*scratch, *[pltpu.SemaphoreType.DMA((num_buffers,))] * 3],
        ),
        input_output_aliases={num_scalars + len(new) + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="write_kv",
    )(layer[None], *runs, *new, *pools)
    return jax.tree.unflatten(structure, written)


def _num_buffers(buffers: list[tuple[Any, ...]]) -> int:
    """As many as VMEM_BYTES hold, at least 3: one that is read, one in hand, one that is written."""

    def padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
        *rest, lines, lanes = shape
        size = -(-lanes // LANES) * LANES * (-(-lines // MIN_ROWS) * MIN_ROWS if lines > 2 else lines)
        for dim in rest:
            size *= dim
        return size * jnp.dtype(dtype).itemsize

    each = sum(padded_bytes(shape, dtype) for *shapes, dtype in buffers for shape in shapes)
    return max(3, min(BUFFERS, VMEM_BYTES // each))
