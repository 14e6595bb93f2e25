"""What must not matter, bit for bit or nearly: block ids, stale slots, batch mates, chunking, how the keys are split.

And what must: each wrong input a kernel could produce by mistake has to show up against the oracle.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import KVPages, copy_blocks, merge_attention_states, paged_attention

SEQ_LENS, QUERY_LENS = [33, 0, 20, 7, 1, 150, 64], [1, 0, 20, 0, 1, 70, 2]

both = pytest.mark.parametrize("implementation", ["reference", "xla"])


@pytest.fixture(scope="module")
def mixed() -> oracle.Problem:
    return oracle.make(0, SEQ_LENS, QUERY_LENS)


@both
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}], ids=["full", "window"])
def test_stale_slots_and_table_padding_do_not_matter(implementation: str, options: dict) -> None:
    clean = oracle.make(1, SEQ_LENS, QUERY_LENS, fill=0.0, padding=0).run(implementation, **options)
    for fill, padding in ((np.nan, None), (np.inf, -1), (-np.inf, 2**31 - 1)):
        dirty = oracle.make(1, SEQ_LENS, QUERY_LENS, fill=fill, padding=padding).run(implementation, **options)
        for got, want in zip(dirty, clean, strict=True):
            np.testing.assert_array_equal(got, want)


@both
def test_nan_right_after_the_last_token(implementation: str) -> None:
    """Lengths around the end of a block, all decode: slots past the length NaN against zero."""
    lengths, ones = [1, 15, 16, 17, 31, 32, 33], [1] * 7
    clean = oracle.make(2, lengths, ones, fill=0.0, padding=0)
    for fill in (np.nan, np.inf):
        dirty = oracle.make(2, lengths, ones, fill=fill, padding=0)
        for got, want in zip(dirty.run(implementation), clean.run(implementation), strict=True):
            np.testing.assert_array_equal(got, want)


@both
def test_blocks_before_the_window_may_be_gone(implementation: str, mixed: oracle.Problem) -> None:
    """What a row with window 40 no longer sees may have been given back, and belong to someone else."""
    before = mixed.run(implementation, sliding_window=40)
    tables = mixed.block_tables.copy()
    tables[5, : (150 - 70 - 40 + 1) // 16] = 0  # the null block, NaN here
    tables[6, : (64 - 2 - 40 + 1) // 16] = -7
    after = dataclasses.replace(mixed, block_tables=tables).run(implementation, sliding_window=40)
    for got, want in zip(after, before, strict=True):
        np.testing.assert_array_equal(got, want)


@both
def test_the_order_of_blocks_in_the_pool_does_not_matter(implementation: str, mixed: oracle.Problem) -> None:
    num_blocks = mixed.kv_pages.num_blocks
    moved_to = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(num_blocks - 1)]).astype(np.int32)
    blank = KVPages.zeros(2, num_blocks, 16, 2, 64, jnp.float32)
    both_pools = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), blank, mixed.kv_pages)
    moved = copy_blocks(both_pools, jnp.arange(num_blocks) + num_blocks, jnp.asarray(moved_to))
    moved = jax.tree.map(lambda x: x[:, :num_blocks], moved)
    tables = moved_to[np.clip(mixed.block_tables, 0, num_blocks - 1)]
    got = dataclasses.replace(mixed, kv_pages=moved, block_tables=tables).run(implementation)
    for a, b in zip(got, mixed.run(implementation), strict=True):
        np.testing.assert_array_equal(a, b)


@both
def test_a_row_does_not_depend_on_its_batch_mates(implementation: str, mixed: oracle.Problem) -> None:
    """Same shapes, other mates: the row's bits are the same, wherever in the batch it stands."""
    out, lse = mixed.run(implementation)
    starts = mixed.query_start_loc
    order = [5, 2, 6, 4, 0, 3, 1]
    for rows in (order, [6, 5, 4, 4, 0, 0, 6]):
        query_lens = [QUERY_LENS[r] for r in rows]
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])
        q = np.zeros(mixed.q.shape)
        q[: len(tokens)] = mixed.q[tokens]
        keys, values = ([x[r] for r in rows] for x in (mixed.keys, mixed.values))
        tables = mixed.block_tables[rows]
        shuffled = oracle.Problem(q, keys, values, query_lens, mixed.kv_pages, tables, 1)
        got_out, got_lse = shuffled.run(implementation)
        np.testing.assert_array_equal(got_out[: len(tokens)], out[tokens])
        np.testing.assert_array_equal(got_lse[: len(tokens)], lse[tokens])


@both
@pytest.mark.parametrize("width", [1, 3])
def test_a_decode_row_does_not_depend_on_the_number_of_rows(implementation: str, width: int) -> None:
    """Batches of other sizes are other programs, and still give the row the same bits."""
    rows = oracle.make(2, [150] + [40] * 6, [1] * 7, num_tokens=7)
    batched = rows.run(implementation, max_query_len=1)[0][0]
    some = oracle.Problem(
        rows.q[:width], rows.keys[:width], rows.values[:width], [1] * width, rows.kv_pages, rows.block_tables[:width], 1
    )
    np.testing.assert_array_equal(some.run(implementation, max_query_len=1)[0][0], batched)


