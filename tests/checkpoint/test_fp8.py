"""FP8 checkpoints: the same model as its weights multiplied out, whatever is joined, split, permuted or sharded."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dsjax import LLM
from dsjax.checkpoint.load import load_weights, random_weights
from dsjax.checkpoint.safetensors import read_file
from dsjax.config import ModelConfig
from dsjax.errors import CheckpointError, ConfigError
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.published import published
from dsjax.quantization import BlockScaled
from dsjax.segments import named_weights
from dsjax.sharding import TensorParallel, make_mesh
from tests.checkpoint.fp8_files import odd_fields, write_fp8_model, write_model, write_multiplied_out
from tests.conftest import SMALL
from tests.forward import forward
from tests.test_golden import TOLERANCE, logit_error

ONE_MOE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
TOKENS = np.random.default_rng(1).integers(0, 256, 70).tolist()


def model_of(config: ModelConfig, tp: int = 1, dtype: str = "float32") -> Model:
    return abstract_model(config, dtype, Ops.references(), TensorParallel(tp))


def abstract_weights(model: Model) -> dict[str, jax.ShapeDtypeStruct | BlockScaled]:
    """Weights by their full path in the model."""
    pieces = model.pieces()
    return {f"{piece}.{path}": weight for piece, module in pieces for path, weight in named_weights(nnx.state(module))}


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A V3 checkpoint in FP8, and the same multiplied out."""
    folder = tmp_path_factory.mktemp("v3")
    fp8 = write_fp8_model(folder / "fp8", odd_fields("v3"))
    return fp8, write_multiplied_out(folder / "float32", fp8)


