"""The Flax model: embedding, decoder layers, head. It composes dsjax.layers and holds no mathematics of its own.

A model is abstract (`abstract_model` allocates nothing); its weights live outside, as flat leaves per piece, and are
handed to the compiled segments as arguments.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.cache.kinds import PageKind, PoolSpec
from dsjax.checkpoint.blocks import quantize
from dsjax.checkpoint.names import weight_sources
from dsjax.config import ModelConfig, RopeConfig
from dsjax.layers.attention_output import AttentionOutput
from dsjax.layers.embedding import Embedding, Head
from dsjax.layers.mla import LATENT, ROPE, HeadsProjection, MLAAttention, MLAInput
from dsjax.layers.mlp import DenseFFN
from dsjax.layers.moe import MoE, Router
from dsjax.layers.residual import PreNorm
from dsjax.pallas_kernels import Ops
from dsjax.sharding import ONE_DEVICE, TensorParallel


class DecoderLayer(nnx.Module):
    """One transformer block, as the pieces that run one after the other (`PIECES` names the attributes).

    `places`: per page kind, which layer of its pools is this one's.
    """

    PIECES = ("attn_in", "attention", "attn_out", "ffn")

    def __init__(self, config: ModelConfig, index: int, dtype: jnp.dtype, ops: Ops, tp: TensorParallel):
        hidden, routed = config.hidden_size, index >= config.num_dense_layers
        router = Router(config.moe.router, hidden, dtype, ops) if routed else None
        self.places = ((LATENT, index),)
        self.attn_in = MLAInput(config, dtype)
        self.attention = MLAAttention(config.attention, dtype, ops)
        self.attn_out = AttentionOutput(HeadsProjection(config, dtype), PreNorm(hidden, config.norm_eps), router, tp)
        if routed:
            self.ffn = MoE(config, PreNorm.leave, dtype, ops, tp)
        else:
            self.ffn = DenseFFN(hidden, config.dense_width, PreNorm.leave, dtype, tp)


@dataclass(frozen=True)
class PlanDecode:
    """Makes the plan that decoding attention wants once a step, by `plan` of MLADecode.

    `queries`: per row and device. `num_sms`: of each device.
    """

    plan: Callable
    queries: int
    num_sms: int

    def __call__(self, page_tables: dict[str, jax.Array], rows: jax.Array, lengths: jax.Array) -> Any:
        """Page tables by kind, rows and lengths int32 [B] of decode entries -> DecodeRows.plan."""
        return self.plan(page_tables[LATENT], rows, lengths, queries=self.queries, num_sms=self.num_sms)


class Model(nnx.Module):
    """A DeepSeek language model of any supported generation.

    `dtype` is that of activations, and of weights that are not FP8.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, ops: Ops, tp: TensorParallel):
        self.embed = Embedding(config, dtype, tp)
        self.layers = nnx.List(DecoderLayer(config, i, dtype, ops, tp) for i in range(config.num_layers))
        self.head = Head(config, dtype, tp)
        self.config, self.dtype, self.ops, self.tp = config, dtype, ops, tp

    @property
    def ropes(self) -> tuple[tuple[str, RopeConfig], ...]:
        """Rotary tables by name."""
        return ((ROPE, self.config.attention.rope),)

    @property
    def page_kinds(self) -> tuple[PageKind, ...]:
        """What the cache holds per token."""
        pool = PoolSpec(LATENT, self.config.num_layers, self.config.attention.latent_width, self.dtype)
        return (PageKind(LATENT, (pool,)),)

    @property
    def plan_decode(self) -> "PlanDecode":
        """What makes the plan of decoding attention, equal for equal models."""
        heads = self.config.attention.num_heads // self.tp.size  # of each device
        return PlanDecode(self.ops.mla_decode.plan, heads, self.ops.num_sms)

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Shape of one token's row between body and tail."""
        return (self.config.hidden_size,)

    def pieces(self) -> Iterator[tuple[str, nnx.Module]]:
        """Path and module of every piece that has weights, in the order in which they run."""
        yield "embed", self.embed
        for index, layer in enumerate(self.layers):
            for name in layer.PIECES:
                yield f"layers.{index}.{name}", getattr(layer, name)
        yield "head", self.head


def abstract_model(config: ModelConfig, dtype: Any, ops: Ops, tp: TensorParallel = ONE_DEVICE) -> Model:
    """The model with jax.ShapeDtypeStruct leaves of global shape, FP8 weights as BlockScaled.

    Raises OptionError if `tp` does not divide it.
    """
    tp.check(config)
    model = nnx.eval_shape(partial(Model, config, jnp.dtype(dtype), ops, tp))
    if config.fp8 is not None:
        quantize(model.pieces(), weight_sources(config), tp.size)
    return model
