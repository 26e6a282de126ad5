"""From a checkpoint folder to device arrays, checked as a whole before anything is read."""

import zlib
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsjax.checkpoint.names import checkpoint_tensors, is_ignored, weight_sources
from dsjax.checkpoint.safetensors import listing, read_folder
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError
from dsjax.model import Model
from dsjax.segments import weight_leaves
from dsjax.sharding import weight_partition

FORMATS = ("bfloat16", "float32")
Weights = dict[str, tuple[jax.Array, ...]]  # flat leaves of each piece, by the piece's path in the model


def load_weights(model: Model, folder: Path, mesh: Mesh) -> Weights:
    """The weights of the checkpoint in `folder`, arranged for `model` and placed on `mesh` in the model's dtypes.

    Raises CheckpointError that lists every missing, unknown, misshapen or truncated tensor.
    """
    tensors = read_folder(folder)
    check_tensors(model.config, tensors, str(folder))
    sources = weight_sources(model.config)

    def make(path: str, leaf: Any, sharding: NamedSharding) -> jax.Array:
        source = sources[path]
        parts = [tensors[name] for name, _ in source.tensors]
        host = np.asarray(source.arrange(parts), leaf.dtype)
        if np.shares_memory(host, parts[0]):  # on CPUs the device array would share the mapped file
            host = host.copy()
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: host[index])

    return _each_leaf(model, mesh, make)


def random_weights(model: Model, mesh: Mesh, seed: int = 0) -> Weights:
    """Random weights of the right shapes ("dummy"): norms are 1, biases 0, matrices keep the scale of their input.

    Independent random router rows spread tokens evenly over the experts.
    """

    def make(path: str, leaf: Any, sharding: NamedSharding) -> jax.Array:
        if len(leaf.shape) == 1:
            value = jnp.zeros if path.endswith("bias") else jnp.ones
            return jax.device_put(value(leaf.shape, leaf.dtype), sharding)
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), zlib.crc32(path.encode()))
        return _normal(leaf.shape, leaf.dtype, sharding)(key)

    return _each_leaf(model, mesh, make)


def check_tensors(config: ModelConfig, tensors: dict[str, np.ndarray], where: str) -> None:
    """Raise CheckpointError, naming all that is wrong at once, unless `tensors` are exactly what `config` needs."""
    if any(tensor.dtype.name.startswith("float8") for tensor in tensors.values()):
        raise CheckpointError(
            f"{where} holds FP8 weights, which this version of dsjax does not read: convert them to bf16, or use load "
            "format 'dummy' to try the model's shapes with random weights."
        )
    expected = checkpoint_tensors(config)
    both = {name: shape for name, shape in expected.items() if name in tensors}
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unknown": [name for name in tensors if name not in expected and not is_ignored(config, name)],
        "of the wrong shape": [
            f"{n} {list(tensors[n].shape)} for {list(s)}" for n, s in both.items() if tensors[n].shape != s
        ],
        "not bf16 or f32": [f"{n} {tensors[n].dtype}" for n in both if tensors[n].dtype.name not in FORMATS],
    }
    found = [f"{len(names)} {what}: {listing(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(f"The tensors in {where} do not fit its config.json. " + ". ".join(found) + ".")


@cache
def _normal(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """A function of a key: normal numbers that keep the scale of their input, compiled once per shape."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)

    return jax.jit(draw, out_shardings=sharding)


def _each_leaf(model: Model, mesh: Mesh, make) -> Weights:
    weights = {}
    for piece_path, piece in model.pieces():
        leaves = []
        for path, leaf in weight_leaves(nnx.split(piece)[1]):
            sharding = NamedSharding(mesh, weight_partition(path))
            leaves.append(make(f"{piece_path}.{path}", leaf, sharding))
        weights[piece_path] = tuple(leaves)
    return weights
