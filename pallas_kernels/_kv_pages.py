"""The KV pool: one array for all layers whose layout only this package knows, and the three ways to touch it.

Where head_dim is a multiple of 128 (the lanes of a TPU register) the pool is `[L, N, 2, H, B, D]`, K and V apart;
else `[L, N, H, B, 2 * D]`, K and V side by side, so that two heads of 64 fill the lanes instead of padding them.
Either way one block of one layer is contiguous, all its heads and both K and V. `write_kv` and `copy_blocks` are
updates in place where the pool is donated, also as the carry of a `lax.scan` over layers.

L layers, N blocks (the null block included), H KV heads, B tokens a block, D head_dim, T tokens.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

LANES = 128
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32", "float64")

K_PART = 0
V_PART = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The paged KV cache of all layers. A pytree; make one with `KVPages.zeros`, and treat its layout as private."""

    pool: jax.Array  # [L, N, 2, H, B, D] or [L, N, H, B, 2 * D], see the module

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
            dtype: bfloat16, float16, float32, or float64 where x64 is enabled.

        Returns:
            A pool of zeros.

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
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        dtype = jnp.dtype(dtype)
        if dtype.name not in SUPPORTED_DTYPES:
            raise ValueError(f"a KV pool of dtype {dtype.name} is not supported; use one of {SUPPORTED_DTYPES}")
        if dtype != jax.dtypes.canonicalize_dtype(dtype):
            raise ValueError(f"a KV pool of dtype {dtype.name} needs jax_enable_x64; it is off")
        shape: tuple[int, ...]
        if head_dim % LANES == 0:
            shape = (num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim)
        else:
            shape = (num_layers, num_blocks, num_kv_heads, block_size, 2 * head_dim)
        return KVPages(jnp.zeros(shape, dtype))

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
    def head_dim(self) -> int:
        return self.pool.shape[-1] // (2 if self.kv_on_lanes else 1)

    @property
    def dtype(self) -> jnp.dtype:
        return self.pool.dtype

    @property
    def num_slots(self) -> int:
        """Token positions a layer; `write_kv` drops a slot outside [0, num_slots)."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, all layers."""
        return math.prod(self.pool.shape) * self.dtype.itemsize


