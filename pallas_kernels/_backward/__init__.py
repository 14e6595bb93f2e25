"""The backward pass of paged attention, the same for every implementation: recomputed from the saved log-sum-exp.

With s = scale q k^T, c = cap(s) and p = exp(c - lse), the cotangents of out and lse give (FlashAttention-2, arXiv
2307.08691, section 3.1, with the LSE's cotangent and the cap's derivative added)

    d_c = p (d_out v^T + shift),  shift = d_lse - d_out out^T,  d_s = d_c cap'(s),
    d_v = p^T d_out,  d_k = scale d_s^T q,  d_q = scale d_s k,  d_sink = sum over queries of exp(sink - lse) shift.

Like the forward pass it takes rows with one query several at a time and the others a tile at a time, and its work
follows the real lengths. Only the one layer that was read is kept between the passes, so that a decoder that writes and
reads a pool layer by layer keeps one pool and not one a layer; its gradient is summed in float32 and becomes an update
of zeros, which XLA turns into an addition to that layer alone where the gradients of several layers are added up.

T query tokens, S rows, Hq query heads, H KV heads, G = Hq / H, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._backward import decode, pool_gradient, prefill
from pallas_kernels._backward.tile import Gradients, Saved
from pallas_kernels._xla.problem import Problem


class Options(NamedTuple):
    """The static options of a call."""

    soft_cap: float | None
    causal: bool
    max_query_len: int
    num_layers: int


class Arguments(NamedTuple):
    """The arrays of a call, checked; None where an option is off. Also their cotangents, None where that is zero."""

    q: Any  # [T, Hq, D]
    kv_pages: Any  # KVPages
    block_tables: Any  # i32[S, P]
    seq_lens: Any  # i32[S]
    query_start_loc: Any  # i32[S + 1]
    layer: Any  # i32[]
    scale: Any  # []
    sliding_window: Any  # i32[]
    sinks: Any  # [Hq]


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass."""

    arguments: Arguments  # kv_pages cut down to the one layer that was read, as layer 0
    layer: jax.Array  # i32[], which one it is
    out: jax.Array  # [T, Hq, D]
    lse: jax.Array  # [T, Hq]


Attend = Callable[..., tuple[jax.Array, jax.Array]]


def with_backward(
    forward: Attend, arguments: Arguments, *, soft_cap: float | None, causal: bool, max_query_len: int
) -> tuple[jax.Array, jax.Array]:
    """forward(*arguments, the options), differentiable in q, the pool, scale and sinks.

    A quantised pool is a constant: its cotangent is zero. Reverse mode only, and once: jax raises for a forward-mode
    or a second derivative.

    Args:
        forward: an implementation.
        arguments: its arrays.
        soft_cap: its option.
        causal: its option.
        max_query_len: its option; a bound on the queries of a row here as there.

    Returns:
        out [T, Hq, D] and lse [T, Hq].
    """
    options = Options(soft_cap, causal, max_query_len, arguments.kv_pages.num_layers)
    return _attend(forward, options, arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(forward: Attend, options: Options, arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    return forward(*arguments, soft_cap=options.soft_cap, causal=options.causal, max_query_len=options.max_query_len)


def _forward(forward: Attend, options: Options, arguments: Arguments) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    out, lse = _attend(forward, options, arguments)
    layer = arguments.layer
    one_layer = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), arguments.kv_pages)
    kept = arguments._replace(kv_pages=one_layer, layer=jnp.zeros_like(layer))
    return (out, lse), Residuals(kept, layer, out, lse)


def _backward(
    forward: Attend, options: Options, residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Arguments]:
    return (_differentiate(residuals, *cotangents, options=options),)


_attend.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames="options")
def _differentiate(residuals: Residuals, d_out: jax.Array, d_lse: jax.Array, *, options: Options) -> Arguments:
    arguments = residuals.arguments
    # Where no key was seen out and lse are constants, and what is not finite must not spread.
    seen = (residuals.lse != -jnp.inf)[..., None]  # [T, Hq, 1]; a NaN is seen, and shows
    q, d_out = jnp.where(seen, arguments.q, 0), jnp.where(seen, d_out, 0)
    problem = _problem(arguments._replace(q=q), options)
    saved = _save(problem, residuals, d_out, d_lse)
    gradients = Gradients(jnp.zeros(problem.q.shape, problem.dtype), pool_gradient.start(problem))
    gradients = decode.differentiate(problem, saved, gradients)
    if options.max_query_len > 1:
        gradients = prefill.differentiate(problem, saved, gradients, options.max_query_len)
    d_scaled_q = gradients.q.reshape(q.shape)
    return Arguments(
        q=(d_scaled_q * arguments.scale).astype(q.dtype),
        kv_pages=pool_gradient.finish(gradients.kv, problem, residuals.layer, options.num_layers),
        block_tables=None,
        seq_lens=None,
        query_start_loc=None,
        layer=None,
        scale=jnp.sum(d_scaled_q * q.astype(problem.dtype)),
        sliding_window=None,
        sinks=_sink_gradient(arguments.sinks, saved),
    )


def _problem(arguments: Arguments, options: Options) -> Problem:
    num_tokens, num_q_heads, head_dim = arguments.q.shape
    num_kv_heads = arguments.kv_pages.num_kv_heads
    q = arguments.q.reshape(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    arrays = arguments._replace(q=q, sinks=None)  # the saved log-sum-exp has the sinks in it
    return Problem(**arrays._asdict(), soft_cap=options.soft_cap, causal=options.causal)


def _save(problem: Problem, residuals: Residuals, d_out: jax.Array, d_lse: jax.Array) -> Saved:
    dtype, lse = problem.dtype, residuals.lse
    d_out = d_out.astype(dtype)
    d_lse = jnp.where(lse != -jnp.inf, d_lse.astype(dtype), 0)
    shift = d_lse - jnp.sum(d_out * residuals.out.astype(dtype), axis=-1)
    grouped = problem.q.shape[:-1]
    return Saved(d_out.reshape(problem.q.shape), lse.astype(dtype).reshape(grouped), shift.reshape(grouped))


def _sink_gradient(sinks: jax.Array | None, saved: Saved) -> jax.Array | None:
    """[Hq]: a sink is one more score, with the value 0."""
    if sinks is None:
        return None
    seen = saved.lse != -jnp.inf
    scores = sinks.astype(saved.lse.dtype).reshape(saved.lse.shape[1:])  # [H, G]
    weights = jnp.exp(jnp.where(seen, scores - saved.lse, -jnp.inf))  # [T, H, G]
    return jnp.sum(weights * saved.shift, axis=0).reshape(sinks.shape).astype(sinks.dtype)
