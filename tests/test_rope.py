"""Rotary embedding against float64 and the published YaRN figures."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import RopeConfig, YarnConfig
from dsjax.published import published
from dsjax.rope import cos_sin, frequencies, half_split_order, rotate


def test_yarn_of_v3_interpolates_between_pairs_10_and_23():
    rope = published("v3").attention.rope
    plain = 10000.0 ** (-2 * np.arange(32) / 64)
    ratio = frequencies(rope) / plain
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-6)
    np.testing.assert_allclose(ratio[11:23], 1 - (np.arange(11, 23) - 10) / 13 * (1 - 1 / 40), rtol=1e-6)


def test_without_yarn():
    np.testing.assert_allclose(frequencies(RopeConfig(8, 100.0)), [1, 10**-0.5, 0.1, 10**-1.5], rtol=1e-6)


def test_unequal_mscales_scale_the_rotation():
    yarn = YarnConfig(factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=0.5)
    cos, _ = cos_sin(RopeConfig(64, 10000.0, yarn=yarn), jnp.array([0]))
    wanted = (0.1 * np.log(40) + 1) / (0.05 * np.log(40) + 1)
    np.testing.assert_allclose(cos[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 4095, 163_839])
def test_rotation_at_far_positions(position: int):
    """Angles are products in float32, as in the official code: at position p they are exact to about p * 2^-24."""
    rope = published("v3").attention.rope
    cos, sin = cos_sin(rope, jnp.array([position]))
    angles = position * frequencies(rope).astype(np.float64)
    tolerance = 2e-7 + position * 2.0**-24
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=tolerance)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=tolerance)


def test_half_split_rotation_of_permuted_channels_is_the_interleaved_one():
    """Scores are the same whichever way pairs are stored."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 2, 8)).astype(np.float32)
    cos, sin = cos_sin(RopeConfig(8, 100.0), jnp.array([5, 17, 900]))
    order = half_split_order(8)
    rotated_q, rotated_k = (np.asarray(rotate(jnp.asarray(v[..., order]), cos, sin)) for v in (q, k))

    def interleaved(v: np.ndarray) -> np.ndarray:
        pairs = v.astype(np.float64).reshape(3, 2, 4, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (np.asarray(cos) + 1j * np.asarray(sin))[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(v.shape)

    wanted = np.einsum("thd,shd->hts", interleaved(q), interleaved(k))
    np.testing.assert_allclose(np.einsum("thd,shd->hts", rotated_q, rotated_k), wanted, atol=1e-5)
