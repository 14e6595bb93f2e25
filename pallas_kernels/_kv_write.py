"""Writing the K and V of new tokens into the pool, quantising on the way where the pool does.

Two implementations with the same result, bit for bit: XLA's scatter, and on TPUs a kernel.

L layers, N blocks, H KV heads, B tokens a block, D head_dim, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _platform
from pallas_kernels._kv_pages import KVPages, check_integers, side_by_side
from pallas_kernels._kv_quantise import quantise

WRITERS = ("xla", "tpu")


def write_kv(
    kv_pages: KVPages,
    layer: jax.typing.ArrayLike,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: Literal["xla", "tpu"] | None = None,
    interpret: Any = False,
) -> KVPages:
    """Writes the K and V of tokens into their slots of one layer.

    Differentiable in k, v and the pool, unless the pool is quantised: then no gradient flows.

    Args:
        kv_pages: the pool; donate it (or carry it through a loop) and the write is in place.
        layer: i32[], which layer; may be traced.
        k: [T, H, D], cast to the pool's dtype, or quantised with a scale a token and head.
        v: [T, H, D], likewise.
        slot_mapping: i32[T], block * block_size + offset of each token. A slot outside [0, num_slots), a negative
            one included, is dropped. No slot inside may occur twice.
        implementation: "xla" or "tpu", the Pallas kernel. None: the kernel on a TPU where it can, else XLA.
        interpret: for the kernel: whether to interpret it, or Pallas's InterpretParams.

    Returns:
        The pool with the tokens written.

    Raises:
        ValueError: shapes or dtypes that don't fit the pool.
        NotImplementedError: the kernel was asked for and can't do this; the message names what it can't.
    """
    _check_tokens(kv_pages, k, v, slot_mapping)
    layer = jnp.asarray(layer, jnp.int32)
    if k.shape[0] == 0:
        return kv_pages
    if _choose(implementation, kv_pages, k.shape[0]) == "xla":
        return _write(kv_pages, layer, k, v, slot_mapping)
    slot_mapping = slot_mapping.astype(jnp.int32)
    if kv_pages.is_quantised:
        return _write_tpu(kv_pages, layer, k, v, slot_mapping, interpret)
    return _write_tpu_with_backward(kv_pages, layer, k, v, slot_mapping, interpret)


def _choose(implementation: str | None, kv_pages: KVPages, num_tokens: int) -> str:
    if implementation not in (*WRITERS, None):
        raise ValueError(f"implementation={implementation!r} is unknown; use one of {WRITERS}, or None")
    if implementation == "xla" or (implementation is None and _platform.kernel_of_this_platform() != "tpu"):
        return "xla"
    from pallas_kernels._tpu import write  # Pallas takes a second to import, and a CPU needs none of it

    reason = write.why_not(kv_pages, num_tokens)
    if reason is not None and implementation == "tpu":
        raise NotImplementedError(f'implementation="tpu": {reason}; use "xla", or None')
    return "tpu" if reason is None else "xla"


def _write_tpu(
    kv_pages: KVPages, layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, interpret: Any
) -> KVPages:
    from pallas_kernels._tpu import write

    return write.write(kv_pages, layer, k, v, slot_mapping, interpret)


_write_tpu_with_backward = jax.custom_vjp(_write_tpu, nondiff_argnums=(5,))


def _forward(
    kv_pages: KVPages, layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, interpret: Any
) -> tuple[KVPages, Any]:
    # The shapes and dtypes of k and v are kept as arrays without tokens: a backward pass needs no more of them.
    return _write_tpu(kv_pages, layer, k, v, slot_mapping, interpret), (layer, slot_mapping, k[:0], v[:0])


def _backward(interpret: Any, kept: Any, gradient: KVPages) -> tuple[KVPages, None, jax.Array, jax.Array, None]:
    layer, slot_mapping, k, v = kept
    k, v = (jax.ShapeDtypeStruct((slot_mapping.shape[0], *x.shape[1:]), x.dtype) for x in (k, v))
    # The pool after a write is linear in the pool before it and in the tokens.
    transposed = jax.linear_transpose(lambda pool, k, v: _write(pool, layer, k, v, slot_mapping), gradient, k, v)
    d_pool, d_k, d_v = transposed(gradient)
    return d_pool, None, d_k, d_v, None


_write_tpu_with_backward.defvjp(_forward, _backward)


@jax.jit
def _write(kv_pages: KVPages, layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> KVPages:
    block_size = kv_pages.block_size
    in_pool = (slot_mapping >= 0) & (slot_mapping < kv_pages.num_slots)
    # An index past the end is what mode="drop" drops; a negative one would count from the end.
    block = jnp.where(in_pool, slot_mapping // block_size, kv_pages.num_blocks)
    offset = jnp.where(in_pool, slot_mapping % block_size, 0)
    if kv_pages.scales is None:
        return dataclasses.replace(kv_pages, pool=_write_values(kv_pages, layer, k, v, block, offset))
    (k, k_scale), (v, v_scale) = quantise(k, kv_pages.dtype), quantise(v, kv_pages.dtype)
    scales = jnp.stack([k_scale, v_scale], axis=1)  # [T, 2, H]
    parts, heads = jnp.arange(2)[None, :, None], jnp.arange(kv_pages.num_kv_heads)[None, None, :]
    target = kv_pages.scales.at[layer, block[:, None, None], parts, heads * block_size + offset[:, None, None]]
    return dataclasses.replace(
        kv_pages,
        pool=_write_values(kv_pages, layer, k, v, block, offset),
        scales=target.set(scales, mode="drop", unique_indices=True),
    )


def _write_values(
    kv_pages: KVPages, layer: jax.Array, k: jax.Array, v: jax.Array, block: jax.Array, offset: jax.Array
) -> jax.Array:
    """The pool with k and v [T, H, D] at (block, offset) i32[T] of a layer; a block of N is dropped."""
    heads = jnp.arange(kv_pages.num_kv_heads)
    # Every axis but the last is indexed: left as a slice, it makes XLA for TPU copy the pool.
    if kv_pages.kv_on_lanes:
        tokens = side_by_side(k, v, kv_pages.pool.shape[-1])  # [T, H, E]; the padding is indexed like the rest
        target = kv_pages.pool.at[layer, block[:, None], heads[None, :], offset[:, None]]
    else:
        tokens = jnp.stack([k, v], axis=1)  # [T, 2, H, D]
        parts = jnp.arange(2)[None, :, None]
        target = kv_pages.pool.at[layer, block[:, None, None], parts, heads[None, None, :], offset[:, None, None]]
    return target.set(tokens.astype(kv_pages.dtype), mode="drop", unique_indices=True)


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
    check_integers(slot_mapping=slot_mapping)
