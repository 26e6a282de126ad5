"""The safetensors reader and writer: round trips of every dtype, shards, and damaged files."""

import json
import math

import numpy as np
import pytest

from dsjax.checkpoint.safetensors import DTYPES, open_folder, read_file, write_file
from dsjax.errors import CheckpointError


def sample(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    raw = np.random.default_rng(0).integers(0, 100, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: np.ndarray) -> bytes:
    return tensor.tobytes()


def test_every_dtype_survives_a_round_trip(tmp_path):
    tensors = {name: sample(dtype, (3, 5)) for name, dtype in DTYPES.items()} | {"scalar": np.array(3, np.float32)}
    write_file(tmp_path / "t.safetensors", tensors)
    read = read_file(tmp_path / "t.safetensors")
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(read[name]) == bits(tensor)


def test_a_file_of_the_reference_implementation():
    """tests/golden/v3 was written by the safetensors package."""
    from tests.conftest import GOLDEN

    tensors = read_file(GOLDEN / "v3" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (256, 64)
    assert tensors["model.embed_tokens.weight"].dtype.name == "bfloat16"
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == np.float32
    np.testing.assert_allclose(tensors["model.norm.weight"].astype(np.float32).mean(), 1, atol=0.1)


def make_shards(folder, lost: str | None = None) -> None:
    tensors = {name: np.full((2, 2), i, np.float32) for i, name in enumerate("abc")}
    write_file(folder / "model-1.safetensors", {"a": tensors["a"]})
    write_file(folder / "model-2.safetensors", {n: tensors[n] for n in "bc" if n != lost})
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards_are_joined(tmp_path):
    make_shards(tmp_path)
    assert {name: tensor.read()[0, 0] for name, tensor in open_folder(tmp_path).items()} == {"a": 0, "b": 1, "c": 2}


def test_missing_shard(tmp_path):
    make_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 shards: model-2\.safetensors"):
        open_folder(tmp_path)


def test_tensor_missing_from_its_shard(tmp_path):
    make_shards(tmp_path, lost="c")
    with pytest.raises(CheckpointError, match="lists 1 tensors that its shards lack: c"):
        open_folder(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": 3}}'])
def test_unreadable_index(tmp_path, index: str):
    make_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="not a readable safetensors index"):
        open_folder(tmp_path)


def test_all_cut_tensors_of_all_shards_are_listed(tmp_path):
    make_shards(tmp_path)
    for shard in ("model-1.safetensors", "model-2.safetensors"):
        data = (tmp_path / shard).read_bytes()
        (tmp_path / shard).write_bytes(data[:-10])
    with pytest.raises(CheckpointError) as error:
        open_folder(tmp_path)
    message = str(error.value)
    assert all(
        part in message for part in ("model-1.safetensors", "model-2.safetensors", "a (cut short", "c (cut short")
    )


@pytest.mark.parametrize("keep", [0, 5, 8, 20])
def test_cut_header(tmp_path, keep: int):
    path = tmp_path / "t.safetensors"
    write_file(path, {"a": np.zeros((4, 4), np.float32)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        read_file(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        7,
    ],
)
def test_bad_entry_is_named(tmp_path, entry):
    header = json.dumps({"good": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "bad": entry}).encode()
    (tmp_path / "t.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="At fault: bad"):
        read_file(tmp_path / "t.safetensors")


def test_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors weights"):
        open_folder(tmp_path)


def test_a_format_that_is_not_read_is_not_called_damage(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "t.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(CheckpointError, match=r"a \(its format F8_E5M2 is none that dsjax reads\)"):
        read_file(tmp_path / "t.safetensors")


def test_shards_in_subfolders_and_tensors_that_stand_twice(tmp_path):
    (tmp_path / "sub").mkdir()
    write_file(tmp_path / "sub" / "a.safetensors", {"a": np.ones(2, np.float32)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "sub/a.safetensors"}}))
    assert open_folder(tmp_path)["a"].read().tolist() == [1, 1]
    index.unlink()
    for name in ("x", "y"):
        write_file(tmp_path / f"{name}.safetensors", {"a": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"y\.safetensors holds tensors that another file holds too: a"):
        open_folder(tmp_path)
