"""Walking over the weights of a model: by their full paths, with their places on a mesh."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsjax.quantization import Weight
from dsjax.segments import named_weights
from dsjax.sharding import weight_partition

Pieces = Iterable[tuple[str, nnx.Module]]  # with their paths in the model
Weights = dict[str, tuple[jax.Array, ...]]  # flat leaves of each piece, by the piece's path in the model


def abstract_weights(pieces: Pieces) -> dict[str, Any]:
    """Shape and dtype of each weight, by full path; a BlockScaled of them for FP8."""
    return {
        f"{piece_path}.{path}": weight
        for piece_path, piece in pieces
        for path, weight in named_weights(nnx.state(piece))
    }


def each_weight(pieces: Pieces, mesh: Mesh, make: Callable[[str, Any, NamedSharding], Any]) -> dict[str, Any]:
    """What `make` gives for full path, abstract value and sharding of each weight of `pieces`, by path."""
    return {
        (full := f"{piece_path}.{path}"): make(full, weight, NamedSharding(mesh, weight_partition(path)))
        for piece_path, piece in pieces
        for path, weight in named_weights(nnx.state(piece))
    }


def by_piece(pieces: Pieces, weights: dict[str, Weight]) -> Weights:
    """`weights`, given by full path, as the flat leaves of each piece."""
    return {
        piece_path: tuple(
            leaf
            for path, _ in named_weights(nnx.state(piece))
            for leaf in jax.tree.leaves(weights[f"{piece_path}.{path}"])
        )
        for piece_path, piece in pieces
    }
