"""Routed experts in plain JAX: sort (token, expert) pairs by expert, then one small GEMM pair per tile of pairs.

Cost follows the real pairs: the number of tiles is counted on the device, experts that nobody chose are not read, and
pairs without an expert (pad tokens, experts of other devices) are in no tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.activation import swiglu
from dsjax.quantization import Weight, dense

MIN_TILE, MAX_TILE = 8, 128


class _Tiles(NamedTuple):
    """Pairs sorted by expert, cut into tiles of one expert each."""

    pairs: jax.Array  # int32 [T * K + tile]: pair indices in expert order
    first_tile: jax.Array  # int32 [E + 1]: tiles before each expert
    first_pair: jax.Array  # int32 [E + 1]: pairs before each expert


@jax.jit
def experts(x: jax.Array, gate_up: Weight, down: Weight, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """y_t = sum_k weights[t, k] * down_e(silu(gate_e(x_t)) * up_e(x_t)) with e = ids[t, k].

    Args:
      x: [T, D]. gate_up: [E, 2, I, D], gate first. down: [E, D, I]. Either may be BlockScaled: an expert is then
        multiplied out when a tile needs it, and activations are not quantised.
      ids: int32 [T, K], -1 for "no expert". weights: float32 [T, K].

    Returns:
      float32 [T, D]; a token's experts are added in the order of their ids. Zero rows for tokens without experts.
    """
    tokens, chosen = ids.shape
    num_experts, _, width, hidden = gate_up.shape
    tile = _tile_size(tokens * chosen, num_experts)
    tiles = _make_tiles(ids.reshape(-1), num_experts, tile)
    pair_weights = weights.reshape(-1)

    def add_tile(i, y):
        expert = jnp.sum(tiles.first_tile <= i) - 1
        begin = tiles.first_pair[expert] + (i - tiles.first_tile[expert]) * tile
        pairs = lax.dynamic_slice(tiles.pairs, (begin,), (tile,))
        used = begin + jnp.arange(tile) < tiles.first_pair[expert + 1]
        rows = x[pairs // chosen]
        both = rows @ dense(gate_up[expert], x.dtype).reshape(2 * width, hidden).T
        inner = swiglu(both[:, :width], both[:, width:])
        out = jnp.dot(inner, dense(down[expert], x.dtype).T, preferred_element_type=jnp.float32)
        out = out * pair_weights[pairs][:, None]
        targets = jnp.where(used, pairs // chosen, tokens + jnp.arange(tile))
        return y.at[targets].add(out, mode="drop", unique_indices=True)

    return lax.fori_loop(0, tiles.first_tile[-1], add_tile, jnp.zeros((tokens, hidden), jnp.float32))


def _tile_size(pairs: int, num_experts: int) -> int:
    """A power of two near the mean number of pairs per expert."""
    mean = max(pairs // num_experts, 1)
    return min(max(1 << (mean - 1).bit_length(), MIN_TILE), MAX_TILE)


def _make_tiles(ids: jax.Array, num_experts: int, tile: int) -> _Tiles:
    group = jnp.where(ids < 0, num_experts, ids)  # pairs without an expert come last
    counts = jnp.sum(group[:, None] == jnp.arange(num_experts), axis=0)
    order = jnp.argsort(group, stable=True)
    return _Tiles(jnp.pad(order, (0, tile)), _starts(-(-counts // tile)), _starts(counts))


def _starts(counts: jax.Array) -> jax.Array:
    """How many there are before each item, and in all: [n] -> [n + 1]."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
