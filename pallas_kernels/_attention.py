"""`paged_attention`: checks what can be checked without running, then hands over to one implementation."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _platform
from pallas_kernels._backward import Arguments, with_backward
from pallas_kernels._kv_pages import KVPages
from pallas_kernels._reference import attend_reference
from pallas_kernels._xla import attend_xla

Implementation = Literal["reference", "xla", "cpu", "tpu", "gpu"]
IMPLEMENTATIONS = ("reference", "xla", "cpu", "tpu", "gpu")
KERNELS = ("cpu", "tpu", "gpu")

# Wider than any context, and small enough that position - window does not wrap in int32.
LARGEST_WINDOW = 2**30


def paged_attention(
    q: jax.Array,
    kv_pages: KVPages,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    layer: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    sliding_window: jax.typing.ArrayLike | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    causal: bool = True,
    max_query_len: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of packed query tokens over the paged KV of their sequences.

    The queries of row r are q[query_start_loc[r] : query_start_loc[r + 1]]; they are the last tokens of a sequence of
    seq_lens[r] tokens, so query i of n has position seq_lens[r] - n + i. Prefill, a chunk of one, decode and any mix
    are the same call. softmax(cap(scale * q k^T) + mask) v, with cap(x) = soft_cap * tanh(x / soft_cap) (Gemma 2,
    arXiv 2408.00118, section 2) and a sink adding exp(sink) to the softmax's denominator (arXiv 2309.17453).

    Differentiable (in reverse, once) in q, the pool, scale and sinks, also through the LSE, whatever implementation
    ran forwards; a quantised pool is a constant. "reference" is differentiated by jax itself, to any order.

    Args:
        q: [num_tokens, num_q_heads, head_dim], sequences packed one after another; tokens past the last row give 0.
        kv_pages: the pool, the K and V of these query tokens already written.
        block_tables: i32[num_seqs, max_blocks_per_seq], block ids in the order of the tokens; entries past a
            sequence's length, or before its window, may hold anything.
        seq_lens: i32[num_seqs], KV tokens of each row, those of this step included; 0 is legal.
        query_start_loc: i32[num_seqs + 1], non-decreasing from 0; equal neighbours are a row without queries.
        layer: i32[], which layer of the pool; may be traced.
        scale: what q k^T is multiplied with; may be traced. None: 1 / sqrt(head_dim).
        sliding_window: W in tokens, at least 1; may be traced. Query i sees keys i - W + 1 .. i. None: full attention;
            where local and global layers share one program, give the global ones a very large number. A traced
            value below 1 sees no key.
        soft_cap: the bound on the scores, applied before the mask. None: off.
        sinks: f32[num_q_heads], one logit a head that takes weight and gives no value. None: none.
        causal: whether a query sees only keys up to its own position. False: all seq_lens[r] keys.
        max_query_len: an upper bound on the queries a row has; 1 leaves the prefill part out. None: num_tokens. Rows
            with more queries than it give wrong results.
        return_lse: whether to return the log-sum-exp as well.
        implementation: "reference" (slow and plain), "xla", "cpu", "tpu", "gpu". None: the best of the platform.
        interpret: for the Pallas implementations: whether to interpret the kernel, or the backend's InterpretParams.

    Returns:
        out [num_tokens, num_q_heads, head_dim] in q's dtype; with return_lse also the LSE [num_tokens, num_q_heads],
        natural log, sink included, float32 (float64 for float64 queries). A query with no visible key gives 0 and
        -inf. The arithmetic is float32 at full precision, or float64 for float64 queries.

    Raises:
        ValueError: shapes or dtypes that don't fit together, or an option out of its range.
        NotImplementedError: the implementation that was asked for can't do this; the message names what it can't.
    """
    _check_arrays(q, kv_pages, block_tables, seq_lens, query_start_loc, sinks)
    _check_options(layer, sliding_window, soft_cap, causal, max_query_len, kv_pages.num_layers)
    chosen = _choose(implementation, q, kv_pages)
    if q.shape[0] == 0:
        return (q, jnp.zeros(q.shape[:2], jnp.promote_types(q.dtype, jnp.float32))) if return_lse else q
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    arguments = Arguments(
        q,
        kv_pages if kv_pages.scales is None else jax.lax.stop_gradient(kv_pages),
        block_tables.astype(jnp.int32),
        seq_lens.astype(jnp.int32),
        query_start_loc.astype(jnp.int32),
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(1 / math.sqrt(q.shape[-1]) if scale is None else scale, dtype),
        None if sliding_window is None else _clip_window(sliding_window),
        sinks,
    )
    cap = None if soft_cap is None else float(soft_cap)
    longest = q.shape[0] if max_query_len is None else min(max_query_len, q.shape[0])
    if chosen == "reference":
        out, lse = attend_reference(*arguments, soft_cap=cap, causal=causal)
    else:
        attend = attend_xla if chosen == "xla" else functools.partial(_kernel(chosen).attend, interpret=interpret)
        out, lse = with_backward(attend, arguments, soft_cap=cap, causal=causal, max_query_len=longest)
    return (out, lse) if return_lse else out


