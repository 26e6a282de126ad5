"""`dsjax convert`: the same weights bit by bit on any number of devices, and folders that cannot be used."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dsjax.checkpoint.load import load_weights
from dsjax.checkpoint.orbax import convert
from dsjax.checkpoint.resolve import resolve_model
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.sharding import TensorParallel, make_mesh
from tests.checkpoint.fp8_files import odd_fields, write_fp8_model, write_multiplied_out
from tests.conftest import GOLDEN
from tests.serve.commands import run_command


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An FP8 checkpoint, and what it is converted to."""
    folder = tmp_path_factory.mktemp("fp8")
    write_fp8_model(folder / "original", odd_fields("v3"))
    convert(folder / "original", folder / "converted")
    return folder / "original", folder / "converted"


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint v3, converted."""
    folder = tmp_path_factory.mktemp("v3") / "converted"
    convert(GOLDEN / "v3", folder)
    return folder


def assert_equal_weights(original: Path, converted: Path, dtype: str, tp: int) -> None:
    model = abstract_model(ModelConfig.load(converted), dtype, Ops.references(), TensorParallel(tp))
    mesh = make_mesh(tp)
    expected = load_weights(model, original, mesh)
    found = load_weights(model, converted, mesh)
    assert found.keys() == expected.keys()
    for path, leaves in expected.items():
        for leaf, wanted in zip(found[path], leaves, strict=True):
            assert (leaf.dtype, leaf.sharding) == (wanted.dtype, wanted.sharding), path
            assert np.asarray(leaf).tobytes() == np.asarray(wanted).tobytes(), path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fp8_weights_are_equal_bit_by_bit(fp8: tuple[Path, Path], tp: int):
    """Splitting over devices cuts blocks, so that scales are repeated in smaller ones."""
    assert_equal_weights(*fp8, "float32", tp)


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 4)])
def test_weights_are_equal_bit_by_bit(v3: Path, dtype: str, tp: int):
    assert_equal_weights(GOLDEN / "v3", v3, dtype, tp)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_files_stay_float32(tmp_path: Path, fp8: tuple[Path, Path], dtype: str):
    """Their weights are no bf16 numbers; a bf16 model rounds them when it loads them, as it does from the files."""
    original = write_multiplied_out(tmp_path / "original", fp8[0])
    convert(original, tmp_path / "converted")
    assert_equal_weights(original, tmp_path / "converted", dtype, 1)


def test_the_command_copies_config_and_tokenizer(tmp_path: Path):
    out = tmp_path / "converted"
    printed = run_command("convert", "demo", str(out))
    assert f"GB written to {out} in" in printed
    original = resolve_model("demo")
    assert {path.name for path in out.iterdir()} == {"orbax", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (out / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    assert resolve_model(out) == out
    assert_equal_weights(original, out, "float32", 1)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, v3: Path):
    with pytest.raises(CheckpointError, match="exists already"):
        convert(GOLDEN / "v3", tmp_path)
    assert not any(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="exists already"):
        convert(GOLDEN / "v3", v3)


def test_a_checkpoint_that_cannot_be_converted(tmp_path: Path, v3: Path):
    """It is refused before anything is written."""
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors weights"):
        convert(v3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_conversion(tmp_path: Path, v3: Path):
    partial = shutil.copytree(v3, tmp_path / "partial")
    (partial / "config.json").unlink()
    with pytest.raises(CheckpointError, match="`dsjax convert` that was interrupted left"):
        resolve_model(partial)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's own threads
def test_missing_and_damaged_parts(tmp_path: Path, v3: Path):
    model = abstract_model(ModelConfig.load(v3), "float32", Ops.references())
    lacking = shutil.copytree(v3, tmp_path / "lacking")
    shutil.rmtree(lacking / "orbax" / "head")
    with pytest.raises(CheckpointError, match=r"2 missing: head\.lm_head\.weight, head\.norm\.weight"):
        load_weights(model, lacking, make_mesh(1))
    damaged = shutil.copytree(v3, tmp_path / "damaged")
    for path in (damaged / "orbax" / "layers.1" / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"layers\.1 is damaged; convert the checkpoint again"):
        load_weights(model, damaged, make_mesh(1))


def test_another_config(tmp_path: Path, v3: Path):
    model = abstract_model(ModelConfig.load(GOLDEN / "v2"), "float32", Ops.references())
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json"):
        load_weights(model, v3, make_mesh(1))
