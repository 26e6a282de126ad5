"""The engine: scheduler and runner in step. Results are read one step behind: the device need not wait for the host."""

from collections import deque
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
        self._pending: deque[_Pending] = deque()
        self._death: str | None = None

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work or bool(self._pending)

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
        """Enqueue the next step, then read the tokens of the one before. Raises EngineDeadError if the device fails.

        An interrupt while it waits for tokens loses nothing: the next call reads them.
        """
        self._check_alive()
        enqueued = self._enqueue()
        if len(self._pending) > enqueued:
            return self._collect_oldest()
        if self.scheduler.has_work and not enqueued:
            self._death = "The engine stopped: there are open requests, but none of them can run."
            raise EngineDeadError(self._death)
        return []

    def logits(self, tokens: list[int], chunk_tokens: int | None = None) -> np.ndarray:
        """Teacher-forced logits after every token of `tokens`: float32 [len(tokens), V], through the compiled programs.

        `chunk_tokens` cuts the tokens into chunks of that size (at most max_num_seqs). No request may be open.
        """
        if self.scheduler.has_work:
            raise OptionError("logits needs an idle engine; let the open requests end first.")
        largest = min(self.runner.rows, self.scheduler.step_tokens)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise OptionError(f"chunk_tokens is {chunk_tokens}, expected at least 1.")
        while self._pending:
            self._collect_oldest()
        request = Request.create("logits", tokens, SamplingParams(temperature=0, max_tokens=1), self.limits)
        self.add(request)
        try:
            return np.concatenate(self._chunk_logits(request, min(chunk_tokens or largest, largest)))
        finally:
            self.abort(request.id)

    def close(self) -> None:
        """Free all device memory. The engine cannot be used afterwards."""
        self._pending.clear()
        self._death = self._death or "The engine is closed."
        self.runner.close()

    def _enqueue(self) -> bool:
        """Schedule and enqueue the next step, if there is one."""
        try:
            scheduled = self.scheduler.schedule()
            if scheduled is not None:
                self._pending.append(_Pending(scheduled, self.runner.dispatch(scheduled)))
        except BaseException as error:  # requests are counted forward: without this step their tokens would be wrong
            self._death = f"The engine stopped while it enqueued a step ({type(error).__name__}: {error})."
            raise
        return scheduled is not None

    def _collect_oldest(self) -> list[Update]:
        step, result = self._pending[0]
        try:
            tokens = self.runner.read(result, len(step.sampling))
        except jax.errors.JaxRuntimeError as error:
            self._death = f"The engine stopped because the device failed: {error}"
            raise EngineDeadError(self._death) from error
        self._pending.popleft()
        return self.scheduler.collect(step, tokens)

    def _chunk_logits(self, request: Request, chunk_tokens: int) -> list[np.ndarray]:
        chunks = []
        while request.remaining:
            step = self.scheduler.schedule(chunk_tokens)
            assert step is not None, "an idle engine can always admit a request that passed its limits"
            result = self.runner.dispatch(step, collect_all=True)
            chunks.append(jax.device_get(result.logits)[: step.num_tokens])
        return chunks

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
