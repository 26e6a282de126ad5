"""Softmax attention computed over blocks of keys, for the plain JAX references of attention.

The running state is (largest score, sum of exponentials, weighted sum of values) per query. A block in which a query
has no visible key leaves that query's state exactly as it was, so results do not depend on how far other rows reach.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PAGES_PER_BLOCK = 2
NO_KEY = jnp.finfo(jnp.float32).min  # score of a masked key, finite so that no inf - inf arises


class SoftmaxState(NamedTuple):
    """float32 arrays: largest and total [..., ], values [..., V]."""

    largest: jax.Array
    total: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, queries: tuple[int, ...], value_width: int) -> "SoftmaxState":
        return cls(jnp.full(queries, NO_KEY), jnp.zeros(queries), jnp.zeros((*queries, value_width)))

    def add(self, scores: jax.Array, visible: jax.Array, weigh_values) -> "SoftmaxState":
        """Add a block: scores float32 [..., keys], visible bool like it, weigh_values(weights) -> [..., V]."""
        scores = jnp.where(visible, scores, NO_KEY)
        largest = jnp.maximum(self.largest, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0.0)
        shrink = jnp.exp(self.largest - largest)
        values = self.values * shrink[..., None] + weigh_values(weights)
        return SoftmaxState(largest, self.total * shrink + weights.sum(axis=-1), values)

    def result(self) -> jax.Array:
        """The attention output [..., V]; zeros for queries that saw no key."""
        return self.values / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def whole_blocks(tables: jax.Array) -> jax.Array:
    """Page tables [..., N], with N padded to a multiple of PAGES_PER_BLOCK."""
    return jnp.pad(tables, [(0, 0)] * (tables.ndim - 1) + [(0, -tables.shape[-1] % PAGES_PER_BLOCK)])
