"""One prefill through a single compiled body and tail, for tests that change the model or the contents of its inputs."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsjax.aot.compile import compile_programs
from dsjax.aot.ladders import Buckets
from dsjax.aot.planner import ProgramKey, plan_programs, state_avals
from dsjax.checkpoint.load import Weights, load_weights
from dsjax.config import ModelConfig
from dsjax.engine.packing import pack_step
from dsjax.engine.request import Limits, Request, SamplingParams
from dsjax.engine.scheduler import Scheduler
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.segments import Executor, allocate
from dsjax.sharding import TensorParallel, make_mesh
from dsjax.step.layout import StepShape
from tests.conftest import GOLDEN


def forward(
    case: str,
    tokens: list[int],
    config: ModelConfig | None = None,
    edit: Callable[[Weights], Weights] = lambda weights: weights,
    tp: int = 1,
) -> np.ndarray:
    """Logits [len(tokens), V] of a golden checkpoint, with another `config` or edited weights if given."""
    count = len(tokens)
    config = config or ModelConfig.load(GOLDEN / case)
    mesh = make_mesh(tp)
    model = abstract_model(config, "float32", Ops.for_target("cpu"), TensorParallel(tp))
    keys = [ProgramKey("mixed", count), ProgramKey("tail", count)]
    planned = [p for p in plan_programs(model, Buckets((count,), (count,), (count,)), "layer") if p.key in keys]
    pages = {kind.name: kind.pages_for(count) for kind in model.page_kinds}
    state = state_avals(model.page_kinds, pages, rows=count, max_tokens=count)
    compiled, _ = compile_programs(planned, state, mesh, model.dtype)
    executor = Executor(mesh, edit(load_weights(model, GOLDEN / case, mesh)), allocate(state, mesh))
    body, tail = (executor.bind(p.links, compiled[p.key], p.results) for p in planned)
    packed = pack_prefill(tokens, model.page_kinds, pages)
    results: dict[str, Any] = executor.run(body, {"packed": packed})
    return np.asarray(executor.run(tail, {name: results[name] for name in ("hidden", "samples")})["logits"])


def pack_prefill(tokens: list[int], kinds, pages: dict[str, int]) -> np.ndarray:
    """The packed step that prefills `tokens` at once and samples after each of them."""
    count = len(tokens)
    scheduler = Scheduler(kinds, pages, rows=count, step_tokens=count, eos_token_ids=())
    limits = Limits(vocab_size=1 << 20, max_model_len=count + 1, cache_tokens=count + 1)
    scheduler.add(Request.create("0", tokens, SamplingParams(max_tokens=1), limits))
    step = scheduler.schedule()
    assert step is not None
    return pack_step(step, StepShape(count, count, has_prefill=True), kinds, collect_all=True)


def zero_router_bias(weights: Weights) -> Weights:
    """`weights` with every router's correction bias (the only leaves of one value per expert) set to zero."""
    routers = {path: leaves for path, leaves in weights.items() if path.endswith("attn_out") and len(leaves) == 4}
    # flat leaves are in alphabetical order: norm.weight, o_proj.weight, router.bias, router.weight
    return weights | {
        p: (norm, o_proj, jnp.zeros_like(bias), gate) for p, (norm, o_proj, bias, gate) in routers.items()
    }
