"""MLA prefill in plain JAX: tiles of query tokens of one chunk each, online softmax over blocks of pages.

Loops are bounded by counts read on the device, so cost follows the real tokens and their contexts.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.pallas_kernels.online_softmax import PAGES_PER_BLOCK, SoftmaxState, whole_blocks

MAX_TILE = 128


class PrefillChunks(NamedTuple):
    """Stretches of query tokens, one per row and step; int32 [B] each, unused ones have length 0 and come last.

    `rows`: the row whose pages hold the context. `starts`: first of the chunk's tokens in the token arrays.
    `lengths`: tokens in the chunk. `positions`: position of its first token, so the number of cached tokens before it.
    """

    rows: jax.Array
    starts: jax.Array
    lengths: jax.Array
    positions: jax.Array


class _Tile(NamedTuple):
    """int32 scalars: the chunk, the first query token, how many are real, and the first one's position."""

    chunk: jax.Array
    token: jax.Array
    used: jax.Array
    position: jax.Array


@partial(jax.jit, static_argnames="scale")
def mla_prefill(
    q: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_tables: jax.Array,
    chunks: PrefillChunks,
    *,
    scale: float,
) -> jax.Array:
    """Causal attention with keys and values expanded per head from latents (DeepSeek-V2 paper, section 2.1.1).

    Args:
      q: queries [T, H, N + R]: q_nope, then the rotated q_pe.
      w_uk: [H, N, C] and w_uv: [H, V, C] expand a latent to a head's key and value.
      pool: latent cache [L, P, S, C + R], which already holds the chunks' own tokens.
      layer: int32 scalar, the layer of the pool to read.
      page_tables: int32 [B, pages], the pages of each row.
      chunks: which stretches of the T tokens belong to which rows; a token sees its row's positions up to its own.
      scale: softmax scale.

    Returns:
      [T, H, V] in q's dtype; zeros for tokens in no chunk. What stands beyond a row's end has no influence.
    """
    tokens, heads, _ = q.shape
    tile = min(tokens, MAX_TILE)
    tiles = -(-chunks.lengths // tile)
    first_tile = jnp.cumsum(tiles) - tiles
    padded_q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def add_tile(i, out):
        place = _locate(i, first_tile, chunks, tile)
        queries = lax.dynamic_slice_in_dim(padded_q, place.token, tile)
        table = page_tables[chunks.rows[place.chunk]]
        result = _attend(queries, place, w_uk, w_uv, pool, layer, table, scale)
        before = lax.dynamic_slice_in_dim(out, place.token, tile)
        result = jnp.where((jnp.arange(tile) < place.used)[:, None, None], result, before)
        return lax.dynamic_update_slice_in_dim(out, result, place.token, axis=0)

    out = jnp.zeros((tokens + tile, heads, w_uv.shape[1]), q.dtype)
    return lax.fori_loop(0, jnp.sum(tiles), add_tile, out)[:tokens]


def _locate(i: jax.Array, first_tile: jax.Array, chunks: PrefillChunks, tile: int) -> _Tile:
    chunk = jnp.sum(first_tile <= i) - 1
    skipped = (i - first_tile[chunk]) * tile
    used = jnp.minimum(chunks.lengths[chunk] - skipped, tile)
    return _Tile(chunk, chunks.starts[chunk] + skipped, used, chunks.positions[chunk] + skipped)


def _attend(queries, place: _Tile, w_uk, w_uv, pool, layer, table, scale) -> jax.Array:
    """Attention of one tile, queries [tile, H, N + R] -> [tile, H, V]."""
    tile, heads, _ = queries.shape
    nope, rank = w_uk.shape[1:]
    block = PAGES_PER_BLOCK * pool.shape[2]
    table = whole_blocks(table)
    end = place.position + place.used
    own = place.position + jnp.arange(tile)

    def add_block(i, state: SoftmaxState) -> SoftmaxState:
        pages = lax.dynamic_slice_in_dim(table, i * PAGES_PER_BLOCK, PAGES_PER_BLOCK)
        positions = i * block + jnp.arange(block)
        latents = jnp.where((positions < end)[:, None], pool[layer, pages].reshape(block, -1), 0)
        keys = jnp.einsum("kc,hnc->khn", latents[:, :rank], w_uk)
        values = jnp.einsum("kc,hvc->khv", latents[:, :rank], w_uv)
        scores = jnp.einsum("qhn,khn->qhk", queries[..., :nope], keys, preferred_element_type=jnp.float32)
        scores += jnp.einsum("qhr,kr->qhk", queries[..., nope:], latents[:, rank:], preferred_element_type=jnp.float32)

        def weigh_values(weights):
            weights = weights.astype(values.dtype)
            return jnp.einsum("qhk,khv->qhv", weights, values, preferred_element_type=jnp.float32)

        return state.add(scores * scale, (positions <= own[:, None])[:, None, :], weigh_values)

    empty = SoftmaxState.empty((tile, heads), w_uv.shape[1])
    return lax.fori_loop(0, -(-end // block), add_block, empty).result().astype(queries.dtype)
