"""safetensors files: a memory-mapped reader and a writer (format: 8 bytes header length, JSON header, raw data).

The reader is our own because the safetensors package cannot give fp8 to NumPy. Tensors are views of the mapped file:
nothing is read before it is used.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsjax.errors import CheckpointError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


def read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, by name, as read-only views of the mapped file.

    Raises CheckpointError that names the file, and every tensor at fault, if it is cut short or damaged.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    header, begin = _header(path, data)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    problems = [problem for name, entry in entries.items() if (problem := _problem(name, entry, len(data) - begin))]
    if problems:
        raise CheckpointError(f"{path} cannot be used; copy it again if it is damaged. At fault: {listing(problems)}.")
    return {name: _view(entry, data[begin:]) for name, entry in entries.items()}


def _header(path: Path, data: np.ndarray) -> tuple[dict, int]:
    """The decoded header and the offset of the first data byte."""
    length = int.from_bytes(data[:8].tobytes(), "little") if len(data) >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or is cut short ({len(data)} bytes). Copy it again.")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header ({error}). Copy it again.") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header: not a JSON object. Copy it again.")
    return header, 8 + length


def _problem(name: str, entry: Any, data_bytes: int) -> str | None:
    """What is wrong with a header entry, given the bytes of data that the file really holds; None if nothing is."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return f"{name} (damaged entry {entry})"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        return f"{name} (damaged entry {entry})"
    if str(entry["dtype"]) not in DTYPES:
        return f"{name} (its format {entry['dtype']} is none that dsjax reads)"
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    if end - begin != expected:
        return f"{name} ({entry['dtype']} {shape} needs {expected} bytes, its entry says {end - begin})"
    return f"{name} (cut short: ends at byte {end} of {data_bytes})" if end > data_bytes else None


def _are_sizes(values: Any) -> bool:
    """Whether `values` is a list of integers of at least 0."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _view(entry: dict, data: np.ndarray) -> np.ndarray:
    begin, end = entry["data_offsets"]
    return data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def listing(items: list[str], limit: int = 12) -> str:
    """`items` in one line, the first `limit` of them spelled out."""
    more = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint folder: the shards that its index file lists, or else all its *.safetensors files.

    Raises CheckpointError if there are no weights, a shard or a tensor of the index is missing, or two files hold
    the same tensor.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _read_shards(folder, index)
    shards = _read_each(folder, sorted(file.name for file in folder.glob("*.safetensors")))
    if not shards:
        raise CheckpointError(
            f"{folder} holds no *.safetensors weights. Give a complete checkpoint folder, or use load format 'dummy'."
        )
    tensors: dict[str, np.ndarray] = {}
    for name, shard in shards.items():
        if twice := [tensor for tensor in shard if tensor in tensors]:
            raise CheckpointError(f"{folder / name} holds tensors that another file holds too: {listing(twice)}.")
        tensors |= shard
    return tensors


def _read_shards(folder: Path, index: Path) -> dict[str, np.ndarray]:
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(map(Path, places.values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a readable safetensors index: {error!r}.") from None
    if absent := [str(name) for name in names if not (folder / name).exists()]:
        raise CheckpointError(f"{folder} lacks {len(absent)} of {len(names)} shards: {listing(absent)}.")
    shards = _read_each(folder, list(map(str, names)))
    if lost := [name for name, shard in places.items() if name not in shards[str(Path(shard))]]:
        raise CheckpointError(f"{index} lists {len(lost)} tensors that its shards lack: {listing(lost)}.")
    return {name: shards[str(Path(shard))][name] for name, shard in places.items()}


def _read_each(folder: Path, names: list[str]) -> dict[str, dict[str, np.ndarray]]:
    """Tensors by file. The problems of all files come in one CheckpointError."""
    shards, problems = {}, []
    for name in names:
        try:
            shards[name] = read_file(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    return shards


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors` as one safetensors file."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape}
        header[name] = entry | {"data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
