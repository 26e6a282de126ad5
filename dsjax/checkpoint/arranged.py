"""Weights as rows and columns of checkpoint tensors, read in the order in which the model wants them."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from dsjax.checkpoint.names import Source
from dsjax.checkpoint.safetensors import StoredTensor
from dsjax.quantization import LARGEST_BLOCK

CHUNK_BYTES = 8 << 20  # read at once


@dataclass(frozen=True)
class Arranged:
    """A weight that stands in `tensors`, all of one row width, and has not been read.

    `rows` [..., out]: for each row of the weight its number in the tensors, counted over all of them. `columns` [in]:
    for each column of the weight its number in the tensors. Tensors of one axis have rows of one column.
    """

    tensors: tuple[StoredTensor, ...]
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def values(cls, source: Source, stored: Mapping[str, StoredTensor]) -> "Arranged":
        """The weight of `source`, its FP8 values if it is quantised."""
        tensors = tuple(stored[name] for name, _ in source.tensors)
        return cls(tensors, source.rows(), np.arange(_width(tensors[0])))

    @classmethod
    def scales(cls, source: Source, stored: Mapping[str, StoredTensor], block: tuple[int, int]) -> "Arranged":
        """The scales of a quantised weight, one per `block` (rows, columns)."""
        rows, columns = block
        tensors = tuple(stored[name] for name, _ in source.scales)
        width = source.tensors[0][1][-1]
        return cls(tensors, source.scale_rows()[..., ::rows], np.arange(0, width, columns) // LARGEST_BLOCK)

    def reads(self, index: tuple[slice, ...], out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Calls, for any thread in any order, that together fill `out` with the weight at `index`, in out's dtype."""
        rows = self.rows[index[: self.rows.ndim]].reshape(-1)
        columns = self.columns[index[self.rows.ndim]] if len(index) > self.rows.ndim else self.columns
        out = out.reshape(len(rows), len(columns))
        starts = np.cumsum([0, *(tensor.shape[0] for tensor in self.tensors)])
        owners = np.searchsorted(starts, rows, side="right") - 1
        for begin, end in self._stretches(owners):
            owner = owners[begin]
            yield partial(_read, self.tensors[owner], rows[begin:end] - starts[owner], columns, out[begin:end])

    def _stretches(self, owners: np.ndarray) -> Iterator[tuple[int, int]]:
        """Begin and end of stretches of rows from one tensor, of about CHUNK_BYTES."""
        length = max(CHUNK_BYTES // (_width(self.tensors[0]) * self.tensors[0].dtype.itemsize), 1)
        changes = np.flatnonzero(np.diff(owners)) + 1
        for begin, end in pairwise([0, *changes.tolist(), len(owners)]):
            for first in range(begin, end, length):
                yield first, min(first + length, end)


def _read(tensor: StoredTensor, rows: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    """Fill out [rows, columns] with those rows and columns of `tensor`, straight from the file where it can."""
    first, last, width = int(rows.min()), int(rows.max()), _width(tensor)
    run, everything = np.arange(first, last + 1), np.arange(width)
    in_order = np.array_equal(rows, run)
    if in_order and np.array_equal(columns, everything) and out.dtype == tensor.dtype:
        tensor.read_rows(first, out)
        return
    block = np.empty((last + 1 - first, width), tensor.dtype)
    tensor.read_rows(first, block)
    block = block[:, _as_slice(columns)]
    out[...] = block if in_order else block[rows - first]


def _as_slice(numbers: np.ndarray) -> Any:
    """Rising consecutive `numbers` as a slice, which NumPy indexes without copying; others as they are."""
    first, count = int(numbers[0]), len(numbers)
    return slice(first, first + count) if np.array_equal(numbers, np.arange(first, first + count)) else numbers


def _width(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape[1:])
