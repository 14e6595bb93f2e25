"""Gradients of `paged_attention`: against jax's own of dense attention, and against finite differences.

The pools hold NaN in every slot without a token, table padding is wild, and so are q and the cotangents of tokens past
the last row. To compile little, tests share programs: shapes and static options are few, masks and windows are arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages, gather_kv, paged_attention, write_kv
from pallas_kernels._cascade import cascade_attention

# Decode, empty, whole and chunked prefill, rows without queries; two tiles of keys, two of queries.
SEQ_LENS = [33, 0, 20, 7, 1, 150, 64, 40]
QUERY_LENS = [1, 0, 20, 0, 1, 70, 2, 1]
SMALL = {"head_dim": 16, "block_size": 8, "max_blocks": 20, "num_blocks": 60, "num_rows": 9, "num_tokens": 97}
SCALE = 0.3
SINKS = np.array([0.5, -3.0, 2.0, 1.0])
TOLERANCE = {"float64": 1e-12, "float32": 3e-5, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def visible_keys(problem: oracle.Problem, sliding_window: int | None = None, causal: bool = True) -> np.ndarray:
    """bool[num_tokens, all keys of all rows]: which key each query sees."""
    starts = np.concatenate([[0], np.cumsum(problem.seq_lens)])
    visible = np.zeros((len(problem.q), starts[-1]), bool)
    token = 0
    for start, seq_len, query_len in zip(starts, problem.seq_lens, problem.query_lens, strict=False):
        for position in range(seq_len - query_len, seq_len):
            last = position + 1 if causal else seq_len
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            visible[token, start + first : start + last] = True
            token += 1
    return visible


def dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: jax.Array,
    sinks: jax.Array | None,
    visible: jax.Array,
    *,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of all queries over all keys under one mask, out 0 where it is empty; for jax to differentiate."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -1e30)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, extra], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)] * visible
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest"), jax.nn.logsumexp(scores, axis=-1).T


def rounded(problem: oracle.Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q and the keys and values of all rows one after another, in float64, as the pool's dtype has them."""
    arrays = (problem.q, np.concatenate(problem.keys), np.concatenate(problem.values))
    return tuple(x.astype(problem.kv_pages.dtype).astype(np.float64) for x in arrays)


def cotangents(problem: oracle.Problem) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal(problem.q.shape), rng.standard_normal(problem.q.shape[:2])


@functools.partial(jax.jit, static_argnames="soft_cap")
def pull_dense(inputs: tuple, visible: jax.Array, d: tuple, *, soft_cap: float | None) -> tuple:
    _, pull_back = jax.vjp(lambda *x: dense(*x, visible, soft_cap=soft_cap), *inputs)
    seen = visible.any(1)[:, None]
    return pull_back((d[0] * seen[..., None], d[1] * seen))


def dense_gradients(
    problem: oracle.Problem, sinks: np.ndarray | None, visible: np.ndarray, soft_cap: float | None = None
) -> tuple[np.ndarray, ...]:
    """d_q, d_k, d_v, d_scale, d_sinks; of out and LSE where a key is visible."""
    inputs = (*rounded(problem), np.float64(SCALE), sinks)
    found = pull_dense(inputs, visible, cotangents(problem), soft_cap=soft_cap)
    return tuple(None if x is None else np.asarray(x) for x in found)


@functools.partial(jax.jit, static_argnames=("implementation", "soft_cap", "causal", "max_query_len"))
def pull(q: jax.Array, pool: KVPages, scale: jax.Array, sinks: Any, tables: tuple, d: tuple, **options: Any) -> Any:
    def attend(q: jax.Array, pool: KVPages, scale: jax.Array, sinks: Any) -> Any:
        return paged_attention(q, pool, *tables, scale=scale, sinks=sinks, layer=1, return_lse=True, **options)

    (out, lse), pull_back = jax.vjp(attend, q, pool, scale, sinks)
    return pull_back((d[0].astype(out.dtype), d[1].astype(lse.dtype)))


