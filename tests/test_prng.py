"""pagedjax.prng: equal to `jax.random` on threefry keys, whatever JAX is configured to, and standard Gumbel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy_sampler
import pytest

from pagedjax.prng import draw_keys, fold_in, gumbel, gumbel_of, threefry2x32

SEEDS = [0, 1, 42, 2**31 - 1, 2**32 + 5, 2**40 + 3, 2**63 - 1]
SAMPLES = [0, 1, 2, 3, 0, 7, 1]
POSITIONS = [0, 5, 1, 2**20, 9, 3, 4]
NUM_IDS = 1000
GUMBEL = jax.jit(gumbel)
KEYS = jax.jit(draw_keys)


def _words(seeds: list[int]) -> jax.Array:
    return jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32)


def _keys() -> jax.Array:
    return KEYS(_words(SEEDS), jnp.array(SAMPLES, jnp.int32), jnp.array(POSITIONS, jnp.int32))


def test_threefry_known_answers() -> None:
    # Random123's kat_vectors, threefry2x32 with 20 rounds: counter, key, result.
    for counter, key, result in [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ]:
        words = threefry2x32(*((jnp.uint32(pair[0]), jnp.uint32(pair[1])) for pair in (key, counter)))
        assert tuple(int(word) for word in words) == result


def test_keys_equal_jax_random() -> None:
    with jax.enable_x64(True):  # jax.random.key takes 64-bit seeds only so
        expected = [
            jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), s), p))
            for seed, s, p in zip(SEEDS, SAMPLES, POSITIONS, strict=True)
        ]
    np.testing.assert_array_equal(_keys(), np.stack(expected))
    one = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(_words(SEEDS)[2]), 17))
    np.testing.assert_array_equal(fold_in(_words(SEEDS), jnp.full(7, 17, jnp.int32))[2], one)


def test_noise_equals_jax_random_bits() -> None:
    expected = numpy_sampler.noise(SEEDS, SAMPLES, POSITIONS, NUM_IDS)
    found = np.asarray(GUMBEL(_keys(), jnp.arange(NUM_IDS, dtype=jnp.int32)))
    # Below, u is near 1 and float32 rounds 1 - u; noise that low never wins.
    np.testing.assert_allclose(found[expected > -1], expected[expected > -1], rtol=2e-6, atol=3e-6)
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_noise_belongs_to_the_id() -> None:
    whole = np.asarray(GUMBEL(_keys(), jnp.arange(NUM_IDS, dtype=jnp.int32)))
    ids = np.random.default_rng(0).integers(0, NUM_IDS, (len(SEEDS), 13)).astype(np.int32)
    np.testing.assert_array_equal(GUMBEL(_keys(), jnp.asarray(ids)), np.take_along_axis(whole, ids, axis=1))
    one = [GUMBEL(_keys()[i : i + 1], jnp.asarray(ids[i, :1]))[0, 0] for i in range(len(SEEDS))]
    np.testing.assert_array_equal(one, whole[np.arange(len(SEEDS)), ids[:, 0]])
    np.testing.assert_array_equal(gumbel(_keys(), jnp.asarray(ids)), np.take_along_axis(whole, ids, axis=1))


@pytest.mark.parametrize("partitionable", [False, True])
@pytest.mark.parametrize("x64", [False, True])
def test_no_configuration_moves_it(partitionable: bool, x64: bool) -> None:
    expected = GUMBEL(_keys(), jnp.arange(NUM_IDS, dtype=jnp.int32))
    with jax.threefry_partitionable(partitionable), jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        found = GUMBEL(_keys(), jnp.arange(NUM_IDS, dtype=jnp.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


def test_extreme_bits() -> None:
    bits = jnp.array([0, 1, 2**31, 2**32 - 129, 2**32 - 1], jnp.uint32)
    found = np.asarray(gumbel_of(bits))
    # The two largest have u = 1 - 2**-25 and more, which float32 has not: they count as 1 - 2**-24.
    np.testing.assert_allclose(found[:3], [np.log(2.0**33), np.log(2.0**33 / 3), -np.log(np.log(2))], rtol=1e-6)
    np.testing.assert_allclose(found[3:], -np.log(24 * np.log(2)), rtol=1e-6)


def test_gumbel_moments_and_tails() -> None:
    keys = KEYS(_words([9] * 64), jnp.arange(64, dtype=jnp.int32), jnp.zeros(64, jnp.int32))
    sample = np.asarray(GUMBEL(keys, jnp.arange(8192, dtype=jnp.int32)), np.float64).ravel()  # 2**19 draws
    assert np.isfinite(sample).all()
    error = np.pi / np.sqrt(6) / np.sqrt(sample.size)  # of the mean
    assert abs(sample.mean() - np.euler_gamma) < 4 * error
    assert abs(sample.var() - np.pi**2 / 6) < 0.02
    # The largest of n is a Gumbel variable shifted by log(n); the smallest is about -log(log(n)).
    assert -3 < sample.max() - np.log(sample.size) < 6
    assert sample.min() > -3
    for level in (0.0, 2.0, 5.0, 8.0):
        expected = sample.size * -np.expm1(-np.exp(-level))
        assert abs((sample > level).sum() - expected) < 4 * np.sqrt(expected)
