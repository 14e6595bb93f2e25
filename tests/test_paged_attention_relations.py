"""What must not matter, bit for bit or nearly: block ids, stale slots, batch mates, chunking, how the keys are split.

And what must: each wrong input a kernel could produce by mistake has to show up against the oracle. The kernels are
interpreted; what needs another program of them than the shared one, or is in their own tests as well, is slow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages, copy_blocks, merge_attention_states, paged_attention

Result = tuple[np.ndarray, np.ndarray]  # out and LSE


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation and a batch that shows its ways: decode, empty, whole and chunked prefill."""

    name: str
    seq_lens: list[int]
    query_lens: list[int]
    chunk: int  # the row of a long chunk of prefill
    whole: int  # the row of a whole prefill
    fills: list[tuple[float, int | None]]  # what stale slots hold, and table padding
    tolerance: float  # between outs that need not have the same bits

    @property
    def is_kernel(self) -> bool:
        return self.name in interpreted.KERNELS

    def make(self, seed: int, seq_lens: list[int], query_lens: list[int], **changes: Any) -> oracle.Problem:
        sizes = interpreted.SIZES[self.name] if self.is_kernel else {}
        return oracle.make(seed, seq_lens, query_lens, **sizes | changes)

    def mixed(self, seed: int, **changes: Any) -> oracle.Problem:
        return self.make(seed, self.seq_lens, self.query_lens, **changes)

    def attend(self, arguments: tuple, **options: Any) -> Result:
        if self.is_kernel:
            return interpreted.attend(arguments, self.name, **{"layer": 1} | options)
        return paged_attention(*arguments, **{"layer": 1} | options, return_lse=True, implementation=self.name)

    def run(self, problem: oracle.Problem, **options: Any) -> Result:
        out, lse = self.attend(problem.arguments(), layer=problem.layer, **options)
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def assert_close(self, got: Result, want: Result) -> None:
        """Where the order of summation may differ."""
        np.testing.assert_allclose(got[0], want[0], rtol=self.tolerance, atol=self.tolerance)
        np.testing.assert_allclose(got[1], want[1], rtol=2e-6, atol=2e-6)


def assert_same(got: Result, want: Result) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


FILLS = [(np.nan, None), (np.inf, -1), (-np.inf, 2**31 - 1)]
LARGE: dict[str, Any] = {"seq_lens": [33, 0, 20, 7, 1, 150, 64], "query_lens": [1, 0, 20, 0, 1, 70, 2]}
SMALL: dict[str, Any] = {"seq_lens": [33, 0, 9, 70], "query_lens": [1, 0, 9, 5]}
BACKENDS = {
    "reference": Backend("reference", **LARGE, chunk=5, whole=2, fills=FILLS, tolerance=2e-6),
    "xla": Backend("xla", **LARGE, chunk=5, whole=2, fills=FILLS, tolerance=2e-6),
    "cpu": Backend("cpu", **LARGE, chunk=5, whole=2, fills=FILLS, tolerance=2e-6),
    "tpu": Backend("tpu", **SMALL, chunk=3, whole=2, fills=FILLS, tolerance=2e-6),
    "gpu": Backend("gpu", **SMALL, chunk=3, whole=2, fills=FILLS[:1], tolerance=1e-2),
}
PLAIN = ("reference", "xla", "cpu")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


slow_for_kernels = pytest.mark.parametrize(
    "backend", [*PLAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in interpreted.KERNELS)], indirect=True
)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[oracle.Problem, Result]]:
    return {}


@pytest.fixture
def mixed(backend: Backend, results: dict[str, tuple[oracle.Problem, Result]]) -> tuple[oracle.Problem, Result]:
    """The backend's batch and its result, computed once."""
    if backend.name not in results:
        problem = backend.mixed(0)
        results[backend.name] = problem, backend.run(problem)
    return results[backend.name]


@slow_for_kernels
@pytest.mark.parametrize("window", [None, 40])
def test_stale_slots_and_table_padding_do_not_matter(backend: Backend, window: int | None) -> None:
    clean = backend.run(backend.mixed(1, fill=0.0, padding=0), sliding_window=window)
    for fill, padding in backend.fills:
        assert_same(backend.run(backend.mixed(1, fill=fill, padding=padding), sliding_window=window), clean)


