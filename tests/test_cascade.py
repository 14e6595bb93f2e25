"""A cascade over a shared prefix equals attention over whole sequences: by the oracle, and by the flat call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import paged_attention
from pallas_kernels._cascade import cascade_attention

BLOCK_SIZE = 8
SINKS = np.array([0.5, -30.0, 4.0, 1.0], np.float32)
# Decode, an empty row, a chunk, a whole own part, a row that has the prefix only, one without queries.
OWN_LENS = [13, 0, 20, 7, 0, 9]
QUERY_LENS = [1, 0, 5, 7, 1, 0]
NUM_TOKENS = 16  # two past the last row

each = pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
fast = pytest.mark.parametrize("implementation", ["xla", "cpu"])


@dataclasses.dataclass(frozen=True)
class Cascade:
    """A problem whose row 0 is the prefix, and what the rows after it are as whole sequences."""

    paged: oracle.Problem
    shared_len: int
    own_lens: list[int]
    query_lens: list[int]

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    def arguments(self, **changes: Any) -> tuple:
        fields = {
            "q": jnp.asarray(self.paged.q, self.paged.kv_pages.dtype),
            "kv_pages": self.paged.kv_pages,
            "block_tables": jnp.asarray(self.paged.block_tables[1:]),
            "seq_lens": jnp.asarray(self.own_lens, jnp.int32),
            "query_start_loc": jnp.asarray(self.query_start_loc),
            "shared_block_ids": jnp.asarray(self.paged.block_tables[0]),
            "shared_len": jnp.int32(self.shared_len),
        }
        return tuple((fields | changes).values())

    def run(self, implementation: str | None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        out, lse = attend(self.arguments(), implementation=implementation, **options)
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        dtype = self.paged.kv_pages.dtype
        q, *kv = [
            np.asarray(jnp.asarray(x, dtype), np.float64) for x in (self.paged.q, *self.paged.keys, *self.paged.values)
        ]
        rows = len(self.paged.keys)
        keys, values = ([np.concatenate([x[0], own]) for own in x[1:]] for x in (kv[:rows], kv[rows:]))
        return oracle.attend(q, keys, values, self.query_lens, **options)

    def flat(self, **options: Any) -> tuple[jax.Array, jax.Array]:
        """One call over joined tables; whole blocks only."""
        shared = self.shared_len // BLOCK_SIZE
        assert shared * BLOCK_SIZE == self.shared_len
        tables = np.concatenate(
            [np.tile(self.paged.block_tables[:1, :shared], (len(self.own_lens), 1)), self.paged.block_tables[1:]], 1
        )
        return paged_attention(
            *self.arguments()[:2],
            jnp.asarray(tables),
            jnp.asarray(self.own_lens) + self.shared_len,
            self.query_start_loc,
            layer=1,
            return_lse=True,
            **options,
        )


@functools.partial(jax.jit, static_argnames=("implementation", "soft_cap", "causal", "max_query_len"))
def attend(arguments: tuple, **options: Any) -> Any:
    return cascade_attention(*arguments, layer=1, return_lse=True, **options)


def make(
    seed: int, shared_len: int, own_lens: list[int] = OWN_LENS, query_lens: list[int] = QUERY_LENS, **options: Any
) -> Cascade:
    options = {"block_size": BLOCK_SIZE, "num_tokens": NUM_TOKENS, "max_blocks": 6} | options
    paged = oracle.make(
        seed, [shared_len, *own_lens], [0, *query_lens], num_rows=1 + len(own_lens), num_blocks=40, **options
    )
    return Cascade(paged, shared_len, own_lens, query_lens)


def check(problem: Cascade, implementation: str | None, **options: Any) -> None:
    tolerance = oracle.TOLERANCE[problem.paged.kv_pages.dtype.name]
    expected_out, expected_lse = problem.expected(**{k: v for k, v in options.items() if k != "max_query_len"})
    if options.get("sliding_window") is not None:
        options["sliding_window"] = jnp.int32(options["sliding_window"])
    out, lse = problem.run(implementation, **options)
    np.testing.assert_allclose(out, expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


# One program of each implementation serves most tests.
OPTIONS = {"sinks": SINKS, "soft_cap": 2.0, "scale": 0.4}


@each
@pytest.mark.parametrize("shared_len", [0, 1, 8, 21, 40, 48])
def test_equals_attention_over_whole_sequences(implementation: str, shared_len: int) -> None:
    check(make(shared_len, shared_len), implementation, **OPTIONS)


@pytest.mark.parametrize("shared_len", [0, 21])
def test_every_key_without_options(shared_len: int) -> None:
    problem = make(1, shared_len)
    check(problem, "reference")
    check(problem, "reference", causal=False)


@each
@pytest.mark.parametrize("shared_len", [0, 24])
def test_windows_that_end_in_the_prefix_before_it_and_nowhere(implementation: str, shared_len: int) -> None:
    problem = make(2, shared_len)
    for window in (1, 5, 7, 8, 15, 31, 32, 43, 44, 2**31 - 1):
        check(problem, implementation, sliding_window=window, sinks=SINKS)


@fast
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))])
def test_random_problems(implementation: str, seed: int) -> None:
    """Other lengths, queries, prefixes and windows in one program."""
    rng = np.random.default_rng(seed)
    own_lens = rng.integers(0, 34, 6)
    query_lens = np.where(rng.random(6) < 0.3, 0, np.minimum(rng.integers(1, 4, 6), own_lens + 1))
    problem = make(seed, int(rng.integers(0, 6)) * BLOCK_SIZE, own_lens.tolist(), query_lens.tolist())
    check(problem, implementation, sliding_window=int(rng.integers(1, 60)), sinks=SINKS)


@fast
def test_bfloat16_and_decode_alone(implementation: str) -> None:
    check(make(3, 21, [13, 5, 30], [1, 1, 1], num_tokens=3, dtype="bfloat16"), implementation, max_query_len=1)


def test_float64() -> None:
    with jax.enable_x64(True):
        check(make(3, 21, dtype="float64"), "reference")
        check(make(3, 21, dtype="float64"), None)
        with pytest.raises(NotImplementedError, match="float64"):
            make(3, 21, dtype="float64").run("cpu")


@fast
def test_equals_the_flat_call(implementation: str) -> None:
    problem = make(4, 24)
    options = OPTIONS | {"implementation": implementation}
    for got, want in zip(attend(problem.arguments(), **options), problem.flat(**options), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6)


@fast
def test_a_row_does_not_depend_on_what_its_mates_hold(implementation: str) -> None:
    """NaN in the other rows' queries and keys, and bit by bit the same result in this one."""
    problem = make(5, 24)
    out, lse = problem.run(implementation, **OPTIONS)
    mine = slice(1, 6)  # row 2's queries
    q = np.full_like(problem.paged.q, np.nan)
    q[mine] = problem.paged.q[mine]
    tables = problem.paged.block_tables[1:].copy()
    tables[[0, 1, 3, 4, 5]] = 0  # the null block, full of NaN
    wrong_mates = problem.arguments(q=jnp.asarray(q, jnp.float32), block_tables=jnp.asarray(tables))
    got_out, got_lse = attend(wrong_mates, implementation=implementation, **OPTIONS)
    np.testing.assert_array_equal(got_out[mine], out[mine])
    np.testing.assert_array_equal(got_lse[mine], lse[mine])


