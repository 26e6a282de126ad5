"""Loading: the name tables, what happens to each tensor on the way, and checkpoints that do not fit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from dsjax import LLM, SamplingParams
from dsjax.checkpoint.load import Weights, load_weights, random_weights
from dsjax.checkpoint.names import checkpoint_tensors, weight_sources
from dsjax.checkpoint.safetensors import read_file, write_file
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.published import MODELS, published
from dsjax.segments import named_weights
from dsjax.sharding import make_mesh
from tests.conftest import GOLDEN, SMALL


def model_of(config: ModelConfig) -> Model:
    return abstract_model(config, "float32", Ops.references())


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_published_models_has_a_source_of_its_shape(name: str):
    config = published(name)
    sources = weight_sources(config)
    paths = set()
    for piece_path, piece in model_of(config).pieces():
        for path, weight in named_weights(nnx.state(piece)):
            source = sources[f"{piece_path}.{path}"]
            assert source.rows().shape + source.tensors[0][1][1:] == weight.shape
            paths.add(f"{piece_path}.{path}")
    assert paths == set(sources)


@pytest.mark.parametrize("case", ["v2_lite", "v2", "v3", "moonlight"])
def test_golden_files_hold_exactly_the_listed_tensors(case: str):
    tensors = read_file(GOLDEN / case / "model.safetensors")
    expected = checkpoint_tensors(ModelConfig.load(GOLDEN / case))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in expected.items()}


def named(model: Model, weights: Weights) -> dict[str, np.ndarray]:
    """Weights by their full path in the model."""
    paths = [f"{name}.{path}" for name, piece in model.pieces() for path, _ in named_weights(nnx.state(piece))]
    leaves = [leaf for piece_path, _ in model.pieces() for leaf in weights[piece_path]]
    return dict(zip(paths, map(np.asarray, leaves), strict=True))


def test_joined_stacked_split_and_permuted_weights():
    model = model_of(ModelConfig.load(GOLDEN / "v3"))
    weights = named(model, load_weights(model, GOLDEN / "v3", make_mesh(1)))
    files = read_file(GOLDEN / "v3" / "model.safetensors")
    tensors = {name: tensor.astype(np.float32) for name, tensor in files.items()}
    for expert in range(8):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        gate_up = np.stack([tensors[prefix + f"{name}_proj.weight"] for name in ("gate", "up")])
        np.testing.assert_array_equal(weights["layers.1.ffn.experts_gate_up"][expert], gate_up)
        np.testing.assert_array_equal(
            weights["layers.1.ffn.experts_down"][expert], tensors[prefix + "down_proj.weight"]
        )
    kv_b = tensors["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 32, 32)
    np.testing.assert_array_equal(weights["layers.0.attention.w_uk"], kv_b[:, :16])
    np.testing.assert_array_equal(weights["layers.0.attention.w_uv"], kv_b[:, 16:])
    kv_a = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    joined = [tensors["model.layers.0.self_attn.q_a_proj.weight"], kv_a[:32], kv_a[32::2], kv_a[33::2]]
    np.testing.assert_array_equal(weights["layers.0.attn_in.qkv_a.weight"], np.concatenate(joined))


def copy_of_v3(folder: Path, change) -> Path:
    """tests/golden/v3 with its tensors passed through `change`."""
    tensors = change(dict(read_file(GOLDEN / "v3" / "model.safetensors")))
    write_file(folder / "model.safetensors", tensors)
    shutil.copy(GOLDEN / "v3" / "config.json", folder)
    return folder


def load_error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        LLM(folder, **SMALL)
    return str(error.value)


def test_missing_unknown_and_misshapen_tensors_come_in_one_message(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.1.mlp.gate.weight"] = np.zeros((8, 63), np.float32)
        return tensors | {"model.layers.0.self_attn.k_proj.weight": np.zeros((2, 2), np.float32)}

    message = load_error(copy_of_v3(tmp_path, change))
    assert "1 missing: model.norm.weight" in message
    assert "1 unknown: model.layers.0.self_attn.k_proj.weight" in message
    assert "1 of the wrong shape: model.layers.1.mlp.gate.weight [8, 63] for [8, 64]" in message


def test_other_formats_are_named(tmp_path):
    def change(tensors):
        return tensors | {"model.norm.weight": np.ones(64, np.float16)}

    assert "1 of the wrong dtype: model.norm.weight float16 for bfloat16 or float32" in load_error(
        copy_of_v3(tmp_path, change)
    )


def test_mtp_layers_and_rotary_tables_are_ignored(tmp_path):
    def change(tensors):
        extra = {"model.layers.3.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
        return tensors | {name: np.zeros((2, 2), np.float32) for name in extra}

    model = model_of(ModelConfig.load(GOLDEN / "v3"))
    assert load_weights(model, copy_of_v3(tmp_path, change), make_mesh(1))


def test_truncated_file(tmp_path):
    folder = copy_of_v3(tmp_path, lambda tensors: tensors)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "(cut short: ends at byte" in load_error(folder)


def test_folder_without_weights_and_dummy_weights(tmp_path):
    shutil.copy(GOLDEN / "v3" / "config.json", tmp_path)
    assert "holds no *.safetensors weights" in load_error(tmp_path)
    with LLM(tmp_path, load_format="dummy", **SMALL) as llm:
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_dummy_weights_spread_tokens_over_the_experts():
    model = model_of(ModelConfig.load(GOLDEN / "v3"))
    gate = named(model, random_weights(model, make_mesh(1)))["layers.1.attn_out.router.weight"]
    h = np.random.default_rng(0).normal(size=(4000, gate.shape[1]))
    counts = np.bincount(np.argmax(h @ gate.T, axis=1), minlength=8)
    assert counts.min() > 0.5 * counts.mean()