def test_nan_right_after_the_last_token(backend: Backend) -> None:
    """Lengths around the end of a block, all decode: slots past the length NaN against zero."""
    lengths = [15, 16, 17, 1, 31, 32, 33][: len(backend.seq_lens)]
    ones = [1] * len(lengths)
    clean = backend.run(backend.make(2, lengths, ones, fill=0.0, padding=0))
    for fill in dict.fromkeys(abs(fill) for fill, _ in backend.fills):
        assert_same(backend.run(backend.make(2, lengths, ones, fill=fill, padding=0)), clean)


def test_blocks_before_the_window_may_be_gone(backend: Backend, mixed: tuple[oracle.Problem, Result]) -> None:
    """What a row with window 20 no longer sees may have been given back, and belong to someone else."""
    problem, _ = mixed
    before = backend.run(problem, sliding_window=20)
    tables = problem.block_tables.copy()
    # The null block, NaN here, for every other row.
    for row, (seq_len, count) in enumerate(zip(problem.seq_lens, problem.query_lens, strict=True)):
        tables[row, : max(0, seq_len - count - 20 + 1) // 16] = 0 if row % 2 else -7
    assert (tables != problem.block_tables).any()
    assert_same(backend.run(dataclasses.replace(problem, block_tables=tables), sliding_window=20), before)


@slow_for_kernels
def test_the_order_of_blocks_in_the_pool_does_not_matter(
    backend: Backend, mixed: tuple[oracle.Problem, Result]
) -> None:
    problem, result = mixed
    num_blocks = problem.kv_pages.num_blocks
    moved_to = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(num_blocks - 1)]).astype(np.int32)
    both_pools = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x), x], axis=1), problem.kv_pages)
    moved: KVPages = copy_blocks(both_pools, jnp.arange(num_blocks) + num_blocks, jnp.asarray(moved_to))
    moved = jax.tree.map(lambda x: x[:, :num_blocks], moved)
    tables = moved_to[np.clip(problem.block_tables, 0, num_blocks - 1)]
    assert_same(backend.run(dataclasses.replace(problem, kv_pages=moved, block_tables=tables)), result)


@slow_for_kernels
def test_a_row_does_not_depend_on_its_batch_mates(backend: Backend, mixed: tuple[oracle.Problem, Result]) -> None:
    """Same shapes, other mates: the row's bits are the same, wherever in the batch it stands."""
    problem, (out, lse) = mixed
    starts = problem.query_start_loc
    orders = [[3, 0, 2, 1], [0, 3, 3, 1]] if backend.is_kernel else [[5, 2, 6, 4, 0, 3, 1], [6, 5, 4, 4, 0, 0, 6]]
    for rows in orders:
        query_lens = [problem.query_lens[r] for r in rows]
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])
        q = np.zeros(problem.q.shape)
        q[: len(tokens)] = problem.q[tokens]
        keys, values = ([x[r] for r in rows] for x in (problem.keys, problem.values))
        tables = problem.block_tables[rows]
        shuffled = oracle.Problem(q, keys, values, query_lens, problem.kv_pages, tables, 1)
        got_out, got_lse = backend.run(shuffled)
        got, want = (got_out[: len(tokens)], got_lse[: len(tokens)]), (out[tokens], lse[tokens])
        if backend.name == "gpu":
            # Its interpreter's matrix product depends on where in a tile a query of prefill lies.
            backend.assert_close(got, want)
            decode = [sum(query_lens[:i]) for i, count in enumerate(query_lens) if count == 1]
            got, want = ((out[decode], lse[decode]) for out, lse in (got, want))
        assert_same(got, want)


