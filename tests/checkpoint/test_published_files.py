"""The complete tensor lists of published checkpoints, in files of the real shapes that hold no data.

The lists are written out here from DeepSeek's file listings, without the tables of dsjax.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import batched
from pathlib import Path

import pytest

from dsjax.checkpoint.load import check_tensors
from dsjax.checkpoint.safetensors import open_folder
from dsjax.errors import CheckpointError
from dsjax.published import published

Entry = tuple[str, tuple[int, ...]]  # dtype and shape, as files spell them
ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def v2_lite() -> Iterator[tuple[str, Entry]]:
    return small_moe(vocabulary=102400, dense_width=10944, router_bias=False)


def moonlight() -> Iterator[tuple[str, Entry]]:
    return small_moe(vocabulary=163840, dense_width=11264, router_bias=True)


def small_moe(vocabulary: int, dense_width: int, router_bias: bool) -> Iterator[tuple[str, Entry]]:
    """27 layers of width 2048, the first one dense, the others with 64 + 2 experts of width 1408."""
    yield "model.embed_tokens.weight", ("BF16", (vocabulary, 2048))
    yield "model.norm.weight", ("BF16", (2048,))
    yield "lm_head.weight", ("BF16", (vocabulary, 2048))
    for layer in range(27):
        prefix = f"model.layers.{layer}."
        yield from uncompressed_attention(prefix)
        if layer == 0:
            yield from mlp(f"{prefix}mlp.", dense_width)
            continue
        yield f"{prefix}mlp.gate.weight", ("BF16", (64, 2048))
        if router_bias:
            yield f"{prefix}mlp.gate.e_score_correction_bias", ("F32", (64,))
        yield from mlp(f"{prefix}mlp.shared_experts.", 2816)
        for expert in range(64):
            yield from mlp(f"{prefix}mlp.experts.{expert}.", 1408)


def uncompressed_attention(prefix: str) -> Iterator[tuple[str, Entry]]:
    """Norms and attention of a layer of V2-Lite or Moonlight: 16 heads of 128 + 64 query and 128 value channels."""
    yield f"{prefix}input_layernorm.weight", ("BF16", (2048,))
    yield f"{prefix}post_attention_layernorm.weight", ("BF16", (2048,))
    yield f"{prefix}self_attn.q_proj.weight", ("BF16", (3072, 2048))
    yield f"{prefix}self_attn.kv_a_proj_with_mqa.weight", ("BF16", (576, 2048))
    yield f"{prefix}self_attn.kv_a_layernorm.weight", ("BF16", (512,))
    yield f"{prefix}self_attn.kv_b_proj.weight", ("BF16", (4096, 512))
    yield f"{prefix}self_attn.o_proj.weight", ("BF16", (2048, 2048))


def mlp(prefix: str, width: int) -> Iterator[tuple[str, Entry]]:
    yield f"{prefix}gate_proj.weight", ("BF16", (width, 2048))
    yield f"{prefix}up_proj.weight", ("BF16", (width, 2048))
    yield f"{prefix}down_proj.weight", ("BF16", (2048, width))


def v3() -> Iterator[tuple[str, Entry]]:
    yield "model.embed_tokens.weight", ("BF16", (129280, 7168))
    yield "model.norm.weight", ("BF16", (7168,))
    yield "lm_head.weight", ("BF16", (129280, 7168))
    for layer in range(62):
        prefix = f"model.layers.{layer}."
        yield from v3_attention(prefix)
        if layer < 3:
            yield from fp8_mlp(f"{prefix}mlp.", (18432, 7168), (144, 56))
            continue
        yield f"{prefix}mlp.gate.weight", ("BF16", (256, 7168))
        yield f"{prefix}mlp.gate.e_score_correction_bias", ("F32", (256,))
        yield from fp8_mlp(f"{prefix}mlp.shared_experts.", (2048, 7168), (16, 56))
        for expert in range(256):
            yield from fp8_mlp(f"{prefix}mlp.experts.{expert}.", (2048, 7168), (16, 56))
    yield "model.layers.61.embed_tokens.weight", ("BF16", (129280, 7168))
    yield "model.layers.61.enorm.weight", ("BF16", (7168,))
    yield "model.layers.61.hnorm.weight", ("BF16", (7168,))
    yield "model.layers.61.eh_proj.weight", ("BF16", (7168, 14336))
    yield "model.layers.61.shared_head.norm.weight", ("BF16", (7168,))
    yield "model.layers.61.shared_head.head.weight", ("BF16", (129280, 7168))


def v3_attention(prefix: str) -> Iterator[tuple[str, Entry]]:
    yield f"{prefix}input_layernorm.weight", ("BF16", (7168,))
    yield f"{prefix}post_attention_layernorm.weight", ("BF16", (7168,))
    yield from fp8(f"{prefix}self_attn.q_a_proj", (1536, 7168), (12, 56))
    yield f"{prefix}self_attn.q_a_layernorm.weight", ("BF16", (1536,))
    yield from fp8(f"{prefix}self_attn.q_b_proj", (24576, 1536), (192, 12))
    yield from fp8(f"{prefix}self_attn.kv_a_proj_with_mqa", (576, 7168), (5, 56))
    yield f"{prefix}self_attn.kv_a_layernorm.weight", ("BF16", (512,))
    yield from fp8(f"{prefix}self_attn.kv_b_proj", (32768, 512), (256, 4))
    yield from fp8(f"{prefix}self_attn.o_proj", (7168, 16384), (56, 128))


def fp8_mlp(prefix: str, shape: tuple[int, int], scales: tuple[int, int]) -> Iterator[tuple[str, Entry]]:
    yield from fp8(f"{prefix}gate_proj", shape, scales)
    yield from fp8(f"{prefix}up_proj", shape, scales)
    yield from fp8(f"{prefix}down_proj", (shape[1], shape[0]), (scales[1], scales[0]))


def fp8(module: str, shape: tuple[int, int], scales: tuple[int, int]) -> Iterator[tuple[str, Entry]]:
    yield f"{module}.weight", ("F8_E4M3", shape)
    yield f"{module}.weight_scale_inv", ("F32", scales)


def write_sparse(folder: Path, entries: Mapping[str, Entry], shards: int) -> Path:
    """A checkpoint whose files have headers and their full length, but no data: they take no place on the disk."""
    places = {}
    for number, names in enumerate(batched(entries, math.ceil(len(entries) / shards)), start=1):
        file = f"model-{number:05}-of-{shards:06}.safetensors"
        write_sparse_file(folder / file, {name: entries[name] for name in names})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def write_sparse_file(path: Path, entries: Mapping[str, Entry]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


CHECKPOINTS = {"v2_lite": (v2_lite, 4), "moonlight": (moonlight, 27), "v3": (v3, 163)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_files_are_what_the_config_needs(tmp_path: Path, name: str):
    """All are accepted; of one that is missing, one too many and one of another shape, each is named."""
    listed, shards = CHECKPOINTS[name]
    entries = dict(listed())
    stored = open_folder(write_sparse(tmp_path, entries, shards))
    assert {name: tensor.shape for name, tensor in stored.items()} == {n: shape for n, (_, shape) in entries.items()}
    check_tensors(published(name), stored, name)
    missing, misshapen = "model.layers.26.mlp.experts.63.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    stored["model.layers.0.mlp.gate.weight"] = stored.pop(missing)
    shape, stored[misshapen] = stored[misshapen].shape, stored["model.norm.weight"]
    with pytest.raises(CheckpointError) as error:
        check_tensors(published(name), stored, name)
    assert f"1 missing: {missing}. 1 unknown: model.layers.0.mlp.gate.weight. 1 of the wrong shape: " in str(
        error.value
    )
    assert f"{misshapen} {[shape[0]]} for {list(shape)}" in str(error.value)


def test_number_and_size_of_v3_tensors():
    entries = dict(v3())
    assert len(entries) == 91_991
    assert sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in entries.values()) // 2**30 == 641
