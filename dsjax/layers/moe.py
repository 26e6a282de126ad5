"""Mixture of experts: the router and the experts block (DeepSeekMoE, Dai et al. 2024; DeepSeek-V3, section 2.1.2)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config import ModelConfig, RouterConfig
from dsjax.layers.linear import param
from dsjax.layers.mlp import SwiGLU
from dsjax.pallas_kernels import Ops
from dsjax.sharding import TensorParallel


class Router(nnx.Module):
    """Chooses each token's experts: h [T, D] -> ids int32 [T, K] (-1 for pad tokens), weights float32 [T, K]."""

    def __init__(self, config: RouterConfig, hidden_size: int, dtype: jnp.dtype, ops: Ops):
        self.weight = param((config.num_experts, hidden_size), dtype)
        self.bias = param((config.num_experts,), jnp.float32) if config.has_bias else None
        self.config, self.ops = config, ops

    def __call__(self, h: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        bias = None if self.bias is None else self.bias[...]
        return self.ops.router(h, self.weight[...], bias, valid, config=self.config)


class MoE(nnx.Module):
    """Last piece of an MoE layer: routed and shared experts of h [T, D], put into the residual stream x by `leave`.

    `expert_ids` int32 [T, K] are global (-1: none) and `expert_weights` float32 [T, K] their weights. Each device
    computes the experts that it holds.
    """

    gives = ("x",)

    def __init__(self, config: ModelConfig, leave: Callable, dtype: jnp.dtype, ops: Ops, tp: TensorParallel):
        hidden, moe = config.hidden_size, config.moe
        experts = moe.router.num_experts
        self.experts_gate_up = param((experts, 2, moe.expert_width, hidden), dtype)
        self.experts_down = param((experts, hidden, moe.expert_width), dtype)
        self.shared = SwiGLU(hidden, moe.shared_width, dtype) if moe.shared_width else None
        self.leave, self.ops, self.tp = leave, ops, tp

    def __call__(self, x: jax.Array, h: jax.Array, mix, expert_ids: jax.Array, expert_weights: jax.Array):
        gate_up, down = self.experts_gate_up[...], self.experts_down[...]
        y = self.ops.experts(h, gate_up, down, self._local(expert_ids, gate_up.shape[0]), expert_weights)
        if self.shared is not None:
            y = y + self.shared(h)
        return (self.leave(x, self.tp.sum(y.astype(h.dtype)), mix),)

    def _local(self, expert_ids: jax.Array, num_local: int) -> jax.Array:
        """Expert ids counted from this device's first expert; -1 for experts that other devices hold."""
        local = expert_ids - self.tp.offset(num_local)
        return jnp.where((expert_ids >= 0) & (local >= 0) & (local < num_local), local, -1)
