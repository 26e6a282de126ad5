"""From a checkpoint folder to device arrays, checked as a whole before anything is read."""

import zlib
from functools import partial
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
        arranged = source.arrange([tensors[name] for name, _ in source.tensors])
        host = np.array(arranged, leaf.dtype)  # a copy: device arrays on CPUs would share the mapped file
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
        return jax.jit(partial(_scaled_normal, leaf.shape, leaf.dtype), out_shardings=sharding)(key)

    return _each_leaf(model, mesh, make)


def check_tensors(config: ModelConfig, tensors: dict[str, np.ndarray], where: str) -> None:
    """Raise CheckpointError, naming all that is wrong at once, unless `tensors` are exactly what `config` needs."""
    expected = checkpoint_tensors(config)
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected and not is_ignored(config, name)]
    both = {name: shape for name, shape in expected.items() if name in tensors}
    misshapen = [f"{n} {list(tensors[n].shape)} for {list(s)}" for n, s in both.items() if tensors[n].shape != s]
    quantised = [f"{n} {tensors[n].dtype}" for n in both if tensors[n].dtype.name not in ("bfloat16", "float32")]
    problems = {
        "missing": missing,
        "unknown": unknown,
        "of the wrong shape": misshapen,
        "not bf16 or f32": quantised,
    }
    found = [f"{len(names)} {what}: {listing(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(f"The tensors in {where} do not fit its config.json. " + ". ".join(found) + ".")


def _scaled_normal(shape: tuple[int, ...], dtype: Any, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)


def _each_leaf(model: Model, mesh: Mesh, make) -> Weights:
    weights = {}
    for piece_path, piece in model.pieces():
        leaves = []
        for path, leaf in weight_leaves(nnx.split(piece)[1]):
            sharding = NamedSharding(mesh, weight_partition(path))
            leaves.append(make(f"{piece_path}.{path}", leaf, sharding))
        weights[piece_path] = tuple(leaves)
    return weights
