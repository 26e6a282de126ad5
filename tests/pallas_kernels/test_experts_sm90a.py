"""The experts on Hopper, compiled for an H200 on any machine: what ptxas makes of their grouped GEMMs."""

import jax
import jax.numpy as jnp
import pytest

from dsjax.pallas_kernels.experts.hopper import experts
from dsjax.pallas_kernels.experts.shapes import SHAPES
from tests.pallas_kernels.sm90a import compile_for_h200

FEW, MANY = 64, 8192  # tokens: they get tiles of 64 rows and of 128


def check(name: str, tokens: int) -> None:
    """Two GEMMs that do not spill, multiply by wgmma and copy by TMA."""
    shape = SHAPES[name]
    compiled = compile_for_h200(
        experts,
        jax.ShapeDtypeStruct((tokens, shape.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.experts, 2, shape.width, shape.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.experts, shape.hidden, shape.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, shape.chosen), jnp.int32),
        jax.ShapeDtypeStruct((tokens, shape.chosen), jnp.float32),
    )
    assert len(compiled.kernels) == 2
    for kernel in compiled.kernels:
        assert (kernel.spill_bytes, kernel.losses) == (0, [])
        kernel.assert_registers_fit()
        assert "wgmma.mma_async" in kernel.ptx
        assert "cp.async.bulk.tensor" in kernel.ptx


def test_sm90a_of_v2_lite():
    check("v2_lite_ep1", FEW)


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("name", SHAPES)
def test_sm90a_of_all_shapes(name: str, tokens: int):
    check(name, tokens)
