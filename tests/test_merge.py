"""Merging: attention over parts of the keys, merged, is attention over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import merge_attention_states


def parts(cut: int, sinks: np.ndarray | None = None, keys: int = 11) -> tuple[list, tuple]:
    """States over keys [:cut] and [cut:] by the oracle, and the one over all."""
    rng = np.random.default_rng(cut)
    q, k, v = rng.standard_normal((3, 4, 8)), rng.standard_normal((keys, 2, 8)), rng.standard_normal((keys, 2, 8))
    whole = oracle.attend(q, [k], [v], [3], causal=False, sinks=sinks)
    first = oracle.attend(q, [k[:cut]], [v[:cut]], [3], causal=False, sinks=sinks)
    second = oracle.attend(q, [k[cut:]], [v[cut:]], [3], causal=False)
    return [jnp.asarray(x, jnp.float32) for x in (*first, *second)], whole


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -3.0, 4.0, 0.0])])
@pytest.mark.parametrize("cut", [1, 5, 10])
def test_merged_parts_equal_the_whole(cut: int, sinks: np.ndarray | None) -> None:
    states, (out, lse) = parts(cut, sinks)
    for merge in (merge_attention_states, jax.jit(merge_attention_states)):
        merged_out, merged_lse = merge(*states)
        np.testing.assert_allclose(merged_out, out, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(merged_lse, lse, rtol=2e-6, atol=2e-6)


def test_scores_far_apart_neither_overflow_nor_underflow() -> None:
    out_a, out_b = jnp.full((1, 1, 2), 1.0), jnp.full((1, 1, 2), 3.0)
    for lse in (1e4, -1e4):
        out, merged = merge_attention_states(out_a, jnp.full((1, 1), lse), out_b, jnp.full((1, 1), lse))
        np.testing.assert_allclose(out, 2.0)
        np.testing.assert_allclose(merged, lse + np.log(2), rtol=1e-6)


def test_a_part_without_keys_contributes_nothing_whatever_it_holds() -> None:
    (out_a, lse_a, _, _), _ = parts(5)
    nothing = jnp.full_like(lse_a, -jnp.inf)
    for states in ((out_a, lse_a, jnp.full_like(out_a, jnp.nan), nothing), (out_a * jnp.nan, nothing, out_a, lse_a)):
        out, lse = merge_attention_states(*states)
        np.testing.assert_allclose(out, out_a, rtol=1e-6)
        np.testing.assert_allclose(lse, lse_a, rtol=1e-6)


def test_two_parts_without_keys_give_zero_and_minus_infinity() -> None:
    nothing = jnp.full((2, 3), -jnp.inf)
    out, lse = merge_attention_states(jnp.ones((2, 3, 4)), nothing, jnp.ones((2, 3, 4)), nothing)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_nan_in_one_part_shows() -> None:
    (out_a, lse_a, out_b, lse_b), _ = parts(5)
    spoilt = lse_a.at[0, 0].set(jnp.nan)
    out, lse = merge_attention_states(out_a, spoilt, out_b, lse_b)
    assert np.isnan(lse[0, 0])
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(lse).sum() == lse.size - 1


def test_the_gradient_is_finite_where_a_part_has_no_keys() -> None:
    nothing = jnp.asarray([[-jnp.inf, 0.0, -jnp.inf]])
    other = jnp.asarray([[-jnp.inf, 1.0, 2.0]])
    ones = jnp.ones((1, 3, 4))

    def loss(out_a: jax.Array, out_b: jax.Array) -> jax.Array:
        return merge_attention_states(out_a, nothing, out_b, other)[0].sum()

    for gradient in jax.grad(loss, (0, 1))(ones, ones):
        assert jnp.isfinite(gradient).all()


def test_dtypes() -> None:
    states, (expected, _) = parts(5)
    low = [x.astype(jnp.bfloat16) if x.ndim == 3 else x for x in states]
    out, lse = merge_attention_states(*low)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-2, atol=2e-2)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    (out_a, lse_a, out_b, lse_b), _ = parts(5)
    for states in (
        (out_a, lse_a, out_b[:1], lse_b),
        (out_a, lse_a, out_b, lse_b[:1]),
        (out_a, lse_a[:, :1], out_b, lse_b[:, :1]),
    ):
        with pytest.raises(ValueError, match="one shape"):
            merge_attention_states(*states)
