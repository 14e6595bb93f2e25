"""pagedjax.sampler: draws against a float64 NumPy oracle that sorts, distributions, and what must not change a draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import numpy_sampler
import pytest

from pagedjax import sampler
from pagedjax.row_sampling import RowSampling, row_values
from pagedjax.sampler import sample
from pagedjax.sampling_params import SamplingParams

S, V, M = 16, 8400, 20  # sample rows; vocabulary, no multiple of a tile; history length
WIDTH = 8500  # of the logits: columns from V on are padding
GREEDY = SamplingParams(temperature=0.0)
SAMPLE = jax.jit(sample, static_argnames="num_vocab_tokens")


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample row of a test."""

    logits: np.ndarray  # f32[V]
    params: SamplingParams = GREEDY
    seed: int = 0
    sample_index: int = 0
    prompt: Sequence[int] = (1, 2)
    output: Sequence[int] = ()
    stop_ids: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def _stack(rows: Sequence[Row]) -> RowSampling:
    lines = [row_values(r.params, seed=r.seed, sample_index=r.sample_index, stop_ids=r.stop_ids) for r in rows]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *lines)


def _draw(rows: Sequence[Row], dtype: jnp.dtype = jnp.float32) -> list[int]:
    """The drawn ids; the batch is filled up to S with greedy rows of NaN, padding columns and old history with junk."""
    full = [*rows, *[Row(np.full(V, np.nan, np.float32))] * (S - len(rows))]
    logits = np.full((S, WIDTH), np.nan, np.float32)
    logits[:, V + 3] = np.inf
    tokens = np.random.default_rng(0).integers(0, V, (S, M)).astype(np.int32)
    for line, row in enumerate(full):
        logits[line, :V] = row.logits
        tokens[line, : row.position] = [*row.prompt, *row.output]
    return SAMPLE(
        jnp.asarray(logits, dtype),
        _stack(full),
        np.array([row.position for row in full], np.int32),
        tokens,
        np.array([len(row.prompt) for row in full], np.int32),
        num_vocab_tokens=V,
        token_rows=np.arange(S, dtype=np.int32),
    ).tolist()[: len(rows)]