@slow_for_kernels
@pytest.mark.parametrize("width", [1, 3])
def test_a_decode_row_does_not_depend_on_the_number_of_rows(backend: Backend, width: int) -> None:
    """Batches of other sizes are other programs, and still give the row the same bits."""
    rows = backend.make(2, [150] + [40] * 6, [1] * 7, num_rows=7, num_tokens=7, max_blocks=12, num_blocks=40)
    batched = backend.run(rows, max_query_len=1)[0][0]
    some = oracle.Problem(
        rows.q[:width], rows.keys[:width], rows.values[:width], [1] * width, rows.kv_pages, rows.block_tables[:width], 1
    )
    np.testing.assert_array_equal(backend.run(some, max_query_len=1)[0][0], batched)


@pytest.mark.parametrize(
    ("backend", "chunks"),
    [
        pytest.param(name, chunks, marks=pytest.mark.slow if name not in PLAIN and len(chunks) > 2 else ())
        for name in BACKENDS
        for chunks in ([4, 6], [3, 4, 3], [1] * 10)
    ],
    ids=str,
    indirect=["backend"],
)
def test_chunks_equal_one_prefill(backend: Backend, chunks: list[int]) -> None:
    whole = backend.make(3, [10], [10])
    expected, expected_lse = backend.run(whole)
    end = 0
    for chunk in chunks:
        start, end = end, end + chunk
        arguments = whole.arguments(
            q=jnp.asarray(np.roll(whole.q, -start, axis=0), whole.kv_pages.dtype),
            seq_lens=jnp.asarray([end] + [0] * (len(backend.seq_lens) - 1)),
            query_start_loc=jnp.asarray([0] + [chunk] * len(backend.seq_lens)),
        )
        out, lse = backend.attend(arguments)
        backend.assert_close((out[:chunk], lse[:chunk]), (expected[start:end], expected_lse[start:end]))


def test_decode_equals_the_last_query_of_a_prefill(backend: Backend, mixed: tuple[oracle.Problem, Result]) -> None:
    problem, (out, lse) = mixed
    rows = [backend.whole, backend.chunk]
    last = problem.query_start_loc[[row + 1 for row in rows]] - 1
    # Two rows, and the others without a token: a kernel's shapes are those of its program.
    others = [row for row in range(len(problem.seq_lens)) if row not in rows]
    q = np.concatenate([problem.q[last], problem.q[2:]])
    arguments = problem.arguments(
        q=jnp.asarray(q, problem.kv_pages.dtype),
        block_tables=jnp.asarray(problem.block_tables[rows + others]),
        seq_lens=jnp.asarray(problem.seq_lens[rows + others]),
        query_start_loc=jnp.asarray([0, 1] + [2] * (len(others) + 1)),
    )
    decode, decode_lse = backend.attend(arguments)
    backend.assert_close((decode[:2], decode_lse[:2]), (out[last], lse[last]))


