"""The engine: scheduler and runner in step. Results are read one step behind: the device need not wait for the host."""

from collections import deque
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from dsjax.config import ModelConfig
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Limits, Request
from dsjax.engine.runner import Runner, StepCounts, StepResult
from dsjax.engine.sampling_params import SamplingParams
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
            raise self._die("there are open requests, but none of them can run")
        return []

    def logits(self, tokens: list[int], chunk_tokens: int | None = None) -> np.ndarray:
        """Teacher-forced logits after every token of `tokens`: float32 [len(tokens), V], through the compiled programs.

        `chunk_tokens` cuts the tokens into chunks of that size, at most (and by default) max_num_seqs. Raises
        OptionError for another size or while requests are open, RequestError for tokens that are no prompt.
        """
        self._check_alive()
        if self.scheduler.has_work:
            raise OptionError("logits needs an idle engine; let the open requests end first.")
        size = self.runner.rows if chunk_tokens is None else chunk_tokens
        if not 1 <= size <= self.runner.rows:
            raise OptionError(f"chunk_tokens is {chunk_tokens}, expected 1 to max_num_seqs ({self.runner.rows}).")
        while self._pending:
            self._collect_oldest()
        request = Request.create("logits", tokens, SamplingParams(temperature=0, max_tokens=1), self.limits)
        self.add(request)
        try:
            return np.concatenate(self._chunk_logits(request, size))
        finally:
            self.abort(request.id)

    def close(self) -> None:
        """Free all device memory. The engine cannot be used afterwards."""
        self._pending.clear()
        self._death = self._death or "The engine is closed; make a new one."
        self.runner.close()

    def _enqueue(self) -> bool:
        """Schedule and enqueue the next step, if there is one."""
        pending = self._dispatch_next()
        if pending is not None:
            self._pending.append(pending)
        return pending is not None

    def _dispatch_next(self, step_tokens: int | None = None, collect_all: bool = False) -> _Pending | None:
        """Requests are counted forward when they are scheduled, so a step that is not enqueued ends the engine."""
        try:
            step = self.scheduler.schedule(step_tokens)
            return None if step is None else _Pending(step, self.runner.dispatch(step, collect_all))
        except jax.errors.JaxRuntimeError as error:
            raise self._die(f"the device failed: {error}") from error
        except BaseException as error:
            self._die(f"enqueuing a step failed ({type(error).__name__}: {error})")
            raise

    def _collect_oldest(self) -> list[Update]:
        step, result = self._pending[0]
        tokens = self._read(result, len(step.sampling))
        self._pending.popleft()
        return self.scheduler.collect(step, tokens)

    def _read(self, result: StepResult, count: int) -> list[int]:
        try:
            return self.runner.read(result, count)
        except jax.errors.JaxRuntimeError as error:
            raise self._die(f"the device failed: {error}") from error

    def _chunk_logits(self, request: Request, chunk_tokens: int) -> list[np.ndarray]:
        chunks = []
        while request.remaining:
            pending = self._dispatch_next(chunk_tokens, collect_all=True)
            assert pending is not None, "an idle engine can always admit a request that passed its limits"
            self._read(pending.result, 0)
            chunks.append(jax.device_get(pending.result.logits)[: pending.step.num_tokens])
        return chunks

    def _die(self, reason: str) -> EngineDeadError:
        self._death = f"The engine stopped: {reason}. Its requests are lost; make a new engine (restart the server)."
        return EngineDeadError(self._death)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
