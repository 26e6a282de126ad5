"""Which implementations a device gets, and what they are told about it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dsjax.config import ModelConfig
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.pallas_kernels.mla_decode import DecodeRows, hopper
from dsjax.telemetry import counters
from tests.conftest import GOLDEN
from tests.pallas_kernels.sm90a import h200

H100_PCIE = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=114)


def test_devices_without_kernels_run_the_references():
    before = counters["reference_op.mla_decode"]
    assert Ops.for_device(jax.devices("cpu")[0]) == Ops.references()
    assert counters["reference_op.mla_decode"] == before + 1


@pytest.mark.parametrize(("device", "num_sms"), [(h200, 132), (lambda: H100_PCIE, 114)], ids=["h200", "h100_pcie"])
def test_the_plan_of_decoding_has_a_part_for_each_sm(device, num_sms: int):
    """Of a device that is only described, too."""
    model = abstract_model(ModelConfig.load(GOLDEN / "v3"), "bfloat16", Ops.for_device(device()))
    tables, rows = jax.ShapeDtypeStruct((3, 8), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    plan = jax.eval_shape(model.plan_decode, {"latent": tables}, rows, rows)
    assert len(plan.parts) == num_sms


@pytest.mark.parametrize(
    ("dtype", "rank", "page"), [(jnp.float32, 512, 64), (jnp.bfloat16, 256, 64), (jnp.bfloat16, 512, 32)]
)
def test_mla_decode_counts_that_it_runs_the_reference(dtype: jnp.dtype, rank: int, page: int):
    shapes = (2, 1, 16, rank), (2, 1, 16, 64), (3, 9, page, rank + 64)
    latent, rope, pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    rows, tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (2, 4)))
    before = counters["reference_op.mla_decode"]
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(hopper.mla_decode, latent, rope, pool, layer, tables, DecodeRows(rows, rows, ()), scale=0.1)  # pyright: ignore
    assert counters["reference_op.mla_decode"] == before + 1