def test_every_block_scale_counts(v3: tuple[Path, Path]):
    """What the comparisons rest on: matrices end in partial blocks along both axes, and scales differ."""
    tensors = read_file(v3[0] / "model.safetensors")
    scaled = {name: tensor for name, tensor in tensors.items() if tensor.dtype == ml_dtypes.float8_e4m3fn}
    assert len(scaled) == 2 * 5 + 3 + (3 * 8 + 3)
    for name, tensor in scaled.items():
        scales = tensors[f"{name}_scale_inv"]
        assert all(size > 128 and size % 128 for size in tensor.shape), name
        assert len(np.unique(scales)) == scales.size == np.prod([-(-size // 128) for size in tensor.shape])


def test_same_logits_as_multiplied_out(tmp_path: Path):
    """On one device, and on two in chunks and token by token through the decode body."""
    fp8 = write_fp8_model(tmp_path / "fp8", odd_fields("v3") | ONE_MOE_LAYER)
    float32 = write_multiplied_out(tmp_path / "float32", fp8)
    expected = forward(str(float32), TOKENS, ModelConfig.load(float32))
    assert logit_error(forward(str(fp8), TOKENS, ModelConfig.load(fp8)), expected) < TOLERANCE
    with LLM(fp8, tp=2, **SMALL) as llm:
        assert logit_error(llm.logits(TOKENS), expected) < TOLERANCE
        assert logit_error(llm.logits(TOKENS, 1), expected) < TOLERANCE
        leaves = llm.engine.runner.executor.weights["layers.0.ffn"]
        assert [leaf.dtype.name for leaf in leaves] == ["float8_e4m3fn", "float32"] * 4


def loaded(folder: Path, tp: int = 1) -> dict[str, np.ndarray]:
    """Weights of a checkpoint by their path in the model, as float32 arrays."""
    model = model_of(ModelConfig.load(folder), tp)
    weights = load_weights(model, folder, make_mesh(tp))
    abstract = abstract_weights(model)
    leaves = [leaf for path, _ in model.pieces() for leaf in weights[path]]
    filled = jax.tree.unflatten(jax.tree.structure(list(abstract.values())), leaves)
    return {path: multiplied_out(weight) for path, weight in zip(abstract, filled, strict=True)}


def multiplied_out(weight: jax.Array | BlockScaled) -> np.ndarray:
    if not isinstance(weight, BlockScaled):
        return np.asarray(weight)
    rows, columns = (np.arange(size) // block for size, block in zip(weight.shape[-2:], weight.block, strict=True))
    scales = np.asarray(weight.scales)[..., rows[:, None], columns]
    return np.asarray(weight.values).astype(np.float32) * scales


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", ["v2_lite", "v3"])
def test_every_weight_is_the_same_as_multiplied_out(tmp_path: Path, case: str, tp: int):
    fp8 = write_fp8_model(tmp_path / "fp8", odd_fields(case))
    expected = loaded(write_multiplied_out(tmp_path / "float32", fp8))
    for path, weight in loaded(fp8, tp).items():
        np.testing.assert_array_equal(weight, expected[path], err_msg=path)


def test_modules_that_are_not_converted(tmp_path: Path):
    """They may be named in full or by the end of their name, alone or with all that is in them."""
    unconverted = ["kv_b_proj", "model.layers.0.mlp", "lm_head"]
    fp8 = write_fp8_model(tmp_path / "fp8", odd_fields("v3", modules_to_not_convert=unconverted))
    weights = abstract_weights(model_of(ModelConfig.load(fp8)))
    plain = {path for path, weight in weights.items() if not isinstance(weight, BlockScaled)}
    assert {"layers.0.attention.w_uk", "layers.1.attention.w_uv", "layers.0.ffn.mlp.down.weight"} <= plain
    assert not {"layers.1.ffn.shared.down.weight", "layers.0.attn_in.q_b.weight"} & plain
    expected = loaded(write_multiplied_out(tmp_path / "float32", fp8))
    for path, weight in loaded(fp8).items():
        np.testing.assert_array_equal(weight, expected[path], err_msg=path)


def test_a_weight_cannot_be_half_converted():
    fields = odd_fields("v3", modules_to_not_convert=["q_a_proj"])
    with pytest.raises(ConfigError, match=r"some, but not all, of model\.layers\.0\.self_attn\.q_a_proj"):
        model_of(ModelConfig.from_fields(fields))


def test_problems_with_scales_come_in_one_message(tmp_path: Path, v3: tuple[Path, Path]):
    tensors = dict(read_file(v3[0] / "model.safetensors"))
    prefix = "model.layers.0.self_attn."
    del tensors[f"{prefix}o_proj.weight_scale_inv"]
    tensors[f"{prefix}kv_a_proj_with_mqa.weight_scale_inv"] = np.ones((1, 2), np.float32)
    tensors[f"{prefix}q_b_proj.weight_scale_inv"] = np.ones((2, 2), ml_dtypes.float8_e8m0fnu)
    tensors[f"{prefix}q_a_proj.weight"] = tensors[f"{prefix}q_a_proj.weight"].astype(ml_dtypes.bfloat16)
    tensors["model.norm.weight_scale_inv"] = np.ones((2,), np.float32)
    with pytest.raises(CheckpointError) as error:
        LLM(write_model(tmp_path, odd_fields("v3"), tensors), **SMALL)
    for part in (
        f"1 missing: {prefix}o_proj.weight_scale_inv",
        f"1 of the wrong shape: {prefix}kv_a_proj_with_mqa.weight_scale_inv [1, 2] for [2, 2]",
        f"{prefix}q_b_proj.weight_scale_inv float8_e8m0fnu for float32",
        f"{prefix}q_a_proj.weight bfloat16 for float8_e4m3fn",
        "1 unknown: model.norm.weight_scale_inv",
    ):
        assert part in str(error.value)


def test_weights_and_config_that_disagree_on_fp8(tmp_path: Path, v3: tuple[Path, Path]):
    fp8, float32 = v3
    fields = odd_fields("v3")
    converted = write_model(tmp_path / "converted", fields, dict(read_file(float32 / "model.safetensors")))
    with pytest.raises(CheckpointError, match=r"remove quantization_config from config\.json"):
        LLM(converted, **SMALL)
    del fields["quantization_config"]
    undeclared = write_model(tmp_path / "undeclared", fields, dict(read_file(fp8 / "model.safetensors")))
    with pytest.raises(CheckpointError, match=r"config\.json must have the quantization_config"):
        LLM(undeclared, **SMALL)


@pytest.mark.parametrize("tp", [1, 8])
def test_scales_of_v3_keep_their_blocks(tp: int):
    weights = abstract_weights(model_of(published("v3"), tp))
    scaled = {path: weight for path, weight in weights.items() if isinstance(weight, BlockScaled)}
    assert {weight.block for weight in scaled.values()} == {(128, 128)}
    shapes = {path: weight.scales.shape for path, weight in scaled.items()}
    assert shapes["layers.0.attn_in.qkv_a.weight"] == (17, 56)
    assert shapes["layers.0.attention.w_uk"] == (128, 1, 4)
    assert shapes["layers.3.ffn.experts_gate_up"] == (256, 2, 16, 56)
    unscaled = {path.split(".", 2)[-1] for path in weights if path not in scaled and path.startswith("layers.")}
    assert {path for path in unscaled if "norm" not in path} == {"attn_out.router.weight", "attn_out.router.bias"}


def test_devices_hold_the_scales_of_their_values(v3: tuple[Path, Path]):
    model = model_of(ModelConfig.load(v3[0]), 2)
    values, scales, *_ = load_weights(model, v3[0], make_mesh(2))["layers.0.ffn"]  # of mlp.down: columns are split
    assert {shard.data.shape for shard in values.addressable_shards} == {(200, 136)}
    assert {shard.data.shape for shard in scales.addressable_shards} == {(2, 17)}


def test_dummy_weights():
    model = model_of(ModelConfig.from_fields(odd_fields("v3") | ONE_MOE_LAYER))
    weights = random_weights(model, make_mesh(1))
    for piece_path, piece in model.pieces():
        structure = jax.tree.structure([weight for _, weight in named_weights(nnx.state(piece))])
        for weight in jax.tree.unflatten(structure, weights[piece_path]):
            if isinstance(weight, BlockScaled):
                assert weight.values.dtype == jnp.float8_e4m3fn
                assert np.isfinite(weight.values.astype(np.float32)).all()
                assert np.std(multiplied_out(weight)) == pytest.approx(weight.shape[-1] ** -0.5, rel=0.05)
