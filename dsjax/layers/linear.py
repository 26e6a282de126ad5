"""Linear projections without bias.

Activations are not quantised: a BlockScaled weight is multiplied out to x's dtype and products are summed in float32.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.quantization import dense


def param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """A weight of the abstract model. Models are built under `nnx.eval_shape`, so nothing is allocated."""
    return nnx.Param(jnp.zeros(shape, dtype))


def contract_last(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x [T, in] times weight [..., in] over `in`: [T, ...] as `dtype`, by default x's.

    GPUs accumulate in float32 either way; a bf16 result is rounded once.
    """
    return lax.dot_general(x, weight, (((1,), (weight.ndim - 1,)), ((), ())), preferred_element_type=dtype)


class Linear(nnx.Module):
    """y = x W^T with W [*out, in]: x [T, in] -> [T, *out] in x's dtype."""

    def __init__(self, out: int | tuple[int, ...], in_features: int, dtype: jnp.dtype):
        out = (out,) if isinstance(out, int) else out
        self.weight = param((*out, in_features), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = dense(self.weight[...], x.dtype)
        *out, in_features = weight.shape
        flat = contract_last(x, weight.reshape(math.prod(out), in_features))
        return flat.reshape(x.shape[0], *out)