@both
@pytest.mark.parametrize("chunks", [[4, 6], [3, 4, 3], [1] * 10], ids=str)
def test_chunks_equal_one_prefill(implementation: str, chunks: list[int]) -> None:
    whole = oracle.make(3, [10], [10])
    expected, expected_lse = whole.run(implementation)
    end = 0
    for chunk in chunks:
        start, end = end, end + chunk
        arguments = whole.arguments(
            q=jnp.asarray(np.roll(whole.q, -start, axis=0), jnp.float32),
            seq_lens=jnp.asarray([end] + [0] * 6),
            query_start_loc=jnp.asarray([0] + [chunk] * 7),
        )
        out, lse = paged_attention(*arguments, layer=1, return_lse=True, implementation=implementation)
        np.testing.assert_allclose(out[:chunk], expected[start:end], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(lse[:chunk], expected_lse[start:end], rtol=2e-6, atol=2e-6)


@both
def test_decode_equals_the_last_query_of_a_prefill(implementation: str, mixed: oracle.Problem) -> None:
    out, _ = mixed.run(implementation)
    last = mixed.query_start_loc[[3, 6]] - 1
    arguments = (
        jnp.asarray(mixed.q[last], jnp.float32),
        mixed.kv_pages,
        jnp.asarray(mixed.block_tables[[2, 5]]),
        jnp.asarray(mixed.seq_lens[[2, 5]]),
        jnp.asarray([0, 1, 2]),
    )
    decode = paged_attention(*arguments, layer=1, max_query_len=1, implementation=implementation)
    np.testing.assert_allclose(decode, out[last], rtol=2e-6, atol=2e-6)


@both
def test_a_cascade_over_a_shared_prefix_equals_flat_attention(implementation: str) -> None:
    """Two rows share 32 tokens: prefix for both queries at once, suffixes apart, sinks in exactly one part."""
    flat = oracle.make(4, [40, 50], [3, 1], num_rows=2, num_tokens=4)
    shared = flat.block_tables.copy()
    shared[1, :2] = shared[0, :2]
    flat = dataclasses.replace(flat, block_tables=shared)
    sinks = jnp.asarray([0.5, 1.0, -1.0, 2.0])
    options = {"layer": 1, "return_lse": True, "implementation": implementation}
    expected = paged_attention(*flat.arguments(), sinks=sinks, **options)
    prefix = flat.arguments(
        block_tables=jnp.asarray(shared[:1]), seq_lens=jnp.asarray([32]), query_start_loc=jnp.asarray([0, 4])
    )
    suffix = flat.arguments(block_tables=jnp.asarray(shared[:, 2:]), seq_lens=jnp.asarray([8, 18]))
    merged = merge_attention_states(
        *paged_attention(*prefix, causal=False, sinks=sinks, **options), *paged_attention(*suffix, **options)
    )
    for got, want in zip(merged, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6)


@both
def test_jit_equals_eager(implementation: str, mixed: oracle.Problem) -> None:
    def attend(arguments: tuple, layer: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return paged_attention(*arguments, layer=layer, scale=scale, return_lse=True, implementation=implementation)

    eager = attend(mixed.arguments(), jnp.int32(1), jnp.float32(0.125))
    jitted = jax.jit(attend)(mixed.arguments(), jnp.int32(1), jnp.float32(0.125))
    for got, want in zip(jitted, eager, strict=True):
        np.testing.assert_array_equal(got, want)


def test_positions_past_32768() -> None:
    """A tiny head and a long context: no position, slot or tile index is 16 bits wide anywhere."""
    problem = oracle.make(
        5,
        [40_000],
        [2],
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=4,
        block_size=64,
        max_blocks=626,
        num_blocks=630,
        num_rows=1,
        num_tokens=2,
        num_layers=1,
        layer=0,
    )
    oracle.assert_close(problem, "xla", sliding_window=33_000)


def wrong_inputs(problem: oracle.Problem) -> dict[str, tuple[tuple, dict]]:
    """One kernel mistake each, made in the inputs."""
    q, tables = jnp.asarray(problem.q, jnp.float32), problem.block_tables
    swapped_blocks = tables.copy()
    swapped_blocks[5, [2, 4]] = tables[5, [4, 2]]
    same_block = tables.copy()
    same_block[5, 3] = tables[5, 4]
    starts = problem.query_start_loc
    return {
        "mask one too far": (problem.arguments(seq_lens=jnp.asarray(np.maximum(problem.seq_lens - 1, 0))), {}),
        "window one wider": (problem.arguments(), {"sliding_window": 41}),
        "window one narrower": (problem.arguments(), {"sliding_window": 39}),
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


@both
def test_every_wrong_input_shows(implementation: str, mixed: oracle.Problem) -> None:
    right = {"sliding_window": 40, "soft_cap": 3.0, "sinks": jnp.asarray([0.5, 1.0, -1.0, 2.0])}
    expected, expected_lse = mixed.expected(**right)
    out, lse = mixed.run(implementation, **right)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    for name, (arguments, options) in wrong_inputs(mixed).items():
        options = {"layer": 1, **right, **options, "implementation": implementation}
        wrong = np.asarray(paged_attention(*arguments, **options))
        # A hundred times the tolerance: a mistake must not hide near it. NaN counts as seen.
        assert not np.abs(wrong - expected).max() < 2e-3, name
