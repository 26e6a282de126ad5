"""One prefill op by op, for tests that change the model: nothing has to be compiled for every change."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsjax.aot.compile import eager_programs
from dsjax.aot.ladders import Buckets
from dsjax.aot.planner import ProgramKey, plan_programs, state_avals
from dsjax.checkpoint.load import Weights, load_weights
from dsjax.config import ModelConfig
from dsjax.engine.packing import pack_step
from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Scheduler
from dsjax.model import abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.segments import Executor, allocate
from dsjax.sharding import make_mesh
from dsjax.step.layout import StepShape
from tests.conftest import GOLDEN


def forward(
    case: str,
    tokens: list[int],
    config: ModelConfig | None = None,
    edit: Callable[[Weights], Weights] = lambda weights: weights,
) -> np.ndarray:
    """Logits [len(tokens), V] of a golden checkpoint, with another `config` or edited weights if given."""
    count, mesh = len(tokens), make_mesh(1)
    model = abstract_model(config or ModelConfig.load(GOLDEN / case), "float32", Ops.references())
    keys = [ProgramKey("mixed", count), ProgramKey("logits", count)]
    planned = [p for p in plan_programs(model, Buckets((count,), (count,), (count,)), "piece") if p.key in keys]
    programs = eager_programs(planned, model.dtype)
    pages = {kind.name: kind.pages_for(count) for kind in model.page_kinds}
    state = allocate(state_avals(model, pages, rows=count, max_tokens=count), mesh)
    executor = Executor(mesh, edit(load_weights(model, GOLDEN / case, mesh)), state)
    body, head = (executor.bind(p.links, programs[p.key], p.results) for p in planned)
    results: dict[str, Any] = executor.run(body, {"packed": pack_prefill(tokens, model.page_kinds, pages)})
    return np.asarray(executor.run(head, {"hidden": results["hidden"]})["logits"])


def pack_prefill(tokens: list[int], kinds, pages: dict[str, int]) -> np.ndarray:
    """The packed step that prefills `tokens` at once and samples after each of them."""
    count = len(tokens)
    scheduler = Scheduler(kinds, pages, rows=count, step_tokens=count, eos_token_ids=())
    limits = Limits(vocab_size=1 << 20, max_model_len=count + 1, cache_tokens=count + 1)
    scheduler.add(Request.create("0", tokens, SamplingParams(max_tokens=1, prompt_logprobs=0), limits))
    step = scheduler.schedule()
    assert step is not None
    return pack_step(step, StepShape(count, count, has_prefill=True), kinds)


def zero_router_bias(weights: Weights) -> Weights:
    """`weights` with every router's correction bias (the only leaves of one value per expert) set to zero."""
    routers = {path: leaves for path, leaves in weights.items() if path.endswith("attn_out") and len(leaves) == 4}
    # flat leaves are in alphabetical order: norm.weight, o_proj.weight, router.bias, router.weight
    return weights | {
        p: (norm, o_proj, jnp.zeros_like(bias), gate) for p, (norm, o_proj, bias, gate) in routers.items()
    }