def paged_gradients(
    problem: oracle.Problem, sinks: np.ndarray | None, implementation: str | None = "xla", **options: Any
) -> tuple[np.ndarray, ...]:
    """As `dense_gradients`; what is not a row's must have the gradient 0."""
    q, pool, *tables = problem.arguments()
    count = sum(problem.query_lens)
    d = cotangents(problem)
    q, *d = (jnp.where((jnp.arange(len(x)) < count).reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan) for x in (q, *d))
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    sinks = None if sinks is None else sinks.astype(dtype)
    if options.get("sliding_window") is not None:
        options["sliding_window"] = np.int32(options["sliding_window"])
    d_q, d_pool, d_scale, d_sinks = pull(
        q, pool, np.asarray(SCALE, dtype), sinks, tuple(tables), tuple(d), implementation=implementation, **options
    )
    assert (d_q.dtype, d_pool.dtype, d_scale.dtype) == (q.dtype, pool.dtype, dtype)
    np.testing.assert_array_equal(np.asarray(d_q, np.float64)[count:], 0)
    return (np.asarray(d_q, np.float64), *rows_of_the_pool(problem, d_pool), d_scale, d_sinks)


def rows_of_the_pool(problem: oracle.Problem, d_pool: KVPages) -> tuple[np.ndarray, np.ndarray]:
    """d_k and d_v of every sequence's tokens; every other slot's must be 0."""
    rows: tuple[list, list] = ([], [])
    for table, seq_len in zip(problem.block_tables, problem.seq_lens, strict=True):
        kv = gather_kv(d_pool, problem.layer, table, seq_len)
        for part, x in zip(rows, kv, strict=True):
            part.append(np.asarray(x, np.float64)[:seq_len])
    d_k, d_v = (np.concatenate(part) for part in rows)
    everything = np.abs(np.asarray(d_pool.pool, np.float64)).sum()
    np.testing.assert_allclose(everything, np.abs(d_k).sum() + np.abs(d_v).sum(), rtol=1e-12)
    return d_k, d_v


def assert_close(found: tuple, expected: tuple, tolerance: float) -> None:
    for name, got, want in zip(("q", "k", "v", "scale", "sinks"), found, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            bound = tolerance * np.abs(want).max()
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=bound, err_msg=name)


@pytest.fixture(scope="module")
def mixed() -> oracle.Problem:
    with jax.enable_x64(True):
        return oracle.make(0, SEQ_LENS, QUERY_LENS, **SMALL, dtype="float64")


@pytest.mark.parametrize("window", [1, 8, 37, 128, 2**31 - 1])
def test_equals_the_gradient_of_dense_attention(mixed: oracle.Problem, window: int) -> None:
    expected = dense_gradients(mixed, SINKS, visible_keys(mixed, window), 2.0)
    found = paged_gradients(mixed, SINKS, sliding_window=window, soft_cap=2.0)
    assert_close(found, expected, TOLERANCE["float64"])


def test_every_key_and_heads_of_128() -> None:
    problem = oracle.make(1, SEQ_LENS, QUERY_LENS, **SMALL | {"head_dim": 128}, dtype="float64")
    expected = dense_gradients(problem, None, visible_keys(problem, causal=False))
    assert_close(paged_gradients(problem, None, causal=False), expected, TOLERANCE["float64"])


def test_bfloat16() -> None:
    """A pool's gradient has its dtype; it is summed in float32 and rounded once."""
    problem = oracle.make(2, [33, 20, 12], [1, 20, 1], **SMALL | {"num_tokens": 24}, dtype="bfloat16")
    expected = dense_gradients(problem, None, visible_keys(problem))
    assert_close(paged_gradients(problem, None), expected, TOLERANCE["bfloat16"])


