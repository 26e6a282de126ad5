"""Small random FP8 checkpoints in which every matrix ends in partial blocks, and the same weights multiplied out."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsjax.checkpoint.names import checkpoint_tensors
from dsjax.checkpoint.safetensors import read_file, write_file
from dsjax.config import ModelConfig
from tests.conftest import GOLDEN

BLOCK = 128
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
# Sizes beyond one block and no multiple of it; two devices split widths and heads into parts that cut blocks as well.
ODD_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 200,
    "intermediate_size": 272,
    "moe_intermediate_size": 144,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 16,
    "v_head_dim": 36,
}


def odd_fields(case: str, **quantization: Any) -> dict[str, Any]:
    """config.json of an FP8 model like the golden `case` with ODD_SIZES; `quantization` adds to quantization_config."""
    fields = json.loads((GOLDEN / case / "config.json").read_text()) | ODD_SIZES
    if fields["q_lora_rank"] is not None:
        fields["q_lora_rank"] = 152
    return fields | {"quantization_config": QUANTIZATION | quantization}


def write_fp8_model(folder: Path, fields: dict[str, Any]) -> Path:
    """A random checkpoint of the model that `fields` describe: every block has another scale."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (shape, dtypes) in checkpoint_tensors(ModelConfig.from_fields(fields)).items():
        if name.endswith("norm.weight"):
            value = rng.uniform(0.8, 1.2, shape)
        elif name.endswith("_scale_inv"):
            value = rng.uniform(0.2, 1.8, shape) / 1000
        else:
            value = rng.normal(size=shape) * (60 if dtypes == ("float8_e4m3fn",) else 0.1)
        tensors[name] = value.astype(np.dtype(getattr(ml_dtypes, dtypes[0], dtypes[0])))
    return write_model(folder, fields, tensors)


def write_model(folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    write_file(folder / "model.safetensors", tensors)
    return folder


def write_multiplied_out(folder: Path, fp8_folder: Path) -> Path:
    """The model of `fp8_folder` as a float32 checkpoint without quantisation."""
    stored = read_file(fp8_folder / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.astype(np.float32)
        if f"{name}_scale_inv" in stored:
            rows, columns = np.indices(tensor.shape)
            value = value * stored[f"{name}_scale_inv"][rows // BLOCK, columns // BLOCK]
        tensors[name] = value
    fields = json.loads((fp8_folder / "config.json").read_text())
    del fields["quantization_config"]
    return write_model(folder, fields, tensors)
