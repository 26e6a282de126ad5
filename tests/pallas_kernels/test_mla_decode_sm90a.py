"""The Hopper kernel of MLA decode, compiled for an H200 on any machine: what ptxas and XLA make of it."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest

from dsjax.aot.targets import num_sms_of
from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.pallas_kernels.mla_decode.hopper import mla_decode, plan
from dsjax.pallas_kernels.mla_decode.shapes import SHAPES, DecodeShape
from tests.pallas_kernels.sm90a import Compiled, compile_for_h200, h200

ENTRIES, ROWS, PAGES_OF_ROW = 16, 32, 100
POOL = (4, 1000, 64)
LAYERS = 10


def compile_layers(shape: DecodeShape, tokens: int, layers: int = 1) -> Compiled:
    """`layers` calls with one plan, each with the latents of another layer."""

    def attend(latent, rope, pool, tables, decode: DecodeRows):
        for layer in range(layers):
            latent = mla_decode(latent, rope, pool, jnp.int32(layer), tables, decode, scale=0.1)
        return latent

    lengths = jax.ShapeDtypeStruct((ENTRIES,), jnp.int32)
    tables = jax.ShapeDtypeStruct((ROWS, PAGES_OF_ROW), jnp.int32)
    of_shape = partial(plan, queries=tokens * shape.heads, num_sms=num_sms_of(h200()))
    made = jax.eval_shape(of_shape, tables, lengths, lengths)
    return compile_for_h200(
        attend,
        jax.ShapeDtypeStruct((ENTRIES, tokens, shape.heads, shape.rank), jnp.bfloat16),
        jax.ShapeDtypeStruct((ENTRIES, tokens, shape.heads, shape.rope), jnp.bfloat16),
        jax.ShapeDtypeStruct((*POOL, shape.rank + shape.rope), jnp.bfloat16),
        tables,
        DecodeRows(lengths, lengths, made),  # pyright: ignore
    )


def check(compiled: Compiled, calls: int = 1) -> None:
    """A call launches two kernels, which do not spill or lose speed in ways that ptxas knows.

    The one that attends multiplies by wgmma and copies by TMA, the other one merges.
    """
    for kernel in compiled.kernels:
        assert (kernel.spill_bytes, kernel.losses) == (0, []), kernel.name
        kernel.assert_registers_fit()
    merging, attention = sorted(compiled.kernels, key=lambda kernel: "wgmma.mma_async" in kernel.ptx)
    assert "wgmma.mma_async" in attention.ptx
    assert "cp.async.bulk.tensor" in attention.ptx
    assert merging.name.startswith("mla_decode_combine")
    assert len(re.findall("kCustomCall$", compiled.thunks, re.MULTILINE)) == 2 * calls


@pytest.mark.parametrize(("name", "tokens"), [("v3_tp1", 1), ("v3_tp2", 1), ("v3_tp8", 2)])
def test_sm90a_of_many_queries(name: str, tokens: int):
    check(compile_layers(SHAPES[name], tokens))


def shapes_and_tokens():
    for shape, tokens in product(dict.fromkeys(SHAPES.values()), range(1, 5)):
        spills = tokens > 1 and shape.heads >= 64
        marks = pytest.mark.xfail(strict=True, reason="spills one register, once a part") if spills else ()
        yield pytest.param(shape, tokens, id=f"heads{shape.heads}-{tokens}", marks=marks)


@pytest.mark.kernels
@pytest.mark.parametrize(("shape", "tokens"), list(shapes_and_tokens()))
def test_sm90a_of_all_shapes(shape: DecodeShape, tokens: int):
    check(compile_layers(shape, tokens))


def test_layers_are_one_cuda_graph_and_copy_no_cache():
    compiled = compile_layers(SHAPES["v3_tp8"], tokens=1, layers=LAYERS)
    check(compiled, calls=LAYERS)
    first, *others = compiled.thunks.splitlines()
    assert "kCommandBuffer" in first
    assert all(line.startswith(" ") for line in others if line)
    pool = "bf16[" + ",".join(map(str, (*POOL, 576))) + "]"
    lines = [line for line in (compiled.executable.as_text() or "").splitlines() if pool in line.split("(")[0]]
    assert all("parameter(" in line or "ENTRY" in line for line in lines), "a copy of the cache"
    memory = compiled.executable.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 64 << 20
