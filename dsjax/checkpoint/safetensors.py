"""safetensors files: a reader and a writer (format: 8 bytes header length, JSON header, raw data).

The reader is our own because the safetensors package cannot give fp8 to NumPy, and because loading reads stretches of
tensors straight into the memory where they are wanted.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in an open file, of which nothing has been read. `begin`: its first byte in the file."""

    file: FileIO
    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """The whole tensor."""
        values = np.empty(self.shape, self.dtype)
        self.read_rows(0, values if self.shape else values.reshape(1))
        return values

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """Read len(out) rows of the first axis, from row `first` on, into `out`, contiguous and of the tensor's dtype.

        Raises CheckpointError if the file ends before them.
        """
        buffer = memoryview(out.reshape(-1).view(np.uint8))
        position = self.begin + first * math.prod(self.shape[1:]) * self.dtype.itemsize
        while buffer:
            count = os.preadv(self.file.fileno(), [buffer], position)
            if not count:
                raise CheckpointError(f"{self.file.name} became shorter while it was read. Copy it again.")
            buffer, position = buffer[count:], position + count


def read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, by name. Raises CheckpointError like `open_file`."""
    return {name: tensor.read() for name, tensor in open_file(path).items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Raises CheckpointError that names the file, and every tensor at fault, if it is cut short or damaged.
    """
    try:
        file = FileIO(path)
        size = os.fstat(file.fileno()).st_size
        header, begin = _header(path, file, size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    problems = [problem for name, entry in entries.items() if (problem := _problem(name, entry, size - begin))]
    if problems:
        raise CheckpointError(f"{path} cannot be used; copy it again if it is damaged. At fault: {listing(problems)}.")
    return {
        name: StoredTensor(file, begin + entry["data_offsets"][0], DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def _header(path: Path, file: FileIO, size: int) -> tuple[dict, int]:
    """The decoded header and the offset of the first data byte."""
    length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or is cut short ({size} bytes). Copy it again.")
    try:
        header = json.loads(file.read(length))
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


def listing(items: list[str], limit: int = 12) -> str:
    """`items` in one line, the first `limit` of them spelled out."""
    more = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder: the shards that its index file lists, or else all its *.safetensors files.

    Raises CheckpointError if there are no weights, a shard or a tensor of the index is missing, or two files hold
    the same tensor.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _open_shards(folder, index)
    shards = _open_each(folder, sorted(file.name for file in folder.glob("*.safetensors")))
    if not shards:
        raise CheckpointError(
            f"{folder} holds no *.safetensors weights. Give a complete checkpoint folder, or use load format 'dummy'."
        )
    tensors: dict[str, StoredTensor] = {}
    for name, shard in shards.items():
        if twice := [tensor for tensor in shard if tensor in tensors]:
            raise CheckpointError(f"{folder / name} holds tensors that another file holds too: {listing(twice)}.")
        tensors |= shard
    return tensors


def _open_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {shard: folder / shard for shard in set(places.values())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a readable safetensors index: {error!r}.") from None
    if absent := sorted(shard for shard, path in paths.items() if not path.exists()):
        raise CheckpointError(f"{folder} lacks {len(absent)} of {len(paths)} shards: {listing(absent)}.")
    shards = _open_each(folder, sorted(paths))
    if lost := [name for name, shard in places.items() if name not in shards[shard]]:
        raise CheckpointError(f"{index} lists {len(lost)} tensors that its shards lack: {listing(lost)}.")
    return {name: shards[shard][name] for name, shard in places.items()}


def _open_each(folder: Path, names: list[str]) -> dict[str, dict[str, StoredTensor]]:
    """Tensors by file. The problems of all files come in one CheckpointError."""
    shards, problems = {}, []
    for name in names:
        try:
            shards[name] = open_file(folder / name)
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
