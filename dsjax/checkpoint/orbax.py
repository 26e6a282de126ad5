"""Checkpoints converted to Orbax: weights as the model wants them, to be loaded without arranging them.

A converted checkpoint is a folder with the config and tokenizer of the original and, in CONVERTED, one Orbax checkpoint
for the embedding, each layer and the head. Its arrays are those of one device, so that the devices it is loaded on need
not be those of the conversion.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsjax.checkpoint.load import open_checked, read_weights, refuse
from dsjax.checkpoint.names import weight_sources
from dsjax.checkpoint.resolve import CONVERTED
from dsjax.checkpoint.safetensors import StoredTensor
from dsjax.checkpoint.weights import Weights, abstract_weights, by_piece, each_weight
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.quantization import BlockScaled
from dsjax.sharding import make_mesh

CHUNK_BYTES = 64 << 20  # what is read as a whole; a device's share of a weight should not need much more
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")

Parts = dict[str, list[tuple[str, nnx.Module]]]  # pieces that are saved together: "embed", "layers.0", ..., "head"


def convert(folder: Path, out: Path) -> None:
    """Write the safetensors checkpoint in `folder` to the new folder `out`, layer by layer, in the dtypes of the files.

    config.json comes last, so that a folder that has it is complete. Raises ConfigError or CheckpointError if the
    checkpoint cannot be used, or if `out` exists.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already. Give a folder that does not exist, or delete it first.")
    config = ModelConfig.load(folder)
    stored, sources = open_checked(config, folder), weight_sources(config)
    model, mesh = abstract_model(config, _dtype(stored), Ops.references()), make_mesh(1)
    (out / CONVERTED).mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        for part, pieces in _parts(model).items():
            weights = read_weights(pieces, sources, stored, mesh)
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), weights)
            checkpointer.save((out / CONVERTED / part).absolute(), weights, save_args=save_args)
            checkpointer.wait_until_finished()
            del weights  # before the next part is read
    copied = {path for pattern in COPIED for path in folder.glob(pattern) if not path.name.endswith(".index.json")}
    for path in sorted(copied, key=lambda path: path.name == "config.json"):
        shutil.copyfile(path, out / path.name)


def restore_weights(model: Model, folder: Path, mesh: Mesh) -> Weights:
    """The weights of a converted checkpoint, placed on `mesh` in the model's dtypes.

    Raises CheckpointError that lists every array that is missing, unknown or misshapen, or that says which part of the
    checkpoint is damaged.
    """
    saved_parts = _parts(abstract_model(model.config, model.dtype, Ops.references()))
    with ocp.StandardCheckpointer() as checkpointer:
        _check(checkpointer, saved_parts, folder)
        weights = {}
        for part, pieces in _parts(model).items():
            targets = each_weight(saved_parts[part], mesh, _target)
            restored = _restore(checkpointer, folder / CONVERTED / part, targets)
            weights |= each_weight(pieces, mesh, lambda path, *place, found=restored: _fitted(found[path], *place))
    return by_piece(model.pieces(), weights)


def _dtype(stored: Mapping[str, StoredTensor]) -> str:
    """float32 if any matrix is, beside scales; else bfloat16."""
    plain = [tensor for name, tensor in stored.items() if not name.endswith("_scale_inv") and len(tensor.shape) > 1]
    return "float32" if any(tensor.dtype == np.float32 for tensor in plain) else "bfloat16"


def _parts(model: Model) -> Parts:
    parts: Parts = {}
    for path, piece in model.pieces():
        parts.setdefault(path.rpartition(".")[0] or path, []).append((path, piece))
    return parts


def _target(path: str, weight: Any, sharding: NamedSharding) -> Any:
    """What Orbax shall restore: values on their devices, scales on the host."""
    if not isinstance(weight, BlockScaled):
        return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)
    values = jax.ShapeDtypeStruct(weight.shape, weight.values.dtype, sharding=sharding)
    return BlockScaled(values, np.empty(weight.scales.shape, weight.scales.dtype), weight.block)


def _fitted(restored: Any, weight: Any, sharding: NamedSharding) -> Any:
    """`restored` as the model wants it: scales in the blocks of `weight`, on their devices."""
    if not isinstance(weight, BlockScaled):
        return restored
    rows, columns = (
        np.arange(count) * wanted // saved
        for count, wanted, saved in zip(weight.scales.shape[-2:], weight.block, restored.block, strict=True)
    )
    host = restored.scales[..., rows[:, None], columns]
    scales = jax.make_array_from_callback(weight.scales.shape, sharding, lambda index: host[index])
    return BlockScaled(restored.values, scales, weight.block)


def _restore(checkpointer: ocp.StandardCheckpointer, path: Path, targets: dict[str, Any]) -> dict[str, Any]:
    try:
        return checkpointer.restore(path.absolute(), targets)
    except jax.errors.JaxRuntimeError:  # the device's, which is not the checkpoint's fault
        raise
    except Exception as error:  # Orbax raises no kind of its own
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"{path} is damaged; convert the checkpoint again. Orbax says: {reason}") from error


def _check(checkpointer: ocp.StandardCheckpointer, parts: Parts, folder: Path) -> None:
    """Raise CheckpointError unless the converted checkpoint in `folder` has exactly the arrays of `parts`."""
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for part, pieces in parts.items():
        expected |= _shapes(abstract_weights(pieces))
        path = (folder / CONVERTED / part).absolute()
        metadata = checkpointer.metadata(path).item_metadata if path.is_dir() else None
        found |= _shapes(dict(metadata.tree)) if metadata is not None else {}
    problems = {
        "missing": [name for name in expected if name not in found],
        "unknown": [name for name in found if name not in expected],
        "of the wrong shape": [
            f"{name} {list(found[name])} for {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
    }
    refuse(problems, str(folder))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of `tree`, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(getattr(key, "key", None) or key.name) for key in path): leaf.shape for path, leaf in leaves}