def write_kv(
    kv_pages: KVPages, layer: jax.typing.ArrayLike, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> KVPages:
    """Writes the K and V of tokens into their slots of one layer.

    Args:
        kv_pages: the pool; donate it (or carry it through a loop) and the write is in place.
        layer: i32[], which layer; may be traced.
        k: [T, H, D], cast to the pool's dtype.
        v: [T, H, D], cast to the pool's dtype.
        slot_mapping: i32[T], block * block_size + offset of each token. A slot outside [0, num_slots), a negative
            one included, is dropped. No slot inside may occur twice.

    Returns:
        The pool with the tokens written.

    Raises:
        ValueError: shapes or dtypes that don't fit the pool.
    """
    _check_tokens(kv_pages, k, v, slot_mapping)
    return _write(kv_pages, jnp.asarray(layer, jnp.int32), k, v, slot_mapping)


@jax.jit
def _write(kv_pages: KVPages, layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> KVPages:
    block_size, num_heads = kv_pages.block_size, kv_pages.num_kv_heads
    in_pool = (slot_mapping >= 0) & (slot_mapping < kv_pages.num_slots)
    # An index past the end is what mode="drop" drops; a negative one would count from the end.
    block = jnp.where(in_pool, slot_mapping // block_size, kv_pages.num_blocks)
    offset = jnp.where(in_pool, slot_mapping % block_size, 0)
    heads = jnp.arange(num_heads)
    # Every axis but the last is indexed: left as a slice, it makes XLA for TPU copy the pool.
    if kv_pages.kv_on_lanes:
        tokens = jnp.concatenate([k, v], axis=-1)  # [T, H, 2 * D]
        target = kv_pages.pool.at[layer, block[:, None], heads[None, :], offset[:, None]]
    else:
        tokens = jnp.stack([k, v], axis=1)  # [T, 2, H, D]
        parts = jnp.arange(2)[None, :, None]
        target = kv_pages.pool.at[layer, block[:, None, None], parts, heads[None, None, :], offset[:, None, None]]
    pool = target.set(tokens.astype(kv_pages.dtype), mode="drop", unique_indices=True)
    return dataclasses.replace(kv_pages, pool=pool)


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
    _check_integers(src=src, dst=dst)
    if src.shape[0] == 0:
        return kv_pages
    return _copy(kv_pages, src, dst, jnp.asarray(src.shape[0] if count is None else count, jnp.int32))


@jax.jit
def _copy(kv_pages: KVPages, src: jax.Array, dst: jax.Array, count: jax.Array) -> KVPages:
    def copy_one(i: jax.Array, pool: jax.Array) -> jax.Array:
        in_pool = (jnp.minimum(src[i], dst[i]) >= 0) & (jnp.maximum(src[i], dst[i]) < kv_pages.num_blocks)
        # Slices clamp what is out of range; a skipped pair becomes block 0 copied onto itself instead.
        block = jax.lax.dynamic_slice_in_dim(pool, jnp.where(in_pool, src[i], 0), 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, block, jnp.where(in_pool, dst[i], 0), axis=1)

    pool = jax.lax.fori_loop(0, jnp.minimum(count, src.shape[0]), copy_one, kv_pages.pool)
    return dataclasses.replace(kv_pages, pool=pool)


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
        k, v: [P * B, H, D] in the pool's dtype, zero from `length` on, and zero for ids outside [0, num_blocks).

    Raises:
        ValueError: block_ids is not a vector of integers.
    """
    if block_ids.ndim != 1:
        raise ValueError(f"block_ids has shape {block_ids.shape}; give one sequence's ids, a vector")
    _check_integers(block_ids=block_ids)
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
    """Gathers blocks of one layer: ids [..., P] give k, v [..., H, P * B, D]. Ids out of range are clamped, so that
    table padding may hold anything; the caller masks what it did not ask for."""
    ids = jnp.clip(block_ids, 0, kv_pages.num_blocks - 1)[..., None, :]
    heads = jnp.arange(kv_pages.num_kv_heads)[:, None]
    shape = (*block_ids.shape[:-1], kv_pages.num_kv_heads, block_ids.shape[-1] * kv_pages.block_size, -1)
    if kv_pages.kv_on_lanes:
        # One gather that is cut in two: on a CPU two gathers of half a line took longer than the extra copy.
        kv = kv_pages.pool.at[layer, ids, heads].get(mode="promise_in_bounds").reshape(shape)
        return kv[..., : kv_pages.head_dim], kv[..., kv_pages.head_dim :]
    k = kv_pages.pool.at[layer, ids, K_PART, heads].get(mode="promise_in_bounds").reshape(shape)
    v = kv_pages.pool.at[layer, ids, V_PART, heads].get(mode="promise_in_bounds").reshape(shape)
    return k, v


def _check_tokens(kv_pages: KVPages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> None:
    expected = (slot_mapping.shape[0] if slot_mapping.ndim else 0, kv_pages.num_kv_heads, kv_pages.head_dim)
    for name, x in (("k", k), ("v", v)):
        if slot_mapping.ndim != 1 or x.shape != expected:
            raise ValueError(
                f"{name} has shape {x.shape} and slot_mapping {slot_mapping.shape}; for this pool they are "
                f"[num_tokens, {kv_pages.num_kv_heads}, {kv_pages.head_dim}] and [num_tokens]"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}; it must be a floating-point array")
    _check_integers(slot_mapping=slot_mapping)


def _check_integers(**arrays: jax.Array) -> None:
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}; ids, slots and lengths are int32")