def test_every_wrong_input_shows() -> None:
    problem = make(7, 21)
    expected, _ = problem.expected(**OPTIONS)
    tables, shared = problem.paged.block_tables[1:], problem.paged.block_tables[0]
    swapped = {"shared_block_ids": jnp.asarray(shared[[2, 1, 0, 3, 4, 5]])}
    wrong = {
        "prefix one shorter": problem.arguments(shared_len=jnp.int32(20)),
        "no prefix": problem.arguments(shared_len=jnp.int32(0)),
        "the partial block first": problem.arguments(**swapped),
        "own tables of other rows": problem.arguments(block_tables=jnp.asarray(tables[[2, 1, 0, 3, 4, 5]])),
        "own parts one shorter": problem.arguments(seq_lens=jnp.maximum(jnp.asarray(OWN_LENS) - 1, 0)),
    }
    for name, arguments in wrong.items():
        out, _ = attend(arguments, implementation="xla", **OPTIONS)
        assert not np.abs(out - expected)[:14].max() < 2e-3, name
    out, _ = attend(problem.arguments(), implementation="xla", **OPTIONS | {"sinks": SINKS + 1})
    assert not np.abs(out - expected).max() < 2e-3


@fast
def test_a_query_before_the_prefixs_last_token_is_nan(implementation: str) -> None:
    """The prefix is read without a mask: such a query would see keys after its own position."""
    problem = make(8, 24)
    seq_lens = jnp.asarray([13, 0, 2, 7, 0, 9], jnp.int32)  # row 2 has five queries
    out, lse = attend(problem.arguments(seq_lens=seq_lens), implementation=implementation, **OPTIONS)
    before = np.isin(np.arange(NUM_TOKENS), [1, 2])
    np.testing.assert_array_equal(np.isnan(out).all((1, 2)), before)
    np.testing.assert_array_equal(np.isnan(lse).all(1), before)
    assert np.isfinite(np.asarray(out)[~before]).all()


def test_what_is_refused() -> None:
    problem = make(9, 21)
    _, _, *rest = problem.arguments()

    def call(shared_block_ids: Any = rest[3], shared_len: Any = 21, **options: Any) -> None:
        arguments = problem.arguments(shared_block_ids=shared_block_ids, shared_len=shared_len)
        jax.eval_shape(lambda: cascade_attention(*arguments, layer=1, implementation="xla", **options))

    call()
    for options, message in (
        ({"shared_block_ids": jnp.zeros((0,), jnp.int32)}, "at least one block"),
        ({"shared_block_ids": jnp.zeros((1, 3), jnp.int32)}, "a vector"),
        ({"shared_block_ids": jnp.zeros(3)}, "int32"),
        ({"shared_len": 49}, "0 to 48"),
        ({"shared_len": -1}, "0 to 48"),
        ({"shared_len": 2.0}, "one integer"),
        ({"shared_len": np.array([1])}, "one integer"),
        ({"sliding_window": 9}, "whole blocks"),
        ({"sliding_window": 0, "shared_len": 16}, "sliding_window is 0"),
        ({"sliding_window": 9, "shared_len": 16, "causal": False}, "causal=False"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**options)


@fast
def test_a_window_over_part_of_a_block_is_nan_where_the_length_is_traced(implementation: str) -> None:
    problem = make(2, 21)
    options = {"sinks": SINKS, "implementation": implementation}
    out, lse = attend(problem.arguments(), sliding_window=jnp.int32(9), **options)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
    out, _ = attend(problem.arguments(), sliding_window=jnp.int32(99), **options)
    np.testing.assert_allclose(out, problem.expected(sinks=SINKS)[0], rtol=2e-5, atol=2e-5)