@slow_for_kernels
def test_a_cascade_over_a_shared_prefix_equals_flat_attention(backend: Backend) -> None:
    """Two rows share 32 tokens: prefix for both queries at once, suffixes apart, sinks in exactly one part."""
    flat = backend.make(4, [40, 50], [3, 1], num_rows=2, num_tokens=4)
    shared = flat.block_tables.copy()
    shared[1, :2] = shared[0, :2]
    flat = dataclasses.replace(flat, block_tables=shared)
    sinks = jnp.asarray([0.5, 1.0, -1.0, 2.0])
    expected = backend.attend(flat.arguments(), sinks=sinks)
    prefix = flat.arguments(
        block_tables=jnp.asarray(shared[:1]), seq_lens=jnp.asarray([32]), query_start_loc=jnp.asarray([0, 4])
    )
    suffix = flat.arguments(block_tables=jnp.asarray(shared[:, 2:]), seq_lens=jnp.asarray([8, 18]))
    parts = (*backend.attend(prefix, causal=False, sinks=sinks), *backend.attend(suffix))
    merged = merge_attention_states(*(jnp.asarray(x, jnp.float32) for x in parts))
    for got, want, tolerance in zip(merged, expected, (max(3e-6, backend.tolerance), 3e-6), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@slow_for_kernels
def test_jit_equals_eager(backend: Backend, mixed: tuple[oracle.Problem, Result]) -> None:
    options: dict[str, Any] = {"return_lse": True, "implementation": backend.name}
    if backend.is_kernel:
        options["interpret"] = interpreted.PARAMS[backend.name]

    def attend(arguments: tuple, layer: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return paged_attention(*arguments, layer=layer, scale=scale, **options)

    arguments = mixed[0].arguments()
    eager = attend(arguments, jnp.int32(1), jnp.float32(0.125))
    jitted = jax.jit(attend)(arguments, jnp.int32(1), jnp.float32(0.125))
    assert_same(jitted, eager)


@pytest.mark.parametrize(
    "name", ["xla", "cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in interpreted.KERNELS)]
)
def test_positions_past_32768(name: str) -> None:
    """A tiny head and a long context: no position, slot or tile index is 16 bits wide anywhere."""
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "block_size": 64, "max_blocks": 626, "num_blocks": 630}
    sizes |= {"num_rows": 1, "num_tokens": 2, "num_layers": 1, "layer": 0}
    backend = BACKENDS[name]
    problem = backend.make(5, [40_000], [2], **sizes, head_dim=4 if name == "xla" else 32)
    options: dict[str, Any] = {"sliding_window": 33_000}
    expected, expected_lse = problem.expected(**options)
    out, lse = backend.run(problem, **options, max_query_len=2)
    tolerance = oracle.TOLERANCE[problem.kv_pages.dtype.name]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def wrong_inputs(problem: oracle.Problem, chunk: int, window: int) -> dict[str, tuple[tuple, dict]]:
    """One kernel mistake each, made in the inputs."""
    q, tables = jnp.asarray(problem.q, problem.kv_pages.dtype), problem.block_tables
    swapped_blocks = tables.copy()
    swapped_blocks[chunk, [2, 4]] = tables[chunk, [4, 2]]
    same_block = tables.copy()
    same_block[chunk, 3] = tables[chunk, 4]
    starts = problem.query_start_loc
    return {
        "mask one too far": (problem.arguments(seq_lens=jnp.asarray(np.maximum(problem.seq_lens - 1, 0))), {}),
        "window one wider": (problem.arguments(), {"sliding_window": window + 1}),
        "window one narrower": (problem.arguments(), {"sliding_window": window - 1}),
        "two blocks swapped": (problem.arguments(block_tables=jnp.asarray(swapped_blocks)), {}),
        "a block read twice": (problem.arguments(block_tables=jnp.asarray(same_block)), {}),
        "two heads swapped": (problem.arguments(q=q[:, jnp.asarray([0, 2, 1, 3])]), {}),
        "heads of a group interleaved": (
            problem.arguments(q=q.reshape(-1, 2, 2, 64).swapaxes(1, 2).reshape(q.shape)),
            {},
        ),
        "no scale": (problem.arguments(), {"scale": 1.0}),
        "scale of a padded head": (problem.arguments(), {"scale": 128**-0.5}),
        "rows one token later": (
            problem.arguments(query_start_loc=jnp.asarray(np.where(starts > 0, starts + 1, 0))),
            {},
        ),
        "no sinks": (problem.arguments(), {"sinks": jnp.full(4, -1e30)}),
        "sinks of other heads": (problem.arguments(), {"sinks": jnp.asarray([1.0, 0.5, -1.0, 2.0])}),
        "another layer": (problem.arguments(), {"layer": 0}),
    }


@slow_for_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # a NaN, in the GPU's interpreter
def test_every_wrong_input_shows(backend: Backend, mixed: tuple[oracle.Problem, Result]) -> None:
    problem, _ = mixed
    right = {"sliding_window": 40, "soft_cap": 3.0, "sinks": jnp.asarray([0.5, 1.0, -1.0, 2.0])}
    expected, expected_lse = problem.expected(**right)
    out, lse = backend.run(problem, **right)
    tolerance = oracle.TOLERANCE[problem.kv_pages.dtype.name]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    for name, (arguments, options) in wrong_inputs(problem, backend.chunk, 40).items():
        wrong, _ = backend.attend(arguments, **right | options)
        # A hundred times float32's tolerance: a mistake must not hide near it. NaN counts as seen.
        assert not np.abs(np.asarray(wrong, np.float64) - expected).max() < max(2e-3, 2 * tolerance), name
