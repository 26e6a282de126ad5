"""From a checkpoint folder to device arrays, checked as a whole before anything is read."""

import math
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsjax.checkpoint.arranged import Arranged
from dsjax.checkpoint.names import Source, checkpoint_tensors, is_ignored, weight_sources
from dsjax.checkpoint.placing import Placing
from dsjax.checkpoint.resolve import CONVERTED
from dsjax.checkpoint.safetensors import StoredTensor, listing, open_folder
from dsjax.checkpoint.weights import Weights, by_piece, each_weight
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError
from dsjax.model import Model
from dsjax.quantization import VALUES_DTYPE, BlockScaled, Weight

HOST_SHARE = 1.25  # host memory for weights on their way to devices, in sizes of the largest weight
FP8_DEVIATION = 64.0  # of random e4m3 values, whose largest is 448


def load_weights(model: Model, folder: Path, mesh: Mesh) -> Weights:
    """The weights of the checkpoint in `folder`, arranged for `model` and placed on `mesh` in the model's dtypes.

    Raises CheckpointError that lists every missing, unknown, misshapen or truncated tensor.
    """
    if (folder / CONVERTED).is_dir():
        from dsjax.checkpoint.orbax import restore_weights  # importing Orbax takes seconds

        return restore_weights(model, folder, mesh)
    stored = open_checked(model.config, folder)
    weights = read_weights(list(model.pieces()), weight_sources(model.config), stored, mesh)
    return by_piece(model.pieces(), weights)


def open_checked(config: ModelConfig, folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors files in `folder`. CheckpointError unless they are what `config` needs."""
    stored = open_folder(folder)
    check_tensors(config, stored, str(folder))
    return stored


def read_weights(
    pieces: Sequence[tuple[str, nnx.Module]],
    sources: Mapping[str, Source],
    stored: Mapping[str, StoredTensor],
    mesh: Mesh,
) -> dict[str, Weight]:
    """The weights of `pieces` on `mesh`, by full path.

    What a device needs is read into host memory of its own shape and handed over. At most HOST_SHARE of the largest
    weight is on its way at a time.
    """
    leaves = [leaf for _, piece in pieces for leaf in jax.tree.leaves(nnx.state(piece))]
    largest_bytes = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    with Placing(HOST_SHARE * largest_bytes) as placing:

        def begin(path: str, weight: Any, sharding: NamedSharding) -> Any:
            source = sources[path]
            values = partial(Arranged.values, source, stored)
            if not isinstance(weight, BlockScaled):
                return placing.begin(values, weight, sharding)
            scales = partial(Arranged.scales, source, stored, weight.block)
            return BlockScaled(
                placing.begin(values, weight.values, sharding),
                placing.begin(scales, weight.scales, sharding),
                weight.block,
            )

        return jax.tree.map(Future.result, each_weight(pieces, mesh, begin))


def random_weights(model: Model, mesh: Mesh, seed: int = 0) -> Weights:
    """Random weights of the right shapes ("dummy"): norms are 1, biases 0, matrices keep the scale of their input.

    Independent random router rows spread tokens evenly over the experts. FP8 weights fill the range of e4m3, as
    quantising by the largest value of a block does.
    """

    def make(path: str, weight: Any, sharding: NamedSharding) -> Any:
        if len(weight.shape) == 1:
            value = jnp.zeros if path.endswith("bias") else jnp.ones
            return jax.device_put(value(weight.shape, weight.dtype), sharding)
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), zlib.crc32(path.encode()))
        deviation = weight.shape[-1] ** -0.5
        if not isinstance(weight, BlockScaled):
            return _normal(weight.shape, weight.dtype, deviation, sharding)(key)
        values = _normal(weight.shape, VALUES_DTYPE, FP8_DEVIATION, sharding)(key)
        scales = jnp.full(weight.scales.shape, deviation / FP8_DEVIATION, weight.scales.dtype, device=sharding)
        return BlockScaled(values, scales, weight.block)

    return by_piece(model.pieces(), each_weight(model.pieces(), mesh, make))


def check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Raise CheckpointError, naming all that is wrong at once, unless `tensors` are exactly what `config` needs."""
    expected = checkpoint_tensors(config)
    both = {name: tensor for name, tensor in expected.items() if name in tensors}
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unknown": [name for name in tensors if name not in expected and not is_ignored(config, name)],
        "of the wrong shape": [
            f"{name} {list(tensors[name].shape)} for {list(shape)}"
            for name, (shape, _) in both.items()
            if tensors[name].shape != shape
        ],
        "of the wrong dtype": [
            f"{name} {tensors[name].dtype} for {' or '.join(dtypes)}"
            for name, (_, dtypes) in both.items()
            if tensors[name].dtype.name not in dtypes
        ],
    }
    refuse(problems, where, _format_hint(config, tensors))


def refuse(problems: Mapping[str, list[str]], where: str, hint: str = "") -> None:
    """Raise CheckpointError that lists the tensors of each kind of problem in `where`, unless there are none."""
    found = [f"{len(names)} {what}: {listing(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(f"The tensors in {where} do not fit its config.json. " + ". ".join(found) + "." + hint)


def _format_hint(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """What to do if weights and config disagree on FP8 altogether."""
    has_fp8 = any(tensor.dtype == VALUES_DTYPE for tensor in tensors.values())
    if config.fp8 and not has_fp8:
        return " No tensor is FP8: if the weights were converted, remove quantization_config from config.json."
    if has_fp8 and not config.fp8:
        return " There are FP8 tensors: config.json must have the quantization_config that they were published with."
    return ""


@cache
def _normal(shape: tuple[int, ...], dtype: Any, deviation: float, sharding: NamedSharding) -> Any:
    """A function of a key: normal numbers with the given standard deviation, compiled once per shape."""
    drawn = jnp.bfloat16 if dtype == VALUES_DTYPE else dtype

    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, drawn) * jnp.asarray(deviation, drawn)).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
