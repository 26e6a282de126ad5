"""The runner: the device's side of the engine. It turns a scheduled step into calls of compiled programs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dsjax.aot.compile import count_compiles, keep_executables
from dsjax.aot.ladders import pick
from dsjax.aot.planner import ProgramKey, body_shape, constraint_shape
from dsjax.cache.kinds import PageKind
from dsjax.checkpoint.load import load_weights, random_weights
from dsjax.config import ModelConfig
from dsjax.engine.blueprint import Blueprint
from dsjax.engine.logprobs import Picked, TokenLogprobs
from dsjax.engine.options import EngineOptions, executables_folder
from dsjax.engine.packing import pack_constraints, pack_rows, pack_step
from dsjax.engine.request import Limits
from dsjax.engine.scheduled import Admission, Pick, Step
from dsjax.errors import OptionError
from dsjax.segments import Executor, allocate
from dsjax.step.logprobs import Logprobs


class StepResult(NamedTuple):
    """What a step leaves on the device.

    `hidden` [B, D] is there for every step. `tokens` int32 [R] is None if the step has no picks, `logprobs` if none of
    them asks for any.
    """

    hidden: jax.Array
    tokens: jax.Array | None = None
    logprobs: Logprobs | None = None


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
        self.blueprint = blueprint = Blueprint.draw(config, options)
        self.pages, self.buckets = blueprint.pages, blueprint.deployment.buckets
        self.rows = self.buckets.rows
        model, mesh = blueprint.model, blueprint.mesh
        if options.plan != "off":
            keep_executables(executables_folder(options))
        self.counts = StepCounts()
        with _out_of_memory_explained():
            dummy = options.load_format == "dummy"
            weights = random_weights(model, mesh) if dummy else load_weights(model, folder, mesh)
            executables, self.compile_report = blueprint.compile()
            self.executor = Executor(mesh, weights, allocate(blueprint.state, mesh))
        self.programs = {p.key: self.executor.bind(p.links, executables[p.key], p.results) for p in blueprint.planned}

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        return self.blueprint.model.page_kinds

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        cache_tokens = min(self.pages[kind.name] * kind.page_tokens for kind in self.kinds)
        return Limits(self.blueprint.model.config.vocab_size, self.blueprint.deployment.max_model_len, cache_tokens)

    def dispatch(self, step: Step) -> StepResult:
        """Enqueue `step`; returns at once."""
        if step.admitted:
            self._set_up(step.admitted)
        key = self._body(step)
        packed = pack_step(step, body_shape(key, self.rows), self.kinds)
        body = self.executor.run(self.programs[key], {"packed": packed})
        self._count(key, step)
        return self._sample(body, step.picks) if step.picks else StepResult(body["hidden"])

    def read(self, result: StepResult, picks: Sequence[Pick]) -> list[Picked]:
        """What the tail gave for `picks`, on the host, once the step is over.

        Here, and nowhere else in its loop, the engine waits for the device.
        """
        if result.tokens is None:
            result.hidden.block_until_ready()  # else a long prefill would be enqueued as a whole
            return []
        tokens = jax.device_get(result.tokens)[: len(picks)].tolist()
        if result.logprobs is None:
            return [Picked(token, None) for token in tokens]
        chosen, top_ids, top = (values.tolist() for values in jax.device_get(result.logprobs))
        places = zip(picks, tokens, chosen, top_ids, top, strict=False)
        return [Picked(token, _token_logprobs(pick, *logprobs)) for pick, token, *logprobs in places]

    def logits(self, result: StepResult, count: int) -> np.ndarray:
        """Logits float32 [count, V] at the first picks of a step. Waits for the device, so serving never calls it."""
        program = self.programs[ProgramKey("logits", self.rows)]
        return jax.device_get(self.executor.run(program, {"hidden": result.hidden})["logits"])[:count]

    def renew_state(self) -> None:
        """Make caches and row state anew, after a failed call may have lost them. May raise JaxRuntimeError."""
        self.executor.drop_state()
        self.executor.state = allocate(self.blueprint.state, self.blueprint.mesh)

    def close(self) -> None:
        """Free weights and caches on the device, and drop the executables."""
        self.executor.close()
        self.programs.clear()

    def _body(self, step: Step) -> ProgramKey:
        if step.is_decode or not self.buckets.tokens:
            return ProgramKey("decode", pick(self.buckets.decode, step.num_tokens))
        return ProgramKey("mixed", pick(self.buckets.tokens, step.num_tokens))

    def _set_up(self, admitted: Sequence[Admission]) -> None:
        """Enqueue what sets up the rows of newly admitted requests."""
        set_rows = self.programs[ProgramKey("set_rows", self.rows)]
        for packed in pack_rows(admitted, self.rows, self.kinds):
            self.executor.run(set_rows, {"packed": packed})
        set_constraints, config = self.programs[ProgramKey("set_constraints", 1)], self.blueprint.model.config
        for request in (admission.request for admission in admitted):
            if request.params.has_constraints:
                for packed in pack_constraints(request, constraint_shape(config), config.eos_token_ids):
                    self.executor.run(set_constraints, {"packed": packed})

    def _sample(self, body: dict[str, Any], picks: Sequence[Pick]) -> StepResult:
        key = ProgramKey("tail", pick(self.buckets.tails, len(picks)))
        tail = self.executor.run(self.programs[key], {name: body[name] for name in ("hidden", "samples")})
        with_logprobs = any(_wanted_logprobs(pick) is not None for pick in picks)
        result = StepResult(body["hidden"], tail["tokens"], tail["logprobs"] if with_logprobs else None)
        with jax.transfer_guard_device_to_host("allow"):  # it only starts the copies
            for values in jax.tree.leaves((result.tokens, result.logprobs)):
                values.copy_to_host_async()
        self.counts.programs[str(key)] += 1
        return result

    def _count(self, key: ProgramKey, step: Step) -> None:
        self.counts.programs[str(key)] += 1
        self.counts.tokens += step.num_tokens
        self.counts.prefill_tokens += step.num_tokens - step.num_decode
        self.counts.padding += key.bucket - step.num_tokens


def _wanted_logprobs(pick: Pick) -> int | None:
    """How many of the likeliest tokens the request of `pick` asks for there; None for no logprobs at all."""
    params = pick.request.params
    return params.logprobs if pick.target is None else params.prompt_logprobs


def _token_logprobs(pick: Pick, chosen: float, top_ids: Sequence[int], top: Sequence[float]) -> TokenLogprobs | None:
    wanted = _wanted_logprobs(pick)
    return None if wanted is None else TokenLogprobs(chosen, list(zip(top_ids, top, strict=True))[:wanted])


@contextmanager
def _out_of_memory_explained() -> Iterator[None]:
    """Turn the device's out-of-memory error at start into an OptionError that says what to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OptionError(
            "The device has too little memory for weights and cache. Lower kv_tokens, gpu_memory_fraction, "
            "max_num_seqs or max_batched_tokens, or split the model over more devices with tp. The device says: "
            f"{error}"
        ) from None
