"""Which weights of a model are block-scaled, and in blocks of which size."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from dsjax.checkpoint.names import Source
from dsjax.quantization import LARGEST_BLOCK, BlockScaled
from dsjax.segments import named_weights
from dsjax.sharding import weight_partition

SIZES = tuple(size for size in range(LARGEST_BLOCK, 0, -1) if LARGEST_BLOCK % size == 0)


def quantize(pieces: Iterable[tuple[str, nnx.Module]], sources: Mapping[str, Source], devices: int) -> None:
    """Make the weights that `sources` says are quantised BlockScaled, in abstract `pieces` given with their paths."""
    blocks = {}  # by path and shape: weights that agree in both are arranged alike
    for piece_path, piece in pieces:
        state = nnx.state(piece)
        weights = []
        for path, weight in named_weights(state):
            source = sources[f"{piece_path}.{path}"]
            if source.quantized:
                key = path, weight.shape
                if key not in blocks:
                    blocks[key] = scale_block(source, weight.shape, weight_partition(path), devices)
                weight = BlockScaled.abstract(weight.shape, blocks[key])
            weights.append(weight)
        nnx.update(piece, jax.tree.unflatten(jax.tree.structure(state), weights))


def scale_block(source: Source, shape: tuple[int, ...], partition: PartitionSpec, devices: int) -> tuple[int, int]:
    """The largest (rows, columns) that blocks of a weight of `shape` can have.

    The rows of a block must have one scale when they are arranged, and no block may be cut by splitting over devices.
    """
    axes = [*partition, *[None] * (len(shape) - len(partition))]
    # Rows and columns per device, 0 where they are not split: the last block may be partial then.
    rows, columns = (size // devices if axis else 0 for size, axis in zip(shape[-2:], axes[-2:], strict=True))
    scale_rows = source.scale_rows()
    return (
        next(size for size in SIZES if rows % size == 0 and _equal_in_blocks(scale_rows, size)),
        next(size for size in SIZES if columns % size == 0),
    )


def _equal_in_blocks(numbers: np.ndarray, size: int) -> bool:
    """Whether `numbers` are equal in each block of `size` along the last axis."""
    firsts = np.repeat(numbers[..., ::size], size, axis=-1)
    return np.array_equal(firsts[..., : numbers.shape[-1]], numbers)
