"""All of an engine that is known before a weight is read. Runner and `dsjax warmup` get it here, so that they agree."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from dsjax.aot.compile import (
    CompileReport,
    Executables,
    Progress,
    compile_programs,
    eager_programs,
    silent,
    weight_bytes,
)
from dsjax.aot.planner import PlannedProgram, plan_programs, row_state_bytes, state_avals
from dsjax.aot.targets import target_of
from dsjax.cache.sizing import available_bytes, cache_pages
from dsjax.config import ModelConfig
from dsjax.engine.options import Deployment, EngineOptions, resolve
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.sharding import TensorParallel, make_mesh


@dataclass(frozen=True)
class Blueprint:
    """Devices, abstract model, programs, and the size of the cache in `pages` per page kind, a shape in all of them."""

    mesh: Mesh
    deployment: Deployment
    model: Model
    planned: list[PlannedProgram]
    pages: dict[str, int]

    @classmethod
    def draw(cls, config: ModelConfig, options: EngineOptions) -> "Blueprint":
        """The blueprint of a model on this machine. Raises OptionError if the options do not fit it."""
        mesh = make_mesh(options.tp)
        device = mesh.devices.flat[0]
        deployment = resolve(options, config, target_of(device))
        ops = Ops.deterministic() if deployment.deterministic else Ops.for_device(device)
        tp = TensorParallel(options.tp, in_order=deployment.deterministic)
        model = abstract_model(config, deployment.dtype, ops, tp)
        plan = "piece" if deployment.plan == "off" else deployment.plan
        planned = plan_programs(model, deployment.buckets, plan, deployment.deterministic)
        length = deployment.max_model_len
        taken = weight_bytes(planned, mesh) + row_state_bytes(model, deployment.buckets.rows, length)
        left = available_bytes(mesh, options.gpu_memory_fraction, taken)
        pages = cache_pages(model.page_kinds, deployment.max_num_seqs, length, options.kv_tokens, left)
        return cls(mesh, deployment, model, planned, pages)

    @property
    def state(self) -> dict[str, Any]:
        """The abstract device state."""
        return state_avals(self.model, self.pages, self.deployment.buckets.rows, self.deployment.max_model_len)

    def compile(self, progress: Progress = silent) -> tuple[Executables, CompileReport | None]:
        """What runs each chain of each program; without a report where plan "off" compiles nothing."""
        if self.deployment.plan == "off":
            return eager_programs(self.planned, self.model.dtype), None
        return compile_programs(self.planned, self.state, self.mesh, self.model.dtype, progress)
