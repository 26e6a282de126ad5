"""The runner: the device's side of the engine. It turns a scheduled step into calls of compiled programs."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsjax.aot.compile import (
    compile_programs,
    count_compiles,
    eager_programs,
    keep_executables,
)
from dsjax.aot.ladders import pick
from dsjax.aot.planner import ProgramKey, plan_programs, state_avals
from dsjax.cache.kinds import PageKind
from dsjax.checkpoint.load import Weights, load_weights, random_weights
from dsjax.config import ModelConfig
from dsjax.engine.options import (
    EngineOptions,
    resolve_buckets,
    resolve_cache_dir,
    resolve_granularity,
    resolve_max_model_len,
)
from dsjax.engine.packing import pack_rows, pack_step
from dsjax.engine.request import Limits
from dsjax.engine.scheduler import Step
from dsjax.engine.step_layout import StepShape
from dsjax.errors import OptionError
from dsjax.model import Model, abstract_model
from dsjax.pallas_kernels import Ops
from dsjax.segments import Executor
from dsjax.sharding import TensorParallel, make_mesh, value_partition

logger = logging.getLogger("dsjax")

CPU_CACHE_BYTES = 1 << 30
GPU_RESERVE_BYTES = 2 << 30  # for scratch of executables, their code and CUDA graphs


class StepResult(NamedTuple):
    """What a step leaves on the device: sampled `tokens` int32 [R] and their `logits` float32 [R, V], or None each."""

    tokens: jax.Array | None
    logits: jax.Array | None


@dataclass
class StepCounts:
    """Runs per program; tokens computed, those of them in prefill chunks, and the padding that buckets added."""

    programs: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prefill_tokens: int = 0
    padding: int = 0


class Runner:
    """Model, caches and executables of one engine.

    Raises ConfigError, CheckpointError or OptionError if they cannot be made as asked for.
    """

    def __init__(self, folder: Path, config: ModelConfig, options: EngineOptions):
        count_compiles()
        self.mesh = make_mesh(options.tp)
        on_gpu = self.mesh.devices.flat[0].platform == "gpu"
        self.granularity = resolve_granularity(options, on_gpu)
        self.buckets = resolve_buckets(options, on_gpu)
        self.rows = self.buckets.decode[-1]
        self.max_model_len = resolve_max_model_len(options, config)
        self.model = _model(config, options, on_gpu)
        if self.granularity != "off":
            keep_executables(resolve_cache_dir(options) / "executables")
        weights = _weights(self.model, folder, options, self.mesh)
        self.pages = _cache_pages(self.model.page_kinds, options, self.rows * self.max_model_len, self.mesh)
        self.counts = StepCounts()
        self.executor, self.programs, self.compile_report = self._compile(weights, options)

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        return self.model.page_kinds

    @property
    def limits(self) -> Limits:
        cache_tokens = min(self.pages[kind.name] * kind.page_tokens for kind in self.kinds)
        return Limits(self.model.config.vocab_size, self.max_model_len, cache_tokens)

    def dispatch(self, step: Step, collect_all: bool = False) -> StepResult:
        """Enqueue `step`; returns at once. With `collect_all` the result covers every token of the step."""
        if step.admitted:
            self.executor.run(self.programs[ProgramKey("set_rows", self.rows)], {"packed": self._admission(step)})
        key = self._body(step)
        shape = StepShape(key.bucket, self.rows, has_prefill=not step.is_decode)
        packed = pack_step(step, shape, self.kinds, collect_all)
        hidden = self.executor.run(self.programs[key], {"packed": packed})
        self._count(key, step)
        results = step.num_tokens if collect_all else len(step.sampling)
        return self._sample(hidden, results) if results else StepResult(None, None)

    def read(self, result: StepResult, count: int) -> list[int]:
        """The first `count` sampled tokens, on the host. The only place where the engine waits for the device."""
        return [] if result.tokens is None else jax.device_get(result.tokens)[:count].tolist()

    def close(self) -> None:
        """Free weights and caches on the device, and drop the executables."""
        self.executor.close()
        self.programs.clear()

    def _admission(self, step: Step) -> np.ndarray:
        return pack_rows(step.admitted, self.rows)

    def _body(self, step: Step) -> ProgramKey:
        if step.is_decode:
            return ProgramKey("decode", pick(self.buckets.decode, step.num_tokens))
        return ProgramKey("mixed", pick(self.buckets.tokens, step.num_tokens))

    def _sample(self, body_results: dict[str, Any], count: int) -> StepResult:
        key = ProgramKey("tail", pick(self.buckets.tails, count))
        arguments = {name: body_results[name] for name in ("hidden", "samples")}
        tail = self.executor.run(self.programs[key], arguments)
        tail["tokens"].copy_to_host_async()
        self.counts.programs[str(key)] += 1
        return StepResult(tail["tokens"], tail["logits"])

    def _count(self, key: ProgramKey, step: Step) -> None:
        self.counts.programs[str(key)] += 1
        self.counts.tokens += step.num_tokens
        self.counts.prefill_tokens += step.num_tokens - step.num_decode
        self.counts.padding += key.bucket - step.num_tokens

    def _compile(self, weights: Weights, options: EngineOptions):
        state = state_avals(self.kinds, self.pages, self.rows, self.max_model_len)
        op_by_op = self.granularity == "off"
        planned = plan_programs(self.model, self.buckets, self.rows, "piece" if op_by_op else self.granularity)
        report = None
        if op_by_op:
            executables = eager_programs(planned, self.model.dtype)
        else:
            executables, report = compile_programs(planned, state, self.mesh, self.model.dtype)
        executor = Executor(self.mesh, weights, allocate(state, self.mesh))
        programs = {p.key: executor.bind(p.links, executables[p.key], p.results) for p in planned}
        return executor, programs, report


def _model(config: ModelConfig, options: EngineOptions, on_gpu: bool) -> Model:
    dtype = options.dtype if options.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    return abstract_model(config, dtype, Ops.for_target("gpu" if on_gpu else "cpu"), TensorParallel(options.tp))


def _weights(model: Model, folder: Path, options: EngineOptions, mesh: Mesh) -> Weights:
    return random_weights(model, mesh) if options.load_format == "dummy" else load_weights(model, folder, mesh)


def _cache_pages(kinds: Sequence[PageKind], options: EngineOptions, wanted_tokens: int, mesh: Mesh) -> dict[str, int]:
    """Pages per kind: for kv_tokens, else for `wanted_tokens` as far as memory allows."""
    if options.kv_tokens is not None:
        tokens = options.kv_tokens
    else:
        token_bytes = sum(kind.page_bytes / kind.page_tokens for kind in kinds)
        tokens = min(wanted_tokens, int(_cache_bytes(options, mesh) / token_bytes))
    if tokens < 1:
        raise OptionError(
            "No memory is left for the cache after loading the weights. Raise gpu_memory_fraction "
            f"({options.gpu_memory_fraction}), split the model over more devices, or set kv_tokens."
        )
    return {kind.name: kind.pages_for(tokens) for kind in kinds}


def _cache_bytes(options: EngineOptions, mesh: Mesh) -> int:
    """Bytes for the cache on each device: on GPUs what the memory fraction leaves beside weights and a reserve."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(one is None for one in stats):
        return CPU_CACHE_BYTES
    free = (int(one["bytes_limit"] * options.gpu_memory_fraction) - one["bytes_in_use"] for one in stats)
    return min(free) - GPU_RESERVE_BYTES


def allocate(state: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Device arrays of zeros for the abstract `state`."""
    placed = {
        name: jax.tree.map(lambda _, name=name: NamedSharding(mesh, value_partition(name)), value)
        for name, value in state.items()
    }
    make = jax.jit(lambda: jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), state), out_shardings=placed)
    return make()
