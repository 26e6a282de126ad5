"""Multi-head latent attention, cut into pieces (DeepSeek-V2 paper, section 2.1).

    attn_in    residual entry, query and latent projections, rope; writes the new latents into their pages
    attention  reads the pages: absorbed form for decode tokens, per-head form for prefill chunks

A piece's parameters name the values that it takes, `gives` names those that it returns, as a tuple. `places` tells the
piece which layer of each page kind's pools is its own.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config import MLAConfig, ModelConfig
from dsjax.layers.linear import Linear, param
from dsjax.layers.norm import RMSNorm
from dsjax.layers.residual import PreNorm
from dsjax.pallas_kernels import Ops
from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.quantization import dense
from dsjax.rope import rotate
from dsjax.step.inputs import StepInputs

LATENT = "latent"  # the page kind of MLA, and its only pool: [L, P, S, C + R]
ROPE = "main"  # the rope table of MLA


class MLAInput(nnx.Module):
    """x -> queries q [T, H, N + R]; stores each token's latent [C + R] (normed latent, rotated rope key).

    Later pieces find the latents in the pools; they are given as well for whoever looks inside.
    """

    gives = ("pools", "q", "mix", "latent")

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        hidden, mla = config.hidden_size, config.attention
        self.mla = mla
        self.residual = PreNorm(hidden, config.norm_eps)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, mla.latent_norm_eps)
        queries = mla.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = Linear(queries, hidden, dtype)
            self.kv_a = Linear(mla.latent_width, hidden, dtype)
        else:
            self.qkv_a = Linear(mla.q_lora_rank + mla.latent_width, hidden, dtype)
            self.q_a_norm = RMSNorm(mla.q_lora_rank, mla.latent_norm_eps)
            self.q_b = Linear(queries, mla.q_lora_rank, dtype)

    def __call__(self, x: jax.Array, pools: dict, places: dict, inputs: StepInputs):
        h, mix = self.residual.enter(x)
        q, latent = self.project(h, *inputs.rope[ROPE])
        pool, slots = pools[LATENT], inputs.slots[LATENT]
        pages, offsets = slots // pool.shape[2], slots % pool.shape[2]
        latent = latent.astype(pool.dtype)
        pool = pool.at[places[LATENT], pages, offsets].set(latent, mode="drop", unique_indices=True)
        return pools | {LATENT: pool}, q, mix, latent

    def project(self, h: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [T, H, N + R] and latents [T, C + R] of h [T, D], rotated by cos, sin [T, R / 2]."""
        flat_q, latent = self._projections(h)
        q = flat_q.reshape(h.shape[0], -1, self.mla.qk_head_dim)
        q_nope, q_rope = jnp.split(q, [self.mla.qk_nope_head_dim], axis=-1)
        compressed, k_rope = jnp.split(latent, [self.mla.kv_lora_rank], axis=-1)
        q = jnp.concatenate([q_nope, rotate(q_rope, cos, sin)], axis=-1)
        return q, jnp.concatenate([self.kv_a_norm(compressed), rotate(k_rope, cos, sin)], axis=-1)

    def _projections(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.mla.q_lora_rank is None:
            return self.q_proj(h), self.kv_a(h)
        query_latent, latent = jnp.split(self.qkv_a(h), [self.mla.q_lora_rank], axis=-1)
        return self.q_b(self.q_a_norm(query_latent)), latent


class MLAAttention(nnx.Module):
    """Queries q [T, H, N + R] over the row's pages -> o [T, H, V]."""

    gives = ("o",)

    def __init__(self, config: MLAConfig, dtype: jnp.dtype, ops: Ops):
        self.w_uk = param((config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank), dtype)
        self.w_uv = param((config.num_heads, config.v_head_dim, config.kv_lora_rank), dtype)
        self.mla, self.ops = config, ops

    def __call__(self, q: jax.Array, pools: dict, page_tables: dict, places: dict, inputs: StepInputs):
        pool, layer, tables, decode = pools[LATENT], places[LATENT], page_tables[LATENT], inputs.decode
        w_uk, w_uv = dense(self.w_uk[...], q.dtype), dense(self.w_uv[...], q.dtype)
        count = decode.lengths.shape[0]
        decoded = self._decode(q[:count], w_uk, w_uv, pool, layer, tables, decode)
        if inputs.prefill is None:
            return (decoded,)
        o = self.ops.mla_prefill(q, w_uk, w_uv, pool, layer, tables, inputs.prefill, scale=self.mla.softmax_scale)
        is_decode = (decode.lengths > 0)[:, None, None]
        return (o.at[:count].set(jnp.where(is_decode, decoded, o[:count])),)

    def _decode(self, q, w_uk, w_uv, pool, layer, tables, decode: DecodeRows) -> jax.Array:
        q_nope, q_rope = jnp.split(q, [self.mla.qk_nope_head_dim], axis=-1)
        absorbed = jnp.einsum("thn,hnc->thc", q_nope, w_uk)
        latent = self.ops.mla_decode.attend(
            absorbed[:, None], q_rope[:, None], pool, layer, tables, decode, scale=self.mla.softmax_scale
        )
        return jnp.einsum("thc,hvc->thv", latent[:, 0], w_uv)


class HeadsProjection(Linear):
    """Output projection of all heads: o [T, H, V] -> y [T, D], a partial sum over devices that share the heads."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        mla = config.attention
        super().__init__(config.hidden_size, mla.num_heads * mla.v_head_dim, dtype)

    def __call__(self, o: jax.Array, inputs: StepInputs) -> jax.Array:
        return super().__call__(o.reshape(o.shape[0], -1))
