"""The engine: scheduler and runner in step. Results are read one step behind: the device need not wait for the host."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from dsjax.config import ModelConfig
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Limits, Request
from dsjax.engine.runner import Runner, StepCounts, StepResult
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduled import Step
from dsjax.engine.scheduler import Scheduler, Update
from dsjax.errors import EngineDeadError, OptionError
from dsjax.telemetry import count

logger = logging.getLogger("dsjax")

MOST_FAILURES = 3  # device failures in a row, without a step that succeeds, before the engine gives up


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
            rows=self.runner.blueprint.deployment.max_num_seqs,
            step_tokens=self.runner.buckets.step_tokens,
            eos_token_ids=config.eos_token_ids,
            prefix_cache=options.prefix_cache,
        )
        self._pending: deque[_Pending] = deque()
        self._failures = 0
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
        """Enqueue the next step, then read the tokens of the one before.

        A device failure loses the caches: they are made anew and open requests computed again. Raises EngineDeadError
        if that does not help. An interrupt while it waits for tokens loses nothing: the next call reads them.
        """
        self._check_alive()
        if expired := self.scheduler.expire(time.monotonic()):
            return expired
        updates = []
        try:
            updates = self._step()
        except jax.errors.JaxRuntimeError as error:
            self._recover(error)
        if not self.has_work:
            self._check_pages()
        return updates

    def logits(self, tokens: list[int], chunk_tokens: int | Sequence[int] | None = None) -> np.ndarray:
        """Teacher-forced logits after every token of `tokens`: float32 [len(tokens), V], through the compiled programs.

        `chunk_tokens` cuts the tokens into chunks of that size, at most (and by default) max_num_seqs, or into chunks
        of the sizes that it lists; a chunk of one token is a decode step. Raises OptionError for other sizes or while
        requests are open, RequestError for tokens that are no prompt.
        """
        self._check_alive()
        if self.scheduler.has_work:
            raise OptionError("logits needs an idle engine; let the open requests end first.")
        sizes = self._chunk_sizes(len(tokens), chunk_tokens)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)  # so that each token has its logits
        request = Request.create("logits", tokens, params, self.limits)
        try:
            while self._pending:
                self._collect_oldest()
            self.add(request)
            return np.concatenate([self._chunk_logits(size) for size in sizes])
        except jax.errors.JaxRuntimeError as error:
            raise self._die(f"the device failed: {error}") from error
        finally:
            self.abort(request.id)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.scheduler.forget_prefixes()

    def close(self) -> None:
        """Free all device memory. The engine cannot be used afterwards."""
        self._pending.clear()
        self._death = self._death or "The engine is closed; make a new one."
        self.runner.close()

    def _step(self) -> list[Update]:
        before = len(self._pending)
        with self._as_a_whole("enqueuing"):
            enqueued = self._dispatch_next()
            self._pending.extend([] if enqueued is None else [enqueued])
        if before:
            return self._collect_oldest()
        if self.scheduler.has_work and enqueued is None:
            raise self._die("there are open requests, but none of them can run")
        return []

    def _dispatch_next(self, step_tokens: int | None = None) -> _Pending | None:
        """Schedule and enqueue the next step, if there is one."""
        step = self.scheduler.schedule(step_tokens)
        return None if step is None else _Pending(step, self.runner.dispatch(step))

    def _collect_oldest(self) -> list[Update]:
        step, result = self._pending[0]
        picked = self.runner.read(result, step.picks)
        with self._as_a_whole("collecting"):
            self._pending.popleft()
            if picked:
                self._failures = 0  # a step without results may be one that a restart only repeats
            return self.scheduler.collect(step, picked)

    @contextmanager
    def _as_a_whole(self, action: str) -> Iterator[None]:
        """What scheduler and device must both do, or neither: anything but a device failure in between ends the engine.

        Requests are counted forward when they are scheduled, and changed one by one when results come.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except BaseException as error:
            self._die(f"{action} a step failed ({type(error).__name__}: {error})")
            raise

    def _chunk_sizes(self, tokens: int, chunk_tokens: int | Sequence[int] | None) -> Sequence[int]:
        largest = self.scheduler.rows
        size = largest if chunk_tokens is None else chunk_tokens
        sizes = size if isinstance(size, Sequence) else [size]
        if any(not 1 <= one <= largest for one in sizes):
            raise OptionError(f"chunk_tokens is {chunk_tokens}, expected 1 to max_num_seqs ({largest}).")
        if isinstance(size, int):
            return [min(size, tokens - begin) for begin in range(0, tokens, size)]
        if sum(sizes) != tokens:
            raise OptionError(f"The sizes in chunk_tokens add up to {sum(sizes)}, but there are {tokens} tokens.")
        return sizes

    def _chunk_logits(self, size: int) -> np.ndarray:
        with self._as_a_whole("enqueuing"):
            pending = self._dispatch_next(size)
        assert pending is not None, "an idle engine can always admit a request that passed its limits"
        return self.runner.logits(pending.result, pending.step.num_tokens)

    def _recover(self, error: Exception) -> None:
        """Make the caches anew after a failed device call; open requests are computed again from the beginning.

        Known tokens are kept, and the others sampled with the same noise.
        """
        self._failures += 1
        count("device_failures")
        if self._failures >= MOST_FAILURES:
            raise self._die(f"the device failed {self._failures} times in a row: {error}") from error
        logger.error("The device failed; caches are made anew and open requests computed again: %s", error)
        self._pending.clear()
        self.scheduler.restart()
        try:
            self.runner.renew_state()
        except jax.errors.JaxRuntimeError as second:
            raise self._die(f"the device failed and does not recover: {second}") from error

    def _check_pages(self) -> None:
        """At rest every page is free or cached; if not, there is an error in dsjax, which must not starve requests."""
        if lost := self.scheduler.lost_pages():
            count("lost_pages", lost)
            logger.error("%d pages of the cache were lost, which is an error in dsjax; the cache is emptied.", lost)
            self.scheduler.restart()

    def _die(self, reason: str) -> EngineDeadError:
        self._death = f"The engine stopped: {reason}. Its requests are lost; make a new engine (restart the server)."
        return EngineDeadError(self._death)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
