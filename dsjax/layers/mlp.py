"""Feed-forward blocks without routing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.activation import swiglu
from dsjax.layers.linear import Linear
from dsjax.sharding import TensorParallel


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), x [T, D] -> [T, D]; a partial sum over the devices that share `width`."""

    def __init__(self, hidden_size: int, width: int, dtype: jnp.dtype):
        self.gate_up = Linear((2, width), hidden_size, dtype)
        self.down = Linear(hidden_size, width, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up(x)
        return self.down(swiglu(gate_up[:, 0], gate_up[:, 1]))


class DenseFFN(nnx.Module):
    """Last piece of a dense layer: the MLP of h [T, D], put into the residual stream x by `leave`."""

    gives = ("x",)

    def __init__(self, hidden_size: int, width: int, leave: Callable, dtype: jnp.dtype, tp: TensorParallel):
        self.mlp = SwiGLU(hidden_size, width, dtype)
        self.leave, self.tp = leave, tp

    def __call__(self, x: jax.Array, h: jax.Array, mix):
        return (self.leave(x, self.tp.sum(self.mlp(h)), mix),)