def _draws(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """`count` draws of one request: S seeds, successive positions (the history is not read)."""
    rows = _stack([Row(logits, params, seed=seed) for seed in range(S)])
    batch = np.full((S, WIDTH), np.nan, np.float32)
    batch[:, :V] = logits
    tokens, prompt_lens, lines = np.zeros((S, M), np.int32), np.zeros(S, np.int32), np.arange(S, dtype=np.int32)
    return np.concatenate(
        [
            SAMPLE(batch, rows, np.full(S, i, np.int32), tokens, prompt_lens, num_vocab_tokens=V, token_rows=lines)
            for i in range(count // S)
        ]
    )


def _logits_of(probs: Sequence[float]) -> np.ndarray:
    logits = np.full(V, -np.inf, np.float32)
    logits[: len(probs)] = np.log(probs)
    return logits


def _random_logits(rng: np.random.Generator) -> np.ndarray:
    """Peaked, flat, tied: cuts fall inside, at and beyond the narrow path's candidates."""
    logits = rng.normal(size=V) * rng.choice([0.3, 1.0, 3.0]) + (rng.random(V) < 0.01) * rng.choice([0.0, 6.0])
    return (np.round(logits * 2) / 2 if rng.random() < 0.3 else logits).astype(np.float32)


def _random_params(rng: np.random.Generator) -> SamplingParams:
    on = rng.random(8) < [0.1, 0.5, 0.5, 0.3, 0.2, 0.2, 0.2, 0.2]
    return SamplingParams(
        temperature=0.0 if on[0] else float(rng.choice([0.4, 0.8, 1.0, 1.5])),
        top_p=float(rng.choice([0.0, 1e-3, 0.1, 0.5, 0.9, 0.99])) if on[1] else 1.0,
        top_k=int(rng.choice([1, 2, 40, 63, 64, 65, 200, V - 1, V, V + 60])) if on[2] else 0,
        min_p=float(rng.choice([1e-4, 0.01, 0.1, 1.0])) if on[3] else 0.0,
        repetition_penalty=1.3 if on[4] else 1.0,
        frequency_penalty=0.7 if on[5] else 0.0,
        logit_bias={int(i): float(rng.normal() * 4) for i in rng.integers(0, V, 4)} if on[6] else None,
        min_tokens=6 if on[7] else 0,
    )


def _random_rows(rng: np.random.Generator) -> list[Row]:
    rows = []
    for _ in range(S):
        logits = _random_logits(rng)
        likely = np.argsort(-logits)[:30]
        prompt, output = (rng.choice(likely, n).tolist() for n in rng.integers(1, 10, 2))
        rows.append(
            Row(
                logits,
                _random_params(rng),
                seed=int(rng.integers(0, 2**63)),
                sample_index=int(rng.integers(0, 4)),
                prompt=prompt,
                output=output,
                stop_ids=likely[:3].tolist(),
            )
        )
    return rows


def _check_against_the_oracle(num_batches: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clear = 0
    for _ in range(num_batches):
        rows = _random_rows(rng)
        gumbel = numpy_sampler.noise(
            [row.seed for row in rows], [row.sample_index for row in rows], [row.position for row in rows], V
        )
        for row, noise, found in zip(rows, gumbel, _draw(rows), strict=True):
            x = numpy_sampler.processed_logits(
                row.logits, row.params, list(row.prompt), list(row.output), list(row.stop_ids)
            )
            expected, is_clear = numpy_sampler.draw(x, row.params, noise)
            clear += is_clear
            assert not is_clear or found == expected, row
    assert clear > 0.95 * num_batches * S


def test_every_draw_equals_the_oracle() -> None:
    _check_against_the_oracle(20, seed=0)


@pytest.mark.slow
def test_every_draw_equals_the_oracle_long() -> None:
    _check_against_the_oracle(1000, seed=1)


@pytest.mark.parametrize(
    ("params", "critical"),  # of chi-square at 1e-4, as many degrees of freedom as tokens kept, less one
    [
        (SamplingParams(temperature=0.8), 25.74),
        (SamplingParams(top_k=4), 21.11),
        (SamplingParams(temperature=1.5, top_p=0.9), 23.51),
        (SamplingParams(min_p=0.2), 18.42),
    ],
)
def test_distribution(params: SamplingParams, critical: float) -> None:
    logits = _logits_of([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    expected = numpy_sampler.distribution(logits.astype(np.float64), params)
    counts = np.bincount(_draws(logits, params, 3200), minlength=V)
    assert not counts[expected == 0].any()
    expected = 3200 * expected[expected > 0]
    chi_square = ((counts[: len(expected)] - expected) ** 2 / expected).sum()
    assert chi_square < critical, counts[:6]


def test_distribution_over_the_whole_vocabulary() -> None:
    # A cut beyond the narrow path: 60 groups of 140 tokens, of which the cut keeps a part of the last kept one.
    probs = np.repeat(0.95 ** np.arange(60), 140)
    params = SamplingParams(top_p=0.7)
    logits = np.log(probs).astype(np.float32)
    expected = numpy_sampler.distribution(logits.astype(np.float64), params).reshape(60, 140).sum(-1)
    counts = np.bincount(_draws(logits, params, 3200), minlength=V).reshape(60, 140).sum(-1)
    some = expected > 0
    assert not counts[~some].any()
    expected = 3200 * expected[some]
    assert ((counts[some] - expected) ** 2 / expected).sum() < 55.0  # 23 degrees of freedom at 2e-4


def test_greedy_and_random_in_one_batch() -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[:3] = [1, 1, 0]
    requests = [GREEDY, SamplingParams(top_k=0), SamplingParams(top_k=1), SamplingParams(temperature=0.0, top_p=0.9)]
    ids = np.array([_draw([Row(logits, p, output=(0,) * n) for p in requests]) for n in range(16)])
    assert not ids[:, [0, 2, 3]].any()  # ties go to the lowest id
    assert set(ids[:, 1]) >= {0, 1}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tiny_top_p(dtype: jnp.dtype) -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[:4096] = np.random.default_rng(0).normal(size=4096) * 0.5
    logits[3801] = 3.0
    rows = [Row(logits, SamplingParams(top_p=p), seed=seed) for p in (0.0, 1e-8, 1e-3) for seed in range(5)]
    assert set(_draw(rows, dtype)) == {3801}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_p=0.6), {0, 1}),
        (SamplingParams(top_p=0.45), {0}),
        (SamplingParams(top_p=0.85), {0, 1, 2}),
        (SamplingParams(top_k=2, top_p=0.62), {0}),  # of the two that top-k leaves, the first has 0.625
        (SamplingParams(top_k=2, top_p=0.63), {0, 1}),
        (SamplingParams(min_p=0.25), {0, 1, 2}),
        (SamplingParams(min_p=0.35), {0, 1}),
        (SamplingParams(min_p=1.0), {0}),
    ],
)
def test_what_a_cut_keeps(params: SamplingParams, kept: set[int]) -> None:
    assert set(_draws(_logits_of([0.5, 0.3, 0.15, 0.05]), params, 96).tolist()) == kept


def test_ties_at_the_cut_go_to_the_lowest_ids() -> None:
    flat = np.zeros(V, np.float32)
    for params, kept in [
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=10.5 / V), 11),
        (SamplingParams(top_k=100), 100),
        (SamplingParams(top_p=99.5 / V), 100),
        (SamplingParams(top_k=200, top_p=0.4975), 100),
    ]:
        ids = _draws(flat, params, 480)
        assert ids.max() < kept
        assert len(np.unique(ids)) > 0.9 * min(kept, 100)