def _clip_window(window: jax.typing.ArrayLike) -> jax.Array:
    if isinstance(window, int):
        return jnp.asarray(min(window, LARGEST_WINDOW), jnp.int32)
    return jnp.minimum(window, LARGEST_WINDOW).astype(jnp.int32)


def _choose(implementation: str | None, q: jax.Array, kv_pages: KVPages) -> str:
    if implementation is None:
        kernel = _platform.kernel_of_this_platform()
        return kernel if kernel is not None and _kernel(kernel).why_not(q, kv_pages) is None else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; use one of {IMPLEMENTATIONS}, or None")
    if implementation in KERNELS:
        reason = _kernel(implementation).why_not(q, kv_pages)
        if reason is not None:
            raise NotImplementedError(f'implementation={implementation!r}: {reason}; use "xla", or None')
    return implementation


def _kernel(name: str) -> ModuleType:
    # Imported where it is used: Pallas takes a second to import, and a CPU needs none of it; a TPU needs no numba.
    if name == "cpu":
        from pallas_kernels import _cpu

        return _cpu
    if name == "tpu":
        from pallas_kernels import _tpu

        return _tpu
    from pallas_kernels import _gpu

    return _gpu


def _check_arrays(
    q: jax.Array,
    kv_pages: KVPages,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    sinks: jax.Array | None,
) -> None:
    if q.ndim != 3 or q.shape[2] != kv_pages.head_dim:
        raise ValueError(
            f"q has shape {q.shape}; it must be [num_tokens, num_q_heads, head_dim] with the pool's head_dim, "
            f"{kv_pages.head_dim}"
        )
    num_q_heads, num_kv_heads = q.shape[1], kv_pages.num_kv_heads
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_q_heads} heads and the pool {num_kv_heads} KV heads; make the first a multiple of the second"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}; it must be a floating-point array")
    if q.dtype != kv_pages.dtype and jnp.float64 in (q.dtype, kv_pages.dtype):
        raise ValueError(f"q has dtype {q.dtype} and the pool {kv_pages.dtype}; float64 goes with float64 only")
    if seq_lens.ndim != 1 or seq_lens.shape[0] == 0:
        raise ValueError(f"seq_lens has shape {seq_lens.shape}; it must be [num_seqs] with at least one row")
    num_seqs = seq_lens.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != num_seqs or block_tables.shape[1] == 0:
        raise ValueError(
            f"block_tables has shape {block_tables.shape} and seq_lens {seq_lens.shape}; the first must be "
            f"[{num_seqs}, max_blocks_per_seq], at least one block wide"
        )
    if query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(
            f"query_start_loc has shape {query_start_loc.shape} for {num_seqs} rows; it must be [{num_seqs + 1}]"
        )
    tables = {"block_tables": block_tables, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    for name, x in tables.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}; it must be int32")
    if sinks is not None and (sinks.shape != (num_q_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"sinks is {sinks.dtype}{list(sinks.shape)}; it must be float32[{num_q_heads}], one a query head"
        )


def _check_options(
    layer: jax.typing.ArrayLike,
    sliding_window: jax.typing.ArrayLike | None,
    soft_cap: float | None,
    causal: bool,
    max_query_len: int | None,
    num_layers: int,
) -> None:
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}; the pool has layers 0 to {num_layers - 1}")
    if sliding_window is not None and not causal:
        raise ValueError(
            "sliding_window with causal=False is not defined: a window ends at the query's own position; "
            "leave one of the two out"
        )
    if isinstance(sliding_window, int) and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for full attention")
    if soft_cap is not None:
        if isinstance(soft_cap, jax.Array):
            raise ValueError("soft_cap is an array; it is a static option: give a Python number, or None for no cap")
        if not (soft_cap > 0 and math.isfinite(soft_cap)):
            raise ValueError(f"soft_cap is {soft_cap}; it must be a positive finite number, or None for no cap")
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"max_query_len is {max_query_len}; it must be at least 1, or None for num_tokens")
