"""Placing weights: from files to device memory, several weights at a time, with little host memory."""

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsjax.checkpoint.arranged import Arranged

WEIGHTS_AT_ONCE, READERS = 4, 8  # threads
ALIGNMENT = 64  # bytes; JAX takes aligned host memory as a CPU device's array without copying it


class Placing:
    """Reads weights and places them on devices, on threads of its own.

    Host memory for weights on their way is at most `host_bytes`, or one device's share of one weight if that is larger.
    As a context manager it waits for all of them, or drops those that have not begun if an exception leaves it.
    """

    def __init__(self, host_bytes: float):
        self._weights, self._readers = ThreadPoolExecutor(WEIGHTS_AT_ONCE), ThreadPoolExecutor(READERS)
        self._room = _Room(host_bytes)

    def begin(self, arrange: Callable[[], Arranged], aval: Any, sharding: NamedSharding) -> Future[jax.Array]:
        """The weight that `arrange` gives, in `aval`'s shape and dtype on the devices of `sharding`, once it is there.

        `arrange` is called when it is the weight's turn.
        """
        return self._weights.submit(self._place, arrange, aval, sharding)

    def __enter__(self) -> "Placing":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._weights.shutdown(cancel_futures=kind is not None)
        self._readers.shutdown()

    def _place(self, arrange: Callable[[], Arranged], aval: Any, sharding: NamedSharding) -> jax.Array:
        arranged = arrange()
        holders = defaultdict(list)  # of the same share
        for device, index in sharding.addressable_devices_indices_map(aval.shape).items():
            holders[index].append(device)
        share = jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype)
        placed = []
        for index, devices in holders.items():
            with self._room.taken(math.prod(share.shape) * share.dtype.itemsize):
                placed += self._place_share(arranged, index, share, devices)
        return jax.make_array_from_single_device_arrays(aval.shape, sharding, placed)

    def _place_share(self, arranged: Arranged, index: Any, aval: Any, devices: list[Any]) -> list[jax.Array]:
        """The weight at `index`, of `aval`'s shape and dtype, on each of `devices`."""
        share = _aligned(aval.shape, aval.dtype)
        for _ in self._readers.map(lambda read: read(), arranged.reads(index, share)):
            pass
        placed = jax.block_until_ready([jax.device_put(share, device) for device in devices])
        gc.collect(0)  # JAX lets go of memory that it was given when Python collects garbage
        return placed


class _Room:
    """A number of bytes that may be in use at once. Who wants more than that has it alone."""

    def __init__(self, limit: float):
        self._limit, self._used, self._changed = limit, 0, Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Wait until there is room for `count` bytes, and hold it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + count <= self._limit)
            self._used += count
        try:
            yield
        finally:
            with self._changed:
                self._used -= count
                self._changed.notify_all()


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array, at an address that is a multiple of ALIGNMENT."""
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + count].view(dtype).reshape(shape)
