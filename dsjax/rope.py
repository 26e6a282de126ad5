"""Rotary position embedding with YaRN frequencies.

Rotation is always half-split at run time, pairs (x[i], x[i + d/2]); interleaved checkpoints are permuted to it when
they are loaded (`half_split_order`).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.config import RopeConfig, YarnConfig


def frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of each rotated pair: float32 [dim / 2] (Su et al. 2021; YaRN: Peng et al. 2023)."""
    index = np.arange(rope.dim // 2)
    plain = rope.theta ** (-2.0 * index / rope.dim)
    if rope.yarn is None:
        return plain.astype(np.float32)
    low, high = _yarn_range(rope, rope.yarn)
    interpolated = np.clip((index - low) / (high - low), 0.0, 1.0)
    return (plain / rope.yarn.factor * interpolated + plain * (1.0 - interpolated)).astype(np.float32)


def _yarn_range(rope: RopeConfig, yarn: YarnConfig) -> tuple[float, float]:
    """Pairs below `low` keep their frequency, pairs above `high` are divided by the factor."""

    def pair_with_rotations(rotations: float) -> float:
        wavelength_ratio = yarn.original_max_position / (2 * math.pi * rotations)
        return rope.dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with_rotations(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(yarn.beta_slow)), rope.dim - 1)
    return low, high + 0.001 if low == high else high


def cos_sin(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each token's angles: positions int32 [T] -> two float32 [T, dim / 2]."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies(rope)
    scale = rope.yarn.rotation_scale if rope.yarn else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, ..., dim] by the angles of its token (cos, sin [T, dim / 2]), in float32, back in x's dtype."""
    spread = (cos.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    cos, sin = cos.reshape(spread), sin.reshape(spread)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


def half_split_order(dim: int) -> np.ndarray:
    """Indices that turn interleaved channels (pairs 2i, 2i+1) into half-split ones: evens, then odds."""
    return np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])
