"""What XLA makes of a real model's step for an H200: one CUDA graph holds it, and no weight or cache is copied."""

import math
import re
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from dsjax.aot.compile import compile_programs
from dsjax.aot.ladders import Buckets
from dsjax.aot.planner import plan_programs, state_avals
from dsjax.config import ModelConfig
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.sharding import TP
from tests.pallas_kernels.sm90a import dumping_to, h200, read_thunks
from tests.wide import write_v2_lite

ROWS = 16
LAYERS = 2  # a dense one, and one with experts
EXPERTS = 16


@dataclass(frozen=True)
class Structure:
    """Of the one executable of a program: its kind, its HLO, and its launches as XLA lists them."""

    kind: str
    hlo: str
    thunks: list[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """DeepSeek-V2-Lite at its real width, with few layers and experts."""
    folder = write_v2_lite(tmp_path_factory.mktemp("wide"), LAYERS, n_routed_experts=EXPERTS)
    return abstract_model(ModelConfig.load(folder), jnp.bfloat16, Ops.for_device(h200()))


@pytest.fixture(scope="module", params=["decode", "tail"])
def structure(request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Structure:
    """compile_programs itself raises if a cache is copied."""
    folder = tmp_path_factory.mktemp(request.param)
    mesh = jax.make_mesh((1,), (TP,), devices=[h200()], axis_types=(AxisType.Auto,))
    [program] = [p for p in plan_programs(model, Buckets((), (ROWS,), (ROWS,)), "step") if p.key.kind == request.param]
    state = state_avals(model, {kind.name: 1000 for kind in model.page_kinds}, ROWS, max_tokens=1024)
    with mock.patch("dsjax.aot.compile.compiler_options", return_value=dumping_to(folder)):
        executables, _ = compile_programs([program], state, mesh, model.dtype)
    [executable] = executables[program.key].values()
    return Structure(request.param, executable.as_text(), read_thunks(folder).splitlines())


def test_one_graph_holds_all_launches(structure: Structure):
    first, *others = structure.thunks
    assert "kCommandBuffer" in first
    assert [line for line in others if line and not line.startswith(" ") and "condition" not in line] == []


def test_bodies_of_decode_tokens_have_no_loops(structure: Structure):
    """All their kernels know how often they loop, or find out inside."""
    assert (" while(" in structure.hlo) == (structure.kind == "tail")


def test_no_weights_are_joined_or_copied(structure: Structure):
    """They would be the only bf16 arrays of such size."""
    made = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|concatenate)\(", structure.hlo)
    assert [shape for shape in made if math.prod(map(int, shape.split(","))) > 1 << 20] == []
