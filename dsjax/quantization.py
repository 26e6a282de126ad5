"""Block-scaled FP8 weights: the one form of quantised weight that layers and operations see.

A layer holds its weight as an array or as a BlockScaled; `dense` makes an array of either where it is needed, so models
in bf16 and in FP8 are the same layers with other weights.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

VALUES_DTYPE = jnp.dtype(jnp.float8_e4m3fn)
SCALES_DTYPE = jnp.dtype(jnp.float32)
LARGEST_BLOCK = 128  # checkpoints scale blocks of 128 x 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
    """A weight [..., out, in]: w[..., i, j] = values[..., i, j] * scales[..., i // rows, j // columns].

    `values` are float8 e4m3, `scales` float32 [..., ceil(out / rows), ceil(in / columns)], `block` is (rows, columns).
    It is (128, 128) for published models; where joining, splitting or sharding cuts through the checkpoint's blocks, it
    is what still divides the pieces. Scales take 4 / (rows * columns) bytes per value. Leading axes may be sliced.
    """

    values: Any
    scales: Any
    block: tuple[int, int] = field(metadata={"static": True})

    @classmethod
    def abstract(cls, shape: tuple[int, ...], block: tuple[int, int]) -> "BlockScaled":
        """A weight of `shape` without numbers."""
        *leading, rows, columns = shape
        scales = (*leading, -(-rows // block[0]), -(-columns // block[1]))
        return cls(jax.ShapeDtypeStruct(shape, VALUES_DTYPE), jax.ShapeDtypeStruct(scales, SCALES_DTYPE), block)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> "BlockScaled":
        """The weights at `index` of the leading axes.

        The barrier ties the values to the index: in a loop, XLA for CPUs would otherwise convert them all beforehand.
        """
        if index is ...:
            return self
        values, index = lax.optimization_barrier((self.values, index))
        return BlockScaled(values[index], self.scales[index], self.block)


Weight = jax.Array | BlockScaled


def dense(weight: Weight, dtype: Any) -> jax.Array:
    """`weight` as an array: a BlockScaled multiplied out in float32 and rounded once to `dtype`, an array as it is."""
    if not isinstance(weight, BlockScaled):
        return weight
    (rows, columns), (*_, out, in_features) = weight.block, weight.shape
    scales = jnp.repeat(jnp.repeat(weight.scales, rows, axis=-2), columns, axis=-1)[..., :out, :in_features]
    return (weight.values.astype(scales.dtype) * scales).astype(dtype)
