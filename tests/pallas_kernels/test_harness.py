"""The harness of the kernel tests, on small kernels that show what it must notice."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tests.pallas_kernels.interpreting import interpreted
from tests.pallas_kernels.sm90a import compile_for_h200

TILE = 64


@jax.jit
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """1 + a b for bf16 [64, 64], by one wgmma."""

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, arrived):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, arrived)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, arrived)
        plgpu.barrier_wait(arrived)

        def multiply(accumulator):
            accumulator[...] = jnp.ones_like(accumulator)
            plgpu.wgmma(accumulator, a_smem, b_smem)
            return accumulator[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))  # pyright: ignore
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # pyright: ignore
    operand = plgpu.SMEM((TILE, TILE), jnp.bfloat16, transforms=tiled)
    result = plgpu.SMEM((TILE, TILE), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((TILE, TILE), jnp.float32),
        scratch_types=[operand, operand, result, plgpu.Barrier(num_arrivals=2)],
        kernel_name="product",
    )(a, b)


def exchange(x: jax.Array, waits: bool, fails: bool = False) -> jax.Array:
    """The rows of x [2, 128] swapped by two warpgroups, through shared memory."""

    def body(x_gmem, out_gmem, smem, written):
        warpgroup = jax.lax.axis_index("warpgroup")
        smem[warpgroup] = x_gmem[warpgroup]
        if waits:
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(written)
        out_gmem[warpgroup] = smem[1 - warpgroup + 2 * fails]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="warpgroup",
    )(x)


def test_interpreted_kernels_compute():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(TILE, TILE)), jnp.bfloat16) for _ in range(2))
    with interpreted():
        out = product(a, b)
    np.testing.assert_allclose(out, 1 + np.asarray(a, np.float64) @ np.asarray(b, np.float64), atol=1e-5)


def test_a_race_fails():
    x = jnp.arange(256.0).reshape(2, 128)
    with interpreted():
        np.testing.assert_array_equal(exchange(x, waits=True), x[::-1])
    with pytest.raises(AssertionError, match="RACE DETECTED"), interpreted():
        jax.block_until_ready(exchange(x, waits=False))


def test_an_error_does_not_spoil_later_kernels():
    x = jnp.arange(256.0).reshape(2, 128)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds"), interpreted():
        jax.block_until_ready(exchange(x, waits=True, fails=True))
    with interpreted():
        np.testing.assert_array_equal(exchange(x, waits=True), x[::-1])


def test_facts_of_a_compiled_kernel():
    """Compiled twice, after it was interpreted; both times it is new to the compiler."""

    def chain(a, b):
        for _ in range(4):
            b = jnp.tanh(product(a, b)).astype(b.dtype)
        return b

    operand = jax.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16)
    for _ in range(2):
        executable, [kernel], thunks = compile_for_h200(chain, operand, operand)
        assert executable.memory_analysis().argument_size_in_bytes == 2 * 2 * TILE**2  # pyright: ignore
        first, *others = thunks.splitlines()
        assert "kCommandBuffer" in first
        assert sum("kCustomCall" in line for line in others) == 4
        assert kernel.name.startswith("product")
        assert kernel.threads == 128
        assert 32 < kernel.registers < 128, "64 x 64 sums are 32 registers a thread"
        assert kernel.moved_registers == []
        kernel.assert_registers_fit()
        assert kernel.smem_bytes == 2 * 2 * TILE**2 + 4 * TILE**2
        assert (kernel.spill_bytes, kernel.losses) == (0, [])
        assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in kernel.ptx
        assert "cp.async.bulk.tensor" in kernel.ptx


def test_spills_are_seen():
    """A value of 256 registers a thread, all of which are used again after their sum."""

    def body(x_gmem, out_gmem, smem):
        x = x_gmem[...]
        smem[...] = x / jnp.sum(x)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    x = jax.ShapeDtypeStruct((TILE, 512), jnp.float32)
    [kernel] = compile_for_h200(plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype)]), x).kernels
    assert kernel.registers == 255
    assert kernel.spill_bytes > 0
