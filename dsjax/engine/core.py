"""The engine: scheduler and runner in step. Results are read one step behind, so the device never waits for the host."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from dsjax.config import ModelConfig
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Limits, Request, SamplingParams
from dsjax.engine.runner import Runner, StepCounts, StepResult
from dsjax.engine.scheduler import Scheduler, Step, Update
from dsjax.errors import EngineDeadError, OptionError


class _Pending(NamedTuple):
    """A step on the device whose tokens nobody has read."""

    step: Step
    result: StepResult


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread adds requests and steps."""

    def __init__(self, folder: Path, options: EngineOptions):
        config = ModelConfig.load(folder)
        self.runner = Runner(folder, config, options)
        self.scheduler = Scheduler(
            self.runner.kinds,
            self.runner.pages,
            rows=self.runner.rows,
            step_tokens=self.runner.buckets.tokens[-1],
            eos_token_ids=config.eos_token_ids,
        )
        self._pending: _Pending | None = None
        self._death: str | None = None

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work or self._pending is not None

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    @property
    def counts(self) -> StepCounts:
        """What has been computed so far."""
        return self.runner.counts

    def add(self, request: Request) -> None:
        """Queue a request made by Request.create. Raises RequestError (id in use) or EngineDeadError."""
        self._check_alive()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Update | None:
        """End a request at any point; its row and pages are free at once. None if it is not open."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[Update]:
        """Enqueue the next step, then read the tokens of the one before. Raises EngineDeadError if the device fails."""
        self._check_alive()
        try:
            scheduled = self.scheduler.schedule()
            before, self._pending = self._pending, None
            if scheduled is not None:
                self._pending = _Pending(scheduled, self.runner.dispatch(scheduled))
            return self._collect(before) if before else []
        except jax.errors.JaxRuntimeError as error:
            self._death = f"The engine stopped because the device failed: {error}"
            raise EngineDeadError(self._death) from error

    def logits(self, tokens: list[int], chunk_tokens: int | None = None) -> np.ndarray:
        """Teacher-forced logits after every token of `tokens`: float32 [len(tokens), V], through the compiled programs.

        `chunk_tokens` cuts the tokens into chunks of that size (at most max_num_seqs). The engine must be idle.
        """
        if self.has_work:
            raise OptionError("logits needs an idle engine; let the open requests end first.")
        size = min(chunk_tokens or self.runner.rows, self.runner.rows, self.scheduler.step_tokens)
        request = Request.create("logits", tokens, SamplingParams(temperature=0, max_tokens=1), self.limits)
        self.add(request)
        rows = []
        while request.remaining:
            step = self.scheduler.schedule(step_tokens=size)
            assert step is not None, "an idle engine can always admit a request that passed its limits"
            rows.append(jax.device_get(self.runner.dispatch(step, collect_all=True).logits)[: step.num_tokens])
        self.abort(request.id)
        return np.concatenate(rows)

    def close(self) -> None:
        """Free all device memory. The engine cannot be used afterwards."""
        self._pending = None
        self._death = self._death or "The engine is closed."
        self.runner.close()

    def _collect(self, pending: _Pending) -> list[Update]:
        tokens = self.runner.read(pending.result, len(pending.step.sampling))
        return self.scheduler.collect(pending.step, tokens)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
