"""MLA decode in plain JAX: online softmax over blocks of pages, as many blocks as the longest row needs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.pallas_kernels.online_softmax import PAGES_PER_BLOCK, SoftmaxState, whole_blocks


class DecodeRows(NamedTuple):
    """Rows that decode, B entries.

    `rows` int32 [B]: the row of the page tables of each entry. `lengths` int32 [B]: keys that the entry's last query
    token sees, 0: no query. `plan`: what the implementation's `plan` made of the lengths.
    """

    rows: jax.Array
    lengths: jax.Array
    plan: Any


def no_plan(tables: jax.Array, rows: jax.Array, lengths: jax.Array, *, queries: int, num_sms: int) -> tuple[()]:
    """The plan of an implementation that needs none."""
    return ()


@partial(jax.jit, static_argnames="scale")
def mla_decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    decode: DecodeRows,
    *,
    scale: float,
) -> jax.Array:
    """Multi-query attention over latents, W_UK absorbed into the query (DeepSeek-V2 paper, section 2.1.2).

    Args:
      q_latent: q_nope W_UK of each entry's last Q tokens [B, Q, H, C]. q_rope: their rotated q_pe [B, Q, H, R].
      pool: latent cache [L, P, S, C + R]; its first C channels are the values as well.
      layer: int32 scalar, the layer of the pool to read.
      tables: int32 [rows, N], the pages of each row.
      decode: which rows the entries are. Query token i sees positions 0..length-Q+i of its row.
      scale: softmax scale.

    Returns:
      [B, Q, H, C] in q_latent's dtype; zeros for queries that see no key. What stands beyond a row's length has no
      influence.
    """
    entries, tokens, heads, rank = q_latent.shape
    page_size = pool.shape[2]
    block = PAGES_PER_BLOCK * page_size
    tables = whole_blocks(tables[decode.rows])
    queries = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(entries, tokens * heads, -1)
    seen = decode.lengths[:, None] - jnp.arange(tokens)[::-1]
    seen = jnp.repeat(seen, heads, axis=1)  # keys per query

    def add_block(i, state: SoftmaxState) -> SoftmaxState:
        pages = lax.dynamic_slice_in_dim(tables, i * PAGES_PER_BLOCK, PAGES_PER_BLOCK, axis=1)
        positions = i * block + jnp.arange(block)
        keys = pool[layer, pages].reshape(entries, block, pool.shape[3])
        keys = jnp.where((positions < decode.lengths[:, None])[..., None], keys, 0)
        scores = jnp.einsum("bqw,bkw->bqk", queries, keys, preferred_element_type=jnp.float32) * scale

        def weigh_values(weights):
            values = keys[..., :rank]
            return jnp.einsum("bqk,bkc->bqc", weights.astype(queries.dtype), values, preferred_element_type=jnp.float32)

        return state.add(scores, positions < seen[..., None], weigh_values)

    blocks = (jnp.max(decode.lengths) + block - 1) // block
    state = lax.fori_loop(0, blocks, add_block, SoftmaxState.empty(queries.shape[:2], rank))
    return state.result().astype(queries.dtype).reshape(entries, tokens, heads, rank)


def mla_decode_in_tiles(q_latent, q_rope, pool, layer, tables, decode: DecodeRows, *, scale: float) -> jax.Array:
    """mla_decode, a quarter of the entries at a time, as far as there are queries: few of them cost little."""
    entries = q_latent.shape[0]
    tile = -(-entries // 4)

    def add_tile(i, out):
        per_entry = q_latent, q_rope, decode.rows, decode.lengths
        latent, rope, rows, lengths = (lax.dynamic_slice_in_dim(x, i * tile, tile) for x in per_entry)
        o = mla_decode(latent, rope, pool, layer, tables, DecodeRows(rows, lengths, ()), scale=scale)
        return lax.dynamic_update_slice_in_dim(out, o, i * tile, axis=0)

    used = jnp.max(jnp.where(decode.lengths > 0, jnp.arange(1, entries + 1), 0))
    return lax.fori_loop(0, (used + tile - 1) // tile, add_tile, jnp.zeros_like(q_latent))
