"""Reading weights to devices: any rows and columns, little host memory, errors that come through."""

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsjax.checkpoint import arranged, placing
from dsjax.checkpoint.arranged import Arranged
from dsjax.checkpoint.load import load_weights
from dsjax.checkpoint.names import checkpoint_tensors
from dsjax.checkpoint.placing import Placing
from dsjax.checkpoint.safetensors import DTYPE_NAMES, open_file, open_folder, write_file
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.sharding import TP, make_mesh
from tests.checkpoint.fp8_files import odd_fields
from tests.checkpoint.test_published_files import write_sparse


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranged, "CHUNK_BYTES", 100)


def read(weight: Arranged, index: tuple[slice, ...], shape: tuple[int, ...], dtype: type) -> np.ndarray:
    out = np.empty(shape, dtype)
    for call in reversed(list(weight.reads(index, out))):
        call()
    return out


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_any_rows_and_columns_of_several_tensors(tmp_path: Path, dtype: type):
    rng = np.random.default_rng(0)
    parts = {name: rng.normal(size=(rows, 24)).astype(np.float32) for name, rows in (("a", 7), ("b", 1), ("c", 40))}
    write_file(tmp_path / "t.safetensors", parts)
    stored = tuple(open_file(tmp_path / "t.safetensors").values())
    whole = np.concatenate(list(parts.values()))
    for rows, columns in (
        (np.arange(48).reshape(4, 12), np.arange(24)),
        (rng.permutation(48).reshape(2, 24), np.arange(24)),
        (rng.integers(0, 48, (3, 5)), rng.integers(0, 24, 11)),
        (np.arange(48)[:, None], np.arange(3, 9)),
    ):
        expected = whole[rows][..., columns].astype(dtype)
        weight = Arranged(stored, rows, columns)
        for index in (
            (slice(None),) * 3,
            (slice(1, 2), slice(None), slice(2, 5)),
            (slice(0, 2), slice(0, 1), slice(4)),
        ):
            cut = expected[index]
            np.testing.assert_array_equal(read(weight, index, cut.shape, dtype), cut)


def test_tensors_of_one_axis(tmp_path: Path):
    write_file(tmp_path / "t.safetensors", {"norm": np.arange(10, dtype=np.float32)})
    weight = Arranged(tuple(open_file(tmp_path / "t.safetensors").values()), np.arange(10)[::-1], np.arange(1))
    assert read(weight, (slice(2, 5),), (3,), np.float32).tolist() == [7, 6, 5]


def many_experts(folder: Path, **fields) -> tuple[Model, int]:
    """An FP8 model without data whose weights come to several times the largest; the model and that one's bytes."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 16, "num_hidden_layers": 5}
    fields = odd_fields("v3") | sizes | fields
    config = ModelConfig.from_fields(fields)
    names = {dtype.name: name for dtype, name in DTYPE_NAMES.items()}
    entries = {name: (names[t.dtypes[0]], t.shape) for name, t in checkpoint_tensors(config).items()}
    write_sparse(folder, entries, shards=4)
    return abstract_model(config, "bfloat16", Ops.references()), 16 * 2 * 512 * 512


def traced_peak(action: Callable[[], object]) -> tuple[int, object]:
    """Most bytes that `action` had allocated in Python and NumPy at a time, and what it returned."""
    tracemalloc.start()
    try:
        result = action()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_host_memory_is_the_arrays_alone_on_cpus(tmp_path: Path):
    """Files are read straight into the memory of the device arrays."""
    model, largest = many_experts(tmp_path)
    peak, weights = traced_peak(lambda: load_weights(model, tmp_path, make_mesh(1)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert total > 6 * largest
    assert peak - total < 0.5 * largest


def test_host_memory_is_bounded_where_devices_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """JAX copies memory that is not aligned, as it does for GPUs: what is traced is then on its way to a device."""

    def misaligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        count = math.prod(shape) * dtype.itemsize
        memory = np.empty(count + 128, np.uint8)
        begin = -memory.ctypes.data % 64 + 8
        return memory[begin : begin + count].view(dtype).reshape(shape)

    monkeypatch.setattr(placing, "_aligned", misaligned)
    monkeypatch.setattr(arranged, "CHUNK_BYTES", 1 << 18)
    model, largest = many_experts(tmp_path)
    peak, weights = traced_peak(lambda: load_weights(model, tmp_path, make_mesh(1)))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) > 6 * largest
    assert largest < peak < 1.5 * largest


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    """The first error ends loading: what has not begun is dropped, nothing hangs."""
    write_file(tmp_path / "model.safetensors", {"a": np.zeros((64, 64), np.float32)})
    tensor = open_folder(tmp_path)["a"]
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-5])
    weight = Arranged((tensor,), np.arange(64), np.arange(64))
    sharding = NamedSharding(make_mesh(2), PartitionSpec(TP))
    aval = jax.ShapeDtypeStruct((64, 64), np.float32)
    futures = []

    def load() -> None:
        with Placing(1) as places:
            futures.extend(places.begin(lambda: weight, aval, sharding) for _ in range(100))
            futures[0].result()

    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        load()
    assert any(future.cancelled() for future in futures)
