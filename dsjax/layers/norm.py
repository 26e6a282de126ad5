"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.layers.linear import param


class RMSNorm(nnx.Module):
    """y = w * x / sqrt(mean(x^2) + eps) over the last axis (Zhang & Sennrich 2019).

    Statistics and the product with w are float32; the result is cast once to x's dtype, as in DeepSeek's own code.
    """

    def __init__(self, width: int, eps: float):
        self.weight = param((width,), jnp.float32)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * self.weight[...]).astype(x.dtype)