def test_a_draw_is_the_rows_own() -> None:
    rng = np.random.default_rng(3)
    rows = _random_rows(rng)
    together = _draw(rows)
    assert _draw(rows[::-1]) == together[::-1]
    assert [_draw([row])[0] for row in rows[:6]] == together[:6]
    # Mates that send the batch through the other paths.
    flat = Row(np.zeros(V, np.float32), SamplingParams(top_p=0.9, repetition_penalty=1.2), seed=9)
    assert _draw([flat, *rows[:8], flat])[1:9] == together[:8]
    # Another number of rows, no padding, another line of the history, eager.
    row = rows[4]
    tokens = np.zeros((3, M), np.int32)
    tokens[2, : row.position] = [*row.prompt, *row.output]
    ids = sample(
        jnp.asarray(row.logits[None]),
        _stack([row]),
        jnp.array([row.position], jnp.int32),
        jnp.asarray(tokens),
        jnp.array([len(row.prompt)], jnp.int32),
        num_vocab_tokens=V,
        token_rows=jnp.array([2], jnp.int32),
    )
    assert ids.tolist() == together[4:5]


def test_seeds_and_samples_are_streams() -> None:
    logits = np.random.default_rng(1).normal(size=V).astype(np.float32)

    def stream(seed: int, sample_index: int, mates: Sequence[Row] = ()) -> list[int]:
        output: list[int] = []
        for _ in range(8):
            row = Row(logits, SamplingParams(temperature=0.8), seed, sample_index, output=tuple(output))
            output.append(_draw([*mates, row])[-1])
        return output

    first = stream(42, 0)
    assert stream(42, 0) == first
    assert stream(42, 0, [Row(logits, SamplingParams(), seed=n) for n in range(3)]) == first
    others = [first, stream(42, 1), stream(42, 2), stream(43, 0), stream(42 + 2**32, 0), stream(42 + 2**62, 0)]
    assert len({tuple(ids) for ids in others}) == len(others)
    assert len(set(first)) > 4  # positions differ too