def test_the_reference_has_the_same_gradients() -> None:
    """By jax's own differentiation of it."""
    problem = oracle.make(3, [33, 0, 20, 7, 60], [1, 0, 5, 0, 9], **SMALL | {"num_tokens": 17}, dtype="float64")
    expected = dense_gradients(problem, SINKS, visible_keys(problem, 19), 2.0)
    found = paged_gradients(problem, SINKS, "reference", sliding_window=19, soft_cap=2.0)
    assert_close(found, expected, TOLERANCE["float64"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_for_cpus_forwards_changes_no_gradient(dtype: str) -> None:
    """The backward pass is that of "xla", whatever ran forwards; its residuals, out and LSE, are the kernel's."""
    problem = oracle.make(7, SEQ_LENS, QUERY_LENS, **SMALL, dtype=dtype)
    expected = dense_gradients(problem, SINKS, visible_keys(problem, 37), 2.0)
    for implementation in ("cpu", None):
        found = paged_gradients(problem, SINKS, implementation, sliding_window=37, soft_cap=2.0)
        assert_close(found, expected, TOLERANCE[dtype])


def test_finite_differences(mixed: oracle.Problem) -> None:
    """Along one random direction of all inputs at once; no formula and no differentiation to get wrong."""
    options = {"sliding_window": np.int32(37), "soft_cap": 2.0, "implementation": "xla"}
    q, pool, *tables = mixed.arguments()
    rng = np.random.default_rng(2)
    inputs = (q, pool, np.float64(SCALE), SINKS)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), inputs)
    d_out, d_lse = cotangents(mixed)
    seen = (np.arange(len(mixed.q)) < sum(mixed.query_lens))[:, None]

    @jax.jit
    def value(step: float) -> jax.Array:
        q, pool, scale, sinks = jax.tree.map(lambda x, d: x + step * d, inputs, direction)
        out, lse = paged_attention(q, pool, *tables, layer=1, scale=scale, sinks=sinks, return_lse=True, **options)
        return jnp.sum(out * d_out) + jnp.sum(jnp.where(seen, lse, 0) * d_lse)

    found = pull(*inputs, tuple(tables), (d_out, d_lse), **options)
    slope = sum(np.sum(a * b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose((value(1e-5) - value(-1e-5)) / 2e-5, slope, rtol=1e-7)


def test_rows_that_share_blocks_add_up(mixed: oracle.Problem) -> None:
    """A decode row and two prefill rows over one and the same sequence, as forks have."""
    rows = [6, 6, 6, 6, 5, 1, 1, 1, 1]
    query_lens = [1, 1, 9, 2, 70, 0, 0, 0, 0]
    shared = oracle.Problem(
        mixed.q,
        [mixed.keys[r] for r in rows],
        [mixed.values[r] for r in rows],
        query_lens,
        mixed.kv_pages,
        mixed.block_tables[rows],
        1,
    )
    q, pool, *tables = shared.arguments()
    d_out, d_lse = cotangents(shared)
    options = {"implementation": "xla", "sliding_window": np.int32(37), "soft_cap": 2.0}
    _, d_pool, *_ = pull(q, pool, np.float64(SCALE), SINKS, tuple(tables), (d_out, d_lse), **options)
    d_k, d_v = (np.asarray(x)[:64] for x in gather_kv(d_pool, 1, shared.block_tables[0], np.int32(64)))
    _, expected_k, expected_v, *_ = dense_gradients(shared, SINKS, visible_keys(shared, 37), 2.0)
    for got, want in ((d_k, expected_k), (d_v, expected_v)):
        np.testing.assert_allclose(got, want[:256].reshape(4, 64, 2, 16).sum(0), rtol=1e-12, atol=1e-12)


def test_through_write_kv_and_the_layers_of_a_scan() -> None:
    """Two layers that write and read one pool, in float32; against the gradients of dense attention in float64."""
    mixed = oracle.make(4, [21], [21], **SMALL | {"num_rows": 1, "num_tokens": 21}, dtype="float32")
    q, pool, *tables = mixed.arguments()
    slots = mixed.block_tables[0, np.arange(21) // 8] * 8 + np.arange(21) % 8
    visible = visible_keys(mixed)
    kv = np.random.default_rng(0).standard_normal((2, 2, 21, 2, 16))

    def paged_loss(x: jax.Array, kv: jax.Array) -> jax.Array:
        def one_layer(carry: tuple, inputs: tuple) -> tuple:
            (x, pages), (layer, (k, v)) = carry, inputs
            pages = write_kv(pages, layer, k, v + x[:, :2], slots)
            return (x + paged_attention(x, pages, *tables, layer=layer, implementation="xla"), pages), None

        (x, _), _ = jax.lax.scan(one_layer, (x, pool), (jnp.arange(2), kv))
        return jnp.sum(x**2)

    def dense_loss(x: jax.Array, kv: jax.Array) -> jax.Array:
        for k, v in kv:
            x = x + dense(x, k, v + x[:, :2], 0.25, None, visible)[0]
        return jnp.sum(x**2)

    expected = jax.jit(jax.grad(dense_loss, (0, 1)))(q.astype(jnp.float64), kv)
    found = jax.jit(jax.grad(paged_loss, (0, 1)))(q, kv.astype(np.float32))
    for got, want in zip(found, expected, strict=True):
        tolerance = TOLERANCE["float32"]
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * float(jnp.abs(want).max()))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_pool_is_a_constant(dtype: str) -> None:
    """The gradient of q is that over the values as they are stored; the pool's own is zero."""
    exact = oracle.make(5, [33, 12], [1, 1], **SMALL | {"num_rows": 2, "num_tokens": 2}, dtype="float32")
    empty = KVPages.zeros(2, 60, 8, 2, 16, dtype)
    q, _, *tables = exact.arguments()
    kv = [gather_kv(exact.kv_pages, 1, table, n) for table, n in zip(exact.block_tables, exact.seq_lens, strict=True)]
    pool = empty
    for (k, v), table in zip(kv, exact.block_tables, strict=True):
        slots = np.where(np.arange(160) < 40, table[np.arange(160) // 8] * 8 + np.arange(160) % 8, -1)
        pool = write_kv(pool, 1, k, v, slots)
    stored = [
        [np.asarray(x, np.float64)[:n] for x in gather_kv(pool, 1, table, n)]
        for table, n in zip(exact.block_tables, exact.seq_lens, strict=True)
    ]
    as_stored = dataclasses.replace(exact, keys=[k for k, _ in stored], values=[v for _, v in stored])
    expected, *_ = dense_gradients(as_stored, None, visible_keys(as_stored))
    d = tuple(jnp.asarray(x, jnp.float32) for x in cotangents(exact))

    def loss(q: jax.Array, pool: KVPages) -> jax.Array:
        out, lse = paged_attention(
            q, pool, *tables, layer=1, scale=SCALE, return_lse=True, max_query_len=1, implementation="xla"
        )
        return jnp.sum(out * d[0]) + jnp.sum(lse * d[1])

    d_q, d_pool = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(q, pool)
    np.testing.assert_allclose(d_q, expected, rtol=3e-5, atol=3e-5)
    assert not np.asarray(d_pool.scales).any()
    assert d_pool.pool.dtype in (jax.dtypes.float0, pool.dtype)


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("reference", "float64", 1e-11), ("xla", "float64", 1e-11), ("cpu", "float32", 3e-5)],
)
def test_a_cascade_is_differentiable(implementation: str, dtype: str, tolerance: float) -> None:
    """Its prefix is one row of all queries: their gradients meet in the shared blocks."""
    problem = oracle.make(6, [12, 9, 16, 0], [0, 1, 1, 1], **SMALL | {"num_rows": 4, "num_tokens": 3}, dtype=dtype)
    q, pool, tables, seq_lens, query_start_loc = problem.arguments()
    d_out, d_lse = cotangents(problem)

    def loss(q: jax.Array, pool: KVPages, sinks: jax.Array) -> jax.Array:
        own = (tables[1:], seq_lens[1:], query_start_loc[1:])
        options = {"layer": 1, "scale": SCALE, "sinks": sinks, "return_lse": True, "implementation": implementation}
        out, lse = cascade_attention(q, pool, *own, tables[0], 12, **options)
        return jnp.sum(out * d_out) + jnp.sum(lse * d_lse)

    d_q, d_pool, d_sinks = jax.jit(jax.grad(loss, (0, 1, 2)))(q, pool, SINKS.astype(dtype))
    visible = visible_keys(problem)
    visible[:, :12] = True
    expected_q, expected_k, expected_v, _, expected_sinks = dense_gradients(problem, SINKS, visible)
    found = (d_q, *rows_of_the_pool(problem, d_pool), d_sinks)
    for got, want in zip(found, (expected_q, expected_k, expected_v, expected_sinks), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def test_what_can_not_be_differentiated_says_so(mixed: oracle.Problem) -> None:
    q, *rest = mixed.arguments()
    attend = functools.partial(paged_attention, implementation="xla", layer=1, max_query_len=1)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attend(q, *rest), (q,), (q,))
    with pytest.raises(ValueError, match="soft_cap is an array"):
        jax.grad(lambda cap: attend(q, *rest, soft_cap=cap).sum())(2.0)
    with pytest.raises(ValueError, match="everse-mode"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(lambda q: attend(q, *rest).sum())(q).sum()), q)
