"""What MLA decode on Hopper chooses by shapes and types: the kernel's form, its settings, or the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.pallas_kernels.mla_decode.hopper import MAX_FEW, SPLIT_COST_PAGES, mla_decode, plan, tuned_split_cost_pages
from dsjax.telemetry import counters

ENTRIES, PAGES_OF_ROW = 3, 7


def traced(heads: int = 2, dtype=jnp.bfloat16, rank: int = 512, rope: int = 64, page: int = 64) -> str:
    """The jaxpr of a call with one query token a row."""
    per_entry = jax.ShapeDtypeStruct((ENTRIES,), jnp.int32)
    tables = jax.ShapeDtypeStruct((ENTRIES, PAGES_OF_ROW), jnp.int32)
    made = jax.eval_shape(partial(plan, queries=heads, num_sms=132), tables, per_entry, per_entry)
    call = jax.make_jaxpr(partial(mla_decode, scale=0.1))(
        jax.ShapeDtypeStruct((ENTRIES, 1, heads, rank), dtype),
        jax.ShapeDtypeStruct((ENTRIES, 1, heads, rope), dtype),
        jax.ShapeDtypeStruct((2, 9, page, rank + rope), dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
        tables,
        DecodeRows(per_entry, per_entry, made),  # pyright: ignore
    )
    return str(call)


@pytest.mark.parametrize("other", [{"dtype": jnp.float32}, {"rank": 32}, {"rope": 32}, {"page": 32}], ids=str)
def test_hopper_says_when_it_runs_the_reference(other: dict):
    before = counters["reference_op.mla_decode"]
    assert "mla_decode_combine" not in traced(**other)
    assert counters["reference_op.mla_decode"] == before + 1


def test_hopper_runs_its_kernel_for_the_shapes_of_deepseek():
    before = counters["reference_op.mla_decode"]
    assert "mla_decode_combine" in traced()
    assert counters["reference_op.mla_decode"] == before


def test_sixteen_queries_are_few_and_seventeen_are_many():
    assert MAX_FEW == 16
    assert tuned_split_cost_pages(1) == tuned_split_cost_pages(16) == SPLIT_COST_PAGES[1]
    assert tuned_split_cost_pages(17) == tuned_split_cost_pages(512) == SPLIT_COST_PAGES[17]
    assert "mla_decode_few" in traced(heads=16)
    assert "mla_decode_many" in traced(heads=17)