def test_the_dtype_of_the_logits_does_not_matter() -> None:
    rows = [
        dataclasses.replace(row, logits=np.asarray(jnp.asarray(row.logits, jnp.bfloat16), np.float32))
        for row in _random_rows(np.random.default_rng(5))
    ]
    assert _draw(rows, jnp.bfloat16) == _draw(rows)


def test_both_paths_draw_the_same() -> None:
    @jax.jit
    def paths(x: jax.Array, rows: RowSampling, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = sampler.pad_vocab(x, V)
        lines = sampler.Rows.create(x, sampler.tile_maxima(x), rows, positions)
        everyone = jnp.ones(S, bool)
        return *sampler._draw_narrow(lines, everyone), sampler._draw_group(lines, everyone)

    rng = np.random.default_rng(7)
    num_decided = 0
    for position in range(20):
        rows = [dataclasses.replace(row, seed=position) for row in _random_rows(rng)]
        logits = np.stack([row.logits for row in rows])
        narrow, decided, wide = map(np.asarray, paths(logits, _stack(rows), np.full(S, position, np.int32)))
        np.testing.assert_array_equal(narrow[decided], wide[decided])
        num_decided += decided.sum()
    assert 100 < num_decided < 20 * S  # both kinds of row were there


def test_broken_logits_give_valid_ids_and_stay_in_their_row() -> None:
    rng = np.random.default_rng(2)
    healthy = [Row(_random_logits(rng), SamplingParams(top_p=0.9), seed=n) for n in range(4)]
    expected = _draw(healthy)
    one_nan, all_nan, infinite, nothing, without, peaks = (healthy[0].logits.copy() for _ in range(6))
    best = int(np.argmax(one_nan))
    one_nan[best] = one_nan[::128] = np.nan  # the most likely token, and one in every tile
    all_nan[:] = np.nan
    infinite[[77, 90]] = np.inf
    nothing[:] = without[best] = without[::128] = peaks[:] = -np.inf
    peaks[[77, 90]] = 0.0
    for params in (
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=100, top_p=0.5, min_p=0.1),
    ):
        broken = [Row(x, params, seed=7) for x in (one_nan, infinite, all_nan, nothing)]
        repaired = [Row(x, params, seed=7) for x in (without, peaks)]
        ids = _draw([*broken, *healthy])
        assert ids[:4] == [*_draw(repaired), 0, 0]
        assert ids[4:] == expected
    # Nothing but greedy rows: no row sends the batch past the shortest way.
    assert _draw([dataclasses.replace(row, params=GREEDY) for row in broken]) == [int(np.argmax(without)), 77, 0, 0]


def test_no_option_makes_a_program() -> None:
    _draw([Row(np.zeros(V, np.float32))])
    before = SAMPLE._cache_size()
    _draw(_random_rows(np.random.default_rng(8)))
    assert SAMPLE._cache_size() == before


def _unconditional(jaxpr: jax.extend.core.Jaxpr) -> set[str]:
    """Names of the primitives outside every branch."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        if eqn.primitive.name in ("jit", "pjit"):
            names |= _unconditional(eqn.params["jaxpr"].jaxpr)
    return names


def test_only_what_is_used_is_computed() -> None:
    jaxpr = jax.make_jaxpr(lambda *args: sample(*args, num_vocab_tokens=V))(
        *(jax.ShapeDtypeStruct((S, V), jnp.float32), RowSampling.zeros(S)),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((S,), (S, M), (S,))),
    )
    names = _unconditional(jaxpr.jaxpr)
    assert "cond" in names
    assert not names & {"sort", "top_k", "scatter", "scatter-add", "exp", "log", "log1p", "while", "scan", "gather"}


@pytest.mark.parametrize("x64", [False, True])
def test_types_are_strict(x64: bool) -> None:
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(
            lambda *args: sample(*args, num_vocab_tokens=V),
            *(jax.ShapeDtypeStruct((S, V), jnp.bfloat16), RowSampling.zeros(S)),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((S,), (S, M), (S,))),
        )
    assert (found.shape, found.dtype) == ((S,), jnp.int32)
