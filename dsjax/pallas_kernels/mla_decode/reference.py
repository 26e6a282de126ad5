"""MLA decode in plain JAX: online softmax over blocks of pages, as many blocks as the longest row needs."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.pallas_kernels.online_softmax import PAGES_PER_BLOCK, SoftmaxState, whole_blocks


@partial(jax.jit, static_argnames=("rank", "scale"))
def mla_decode(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    *,
    rank: int,
    scale: float,
) -> jax.Array:
    """Multi-query attention over latents, W_UK absorbed into the query (DeepSeek-V2 paper, section 2.1.2).

    Args:
      q: queries [T, H, C + R]: the latent query q_nope W_UK, then the rotated q_pe.
      pool: latent cache [L, P, S, C + R]; its first C = `rank` channels are the values as well.
      layer: int32 scalar, the layer of the pool to read.
      tables: int32 [T, N], the pages of each query's row.
      lengths: int32 [T]: the query sees positions 0..length-1 of its row. 0: no query.
      scale: softmax scale.

    Returns:
      [T, H, C] in q's dtype; zeros where the length is 0. What stands beyond a row's length has no influence.
    """
    page_size = pool.shape[2]
    block = PAGES_PER_BLOCK * page_size
    tables = whole_blocks(tables)

    def add_block(i, state: SoftmaxState) -> SoftmaxState:
        pages = lax.dynamic_slice_in_dim(tables, i * PAGES_PER_BLOCK, PAGES_PER_BLOCK, axis=1)
        visible = i * block + jnp.arange(block) < lengths[:, None]
        keys = pool[layer, pages].reshape(q.shape[0], block, pool.shape[3])
        keys = jnp.where(visible[..., None], keys, 0)
        scores = jnp.einsum("thw,tkw->thk", q, keys, preferred_element_type=jnp.float32) * scale

        def weigh_values(weights):
            values = keys[..., :rank]
            return jnp.einsum("thk,tkc->thc", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)

        return state.add(scores, visible[:, None, :], weigh_values)

    blocks = (jnp.max(lengths) + block - 1) // block
    state = lax.fori_loop(0, blocks, add_block, SoftmaxState.empty(q.shape[:2], rank))
    return state.result().astype(q.dtype)


def mla_decode_in_tiles(q, pool, layer, tables, lengths, *, rank: int, scale: float) -> jax.Array:
    """mla_decode, a quarter of the places at a time, as far as there are queries: few of them cost little."""
    count = q.shape[0]
    tile = -(-count // 4)

    def add_tile(i, out):
        q_tile, table, length = (lax.dynamic_slice_in_dim(x, i * tile, tile) for x in (q, tables, lengths))
        o = mla_decode(q_tile, pool, layer, table, length, rank=rank, scale=scale)
        return lax.dynamic_update_slice_in_dim(out, o, i * tile, axis=0)

    used = jnp.max(jnp.where(lengths > 0, jnp.arange(1, count + 1), 0))
    return lax.fori_loop(0, (used + tile - 1) // tile, add_tile, jnp.zeros((*q.shape[:2], rank), q.dtype))
