"""Tensor parallel on virtual CPU devices: the same logits and tokens as on one."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsjax import LLM
from dsjax.aot.compile import weight_bytes
from dsjax.aot.ladders import Buckets
from dsjax.aot.planner import plan_programs, row_state_bytes
from dsjax.checkpoint.load import load_weights
from dsjax.config import ModelConfig
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.sharding import REPLICATED, TP, TensorParallel, make_mesh, weight_partition
from tests.conftest import GOLDEN
from tests.test_golden import GREEDY, TOLERANCE, golden, logit_error


@pytest.mark.parametrize(("case", "tp", "plan"), [("v3", 4, "step"), ("v2_lite", 2, "layer")])
def test_same_as_one_device(make_llm: Callable[..., LLM], case: str, tp: int, plan: str):
    expected = golden(case)
    llm = make_llm(case, tp=tp, plan=plan)
    assert logit_error(llm.logits(expected["tokens"].tolist()), expected["logits"]) < TOLERANCE
    answers = llm.generate([expected[f"prompt_{i}"].tolist() for i in range(3)], GREEDY)
    assert [answer.token_ids for answer in answers] == [expected[f"greedy_{i}"].tolist() for i in range(3)]


def test_every_device_holds_its_share_of_the_weights():
    config, mesh = ModelConfig.load(GOLDEN / "v3"), make_mesh(4)
    model = abstract_model(config, "float32", Ops.references(), TensorParallel(4))
    weights = load_weights(model, GOLDEN / "v3", mesh)
    whole = load_weights(abstract_model(config, "float32", Ops.references()), GOLDEN / "v3", make_mesh(1))
    experts = weights["layers.1.ffn"][1]
    assert experts.shape == (8, 2, 32, 64)
    assert {shard.data.shape for shard in experts.addressable_shards} == {(2, 2, 32, 64)}
    planned = plan_programs(model, Buckets((4,), (4,), (4,)), "step")
    shards = [leaf.addressable_shards[0].data for leaves in weights.values() for leaf in leaves]
    assert weight_bytes(planned, mesh) == sum(shard.nbytes for shard in shards)
    for path, leaves in weights.items():
        for split, one in zip(leaves, whole[path], strict=True):
            np.testing.assert_array_equal(split, one)


def test_sums_in_mesh_order():
    parts = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    tp = TensorParallel(4, in_order=True)
    run = jax.shard_map(
        lambda part: tp.sum(part[0]),
        mesh=make_mesh(4),
        in_specs=PartitionSpec(TP),
        out_specs=REPLICATED,
        check_vma=False,
    )
    np.testing.assert_array_equal(run(parts), parts[0] + parts[1] + parts[2] + parts[3])


def test_a_weight_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match="mystery"):
        weight_partition("mystery.weight")


def test_row_state_is_counted_beside_the_cache(make_llm):
    runner = make_llm().engine.runner
    leaves = jax.tree.leaves({name: value for name, value in runner.executor.state.items() if name != "pools"})
    counted = row_state_bytes(runner.blueprint.model, runner.rows, runner.limits.max_model_len)
    assert counted == sum(leaf.nbytes for leaf in leaves)
