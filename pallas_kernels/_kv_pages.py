"""The KV pool: one array for all layers whose layout only this package knows, and how whole blocks of it are used.

Where head_dim is a multiple of 128 (the lanes of a TPU register) the pool is `[L, N, 2, H, B, D]`, K and V apart;
else `[L, N, H, B, E]`, K and V side by side, so that two heads of 64 fill the lanes instead of padding them. Either way
one block of one layer is contiguous, all its heads and both K and V. A quantised pool (int8, float8_e4m3fn) has beside
it `scales`, float32 `[L, N, 2, F]`: the K scales of a block, head after head, then its V scales. The updates
(`copy_blocks` here, `write_kv`) are in place where the pool is donated, also as the carry of a `lax.scan` over layers.

E is 2 * D and F is H * B, on a TPU rounded up to whole lanes. Its memory pads them so anyway; but where the shape does
not say so, XLA picks another order of the axes than the kernels need, and copies the pool at every call. The padding
comes last, is zero in every line that was written, and reaches no result.

L layers, N blocks (the null block included), H KV heads, B tokens a block, D head_dim.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels import _platform
from pallas_kernels._kv_quantise import dequantise, is_quantised

LANES = 128
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "float8_e4m3fn")

K_PART = 0
V_PART = 1

WHOLE_LINE = 0  # as a head_dim: K and V fill their line


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The paged KV cache of all layers. A pytree; make one with `KVPages.zeros`, and treat its layout as private."""

    pool: jax.Array  # [L, N, 2, H, B, D] or [L, N, H, B, E], see the module
    scales: jax.Array | None = None  # f32[L, N, 2, F] of a quantised pool: value = stored * scale
    head_dim: int = dataclasses.field(default=WHOLE_LINE, metadata={"static": True})

    def __post_init__(self) -> None:
        # What jax puts in the place of an array may have no shape; then the head_dim is known already.
        if self.head_dim == WHOLE_LINE and hasattr(self.pool, "shape"):
            object.__setattr__(self, "head_dim", self.pool.shape[-1] // (2 if self.kv_on_lanes else 1))

    @staticmethod
    def zeros(
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike,
    ) -> KVPages:
        """An empty pool.

        Args:
            num_layers: layers that share the block tables.
            num_blocks: blocks a layer, the null block 0 among them.
            block_size: tokens a block.
            num_kv_heads: KV heads a layer.
            head_dim: elements a head.
            dtype: bfloat16, float16, float32, float64 where x64 is enabled, or int8 or float8_e4m3fn: quantised, with
                a float32 scale a token and head.

        Returns:
            A pool of zeros for the device of this trace: on a TPU with the padding that the module speaks of.

        Raises:
            ValueError: a size below 1, or a dtype outside the list.
        """
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        dtype = jnp.dtype(dtype)
        _check_pool(sizes, dtype)
        on_tpu = _platform.device_of_this_trace().platform == "tpu"
        line, scales_line = 2 * head_dim, num_kv_heads * block_size
        if on_tpu:
            line, scales_line = round_up_to_lanes(line), round_up_to_lanes(scales_line)
        shape: tuple[int, ...]
        if head_dim % LANES == 0:
            shape = (num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim)
        else:
            shape = (num_layers, num_blocks, num_kv_heads, block_size, line)
        scales = jnp.zeros((num_layers, num_blocks, 2, scales_line), jnp.float32) if is_quantised(dtype) else None
        return KVPages(jnp.zeros(shape, dtype), scales, head_dim)

    @property
    def kv_on_lanes(self) -> bool:
        """Whether K and V lie side by side on the last axis (head_dim not a multiple of 128)."""
        return self.pool.ndim == 5

    @property
    def num_layers(self) -> int:
        return self.pool.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks a layer, the null block included."""
        return self.pool.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.pool.shape[-3]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.pool.shape[-2]

    @property
    def dtype(self) -> jnp.dtype:
        """What is stored: int8 or float8_e4m3fn for a quantised pool."""
        return self.pool.dtype

    @property
    def is_quantised(self) -> bool:
        return self.scales is not None

    @property
    def is_padded(self) -> bool:
        """Whether anything lies behind the values of a line, or behind the scales."""
        used = self.head_dim * (2 if self.kv_on_lanes else 1)
        scales_used = self.num_kv_heads * self.block_size
        return self.pool.shape[-1] > used or (self.scales is not None and self.scales.shape[-1] > scales_used)

    @property
    def num_slots(self) -> int:
        """Token positions a layer; `write_kv` drops a slot outside [0, num_slots)."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, all layers, the scales and a TPU's padding included."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    def partition_specs(self, axis: str | None) -> KVPages:
        """PartitionSpecs in the place of the arrays, for `jax.shard_map`: heads divided over an axis of a mesh.

        Each device's part is a pool of its own heads; so make the pool under `jax.shard_map` as well, since a TPU's
        padding of the scales is then that of each part.

        Args:
            axis: of the mesh; None: every device has the whole pool.
        """
        pool = PartitionSpec(*[None] * (self.pool.ndim - 3), axis)
        scales = None if self.scales is None else PartitionSpec(None, None, None, axis)
        return KVPages(pool, scales, self.head_dim)  # type: ignore[arg-type]  # a tree of the same form


def _check_pool(sizes: dict[str, int], dtype: jnp.dtype) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if dtype.name not in SUPPORTED_DTYPES:
        raise ValueError(f"a KV pool of dtype {dtype.name} is not supported; use one of {SUPPORTED_DTYPES}")
    if dtype != jax.dtypes.canonicalize_dtype(dtype):
        raise ValueError(f"a KV pool of dtype {dtype.name} needs jax_enable_x64; it is off")


def round_up_to_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def side_by_side(k: jax.Array, v: jax.Array, line: int) -> jax.Array:
    """k and v [..., D] on one line [..., line], zeros behind them."""
    kv = jnp.concatenate([k, v], axis=-1)
    padding = line - kv.shape[-1]
    return jnp.pad(kv, [(0, 0)] * (kv.ndim - 1) + [(0, padding)]) if padding else kv


def copy_blocks(
    kv_pages: KVPages, src: jax.Array, dst: jax.Array, count: jax.typing.ArrayLike | None = None
) -> KVPages:
    """Copies whole blocks, in all layers: what copy-on-write and defragmentation ask for.

    Args:
        kv_pages: the pool; donate it and the copies are made in place.
        src: i32[C], blocks to copy from.
        dst: i32[C], blocks to copy to, disjoint from src and from one another.
        count: i32[], how many of the pairs to copy, the first ones; None copies all. The cost follows count, not C.

    Returns:
        The pool with the copies made. A pair with an id outside [0, num_blocks) is skipped.

    Raises:
        ValueError: src and dst differ in shape, are not vectors, or are not integers.
    """
    if src.ndim != 1 or src.shape != dst.shape:
        raise ValueError(f"src {src.shape} and dst {dst.shape} must be vectors of the same length")
    check_integers(src=src, dst=dst)
    if src.shape[0] == 0:
        return kv_pages
    return _copy(kv_pages, src, dst, jnp.asarray(src.shape[0] if count is None else count, jnp.int32))


@jax.jit
def _copy(kv_pages: KVPages, src: jax.Array, dst: jax.Array, count: jax.Array) -> KVPages:
    def copy_one(i: jax.Array, pages: KVPages) -> KVPages:
        in_pool = (jnp.minimum(src[i], dst[i]) >= 0) & (jnp.maximum(src[i], dst[i]) < kv_pages.num_blocks)
        # Slices clamp what is out of range; a skipped pair becomes block 0 copied onto itself instead.
        source, target = jnp.where(in_pool, src[i], 0), jnp.where(in_pool, dst[i], 0)

        def copy_in(x: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice_in_dim(x, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, block, target, axis=1)

        return jax.tree.map(copy_in, pages)

    return jax.lax.fori_loop(0, jnp.minimum(count, src.shape[0]), copy_one, kv_pages)


def gather_kv(
    kv_pages: KVPages, layer: jax.typing.ArrayLike, block_ids: jax.Array, length: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Reads the K and V of one sequence out of the pool, in the order of its tokens.

    Args:
        kv_pages: the pool.
        layer: i32[], which layer.
        block_ids: i32[P], the sequence's line of the block table.
        length: i32[], its tokens; what lies past them in the blocks is not read.

    Returns:
        k, v: [P * B, H, D] in the pool's dtype, or dequantised to float32; zero from `length` on, and zero for ids
        outside [0, num_blocks).

    Raises:
        ValueError: block_ids is not a vector of integers.
    """
    if block_ids.ndim != 1:
        raise ValueError(f"block_ids has shape {block_ids.shape}; give one sequence's ids, a vector")
    check_integers(block_ids=block_ids)
    return _gather(kv_pages, jnp.asarray(layer, jnp.int32), block_ids, jnp.asarray(length, jnp.int32))


@jax.jit
def _gather(
    kv_pages: KVPages, layer: jax.Array, block_ids: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    k, v = read_blocks(kv_pages, layer, block_ids)  # [H, P * B, D]
    position = jnp.arange(k.shape[-2])
    known = jnp.repeat((block_ids >= 0) & (block_ids < kv_pages.num_blocks), kv_pages.block_size)
    keep = ((position < length) & known)[:, None, None]
    return jnp.where(keep, jnp.swapaxes(k, 0, 1), 0), jnp.where(keep, jnp.swapaxes(v, 0, 1), 0)


def read_blocks(kv_pages: KVPages, layer: jax.typing.ArrayLike, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gathers blocks of one layer: ids [..., P] give k, v [..., H, P * B, D], float32 if the pool is quantised. Ids out
    of range are clamped, so that table padding may hold anything; the caller masks what it did not ask for."""
    k, v = _read_stored(kv_pages, layer, block_ids)
    if kv_pages.scales is None:
        return k, v
    k_scale, v_scale = _read_scales(kv_pages, kv_pages.scales, layer, block_ids)
    return dequantise(k, k_scale), dequantise(v, v_scale)


def _read_stored(kv_pages: KVPages, layer: jax.typing.ArrayLike, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    ids = jnp.clip(block_ids, 0, kv_pages.num_blocks - 1)[..., None, :]
    heads = jnp.arange(kv_pages.num_kv_heads)[:, None]
    shape = (*block_ids.shape[:-1], kv_pages.num_kv_heads, block_ids.shape[-1] * kv_pages.block_size, -1)
    if kv_pages.kv_on_lanes:
        # One gather that is cut in two: on a CPU two gathers of half a line took longer than the extra copy.
        kv = kv_pages.pool.at[layer, ids, heads].get(mode="promise_in_bounds").reshape(shape)
        return kv[..., : kv_pages.head_dim], kv[..., kv_pages.head_dim : 2 * kv_pages.head_dim]
    k = kv_pages.pool.at[layer, ids, K_PART, heads].get(mode="promise_in_bounds").reshape(shape)
    v = kv_pages.pool.at[layer, ids, V_PART, heads].get(mode="promise_in_bounds").reshape(shape)
    return k, v


def _read_scales(
    kv_pages: KVPages, scales: jax.Array, layer: jax.typing.ArrayLike, block_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The K and V scales of blocks: ids [..., P] give f32[..., H, P * B] each."""
    ids = jnp.clip(block_ids, 0, kv_pages.num_blocks - 1)
    both = scales.at[layer, ids].get(mode="promise_in_bounds")  # [..., P, 2, F]
    both = both[..., : kv_pages.num_kv_heads * kv_pages.block_size]
    both = jnp.moveaxis(both.reshape(*both.shape[:-1], kv_pages.num_kv_heads, -1), -4, -2)  # [..., 2, H, P, B]
    both = both.reshape(*both.shape[:-2], -1)
    return both[..., K_PART, :, :], both[..., V_PART, :, :]


def check_integers(**arrays: jax.Array) -> None:
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}; ids, slots and lengths are int32")
