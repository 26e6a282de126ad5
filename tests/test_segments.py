"""Plans: how programs are cut, what chains take, give and donate, and what the compiled executables do with caches."""

import re
from collections.abc import Callable

import pytest

from dsjax import LLM
from dsjax.aot.compile import donated_bytes
from dsjax.aot.ladders import Buckets
from dsjax.aot.planner import PlannedProgram, ProgramKey, plan_programs
from dsjax.config import ModelConfig
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.segments import Link
from tests.conftest import GOLDEN

PIECES = 4


def programs(plan: str) -> list[PlannedProgram]:
    """The programs of a model that is made anew."""
    model = abstract_model(ModelConfig.load(GOLDEN / "v3"), "float32", Ops.references())
    return plan_programs(model, Buckets((16,), (8,), (8,)), plan)


def body(plan: str, kind: str = "mixed") -> tuple[Link, ...]:
    return next(program.links for program in programs(plan) if program.key.kind == kind)


def test_one_executable_per_kind_of_layer():
    """Three layers, two of them equal: their pieces and whole layers are the same chains."""
    layers = [link.chain for link in body("layer")[1:-1]]
    assert len(layers) == 3
    assert layers[1] == layers[2]
    assert layers[0] != layers[1]
    pieces = body("piece")
    assert len(pieces) == 2 + 3 * PIECES + 1
    assert len({link.chain for link in pieces}) == 2 + PIECES + 2 + 1, "attn_out and ffn differ between layer kinds"
    assert len(body("step")) == 1


@pytest.mark.parametrize("plan", ["piece", "layer", "step"])
def test_programs_of_equal_models_are_equal(plan: str):
    assert programs(plan) == programs(plan)


def test_layers_are_arguments_within_a_layer_and_constants_across():
    assert [link.places for link in body("layer")] == [(), *((("latent", i),) for i in range(3)), ()]
    [step] = body("step")
    assert step.places is None
    assert set(step.chain.places) == {(), *((("latent", i),) for i in range(3))}


@pytest.mark.parametrize("plan", ["piece", "layer", "step"])
def test_every_value_is_given_before_it_is_taken(plan: str):
    known = {"packed", "pools", "page_tables", "last_tokens", "sampling"}
    for link in body(plan):
        assert set(link.chain.takes) <= known
        known |= set(link.chain.gives)
    assert {"hidden", "samples", "pools", "page_tables"} <= known


def test_chains_give_only_what_is_needed_later():
    [step] = body("step")
    assert set(step.chain.gives) == {"hidden", "samples", "pools", "page_tables"}
    attention = next(link.chain for link in body("piece") if link.chain.segments[0].name == "attention")
    assert attention.gives == ("o",)
    assert "pools" in attention.takes
    last_layer = body("layer")[-2].chain
    assert set(last_layer.gives) == {"pools", "x"}


@pytest.mark.parametrize("plan", ["piece", "layer", "step"])
def test_caches_are_updated_in_place(make_llm: Callable[..., LLM], plan: str):
    """Every executable aliases all that it may overwrite, and no HLO copies an array of the pool's shape."""
    runner = make_llm(plan=plan).engine.runner
    pool = runner.executor.state["pools"]["latent"]
    pool_copy = re.compile(rf"= \S*\[{','.join(map(str, pool.shape))}\]\S* copy\(")
    writers = 0
    for program in runner.programs.values():
        for executable, *_ in program.dispatches:
            donated = donated_bytes(executable)
            assert executable.memory_analysis().alias_size_in_bytes >= donated
            assert not pool_copy.search(executable.as_text())
            writers += donated >= pool.nbytes
    assert writers >= len(runner.buckets.tokens) + len(runner.buckets.decode)


def test_dispatches_per_step(make_llm: Callable[..., LLM]):
    """A decode step is body and tail: 2 calls as "step"; 5 and 1 as "layer"; 15 and 3 as "piece"."""
    counts = {}
    for plan in ("step", "layer", "piece"):
        runner = make_llm(plan=plan).engine.runner
        keys = ProgramKey("decode", 3), ProgramKey("tail", 3)
        counts[plan] = tuple(len(runner.programs[key].dispatches) for key in keys)
    assert counts == {"step": (1, 1), "layer": (5, 1), "piece": (15, 3)}
