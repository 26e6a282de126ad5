"""LLM: the offline API."""

import itertools
import logging
import operator
import os
import reprlib
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.aot.compile import CompileReport
from dsjax.aot.ladders import Buckets
from dsjax.aot.planner import PlannedProgram
from dsjax.checkpoint.resolve import resolve_model
from dsjax.engine.core import Engine
from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Request
from dsjax.engine.runner import StepCounts
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Update
from dsjax.errors import ConcurrentUseError, EngineDeadError, RequestError
from dsjax.tokenizer import TextStream, Tokenizer, encode_prompt

logger = logging.getLogger("dsjax")

Token = int | np.integer
Array = np.ndarray | jax.Array
Prompt = str | Sequence[Token] | Array


@dataclass(frozen=True)
class Completion:
    """A finished answer. `text` is None for a checkpoint without tokenizer.

    `finish_reason`: "stop", "length" or "timeout". `cached_tokens`: how many tokens of the prompt were in the cache.
    `logprobs`: one per token of the answer, if asked for. `prompt_logprobs`: one per token of the prompt, if asked for;
    the first, which nothing precedes, has None.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it is made; `finish_reason` is set on the last one.

    `index`: which of the n answers. `logprobs`: one per token, if asked for. `prompt_logprobs`: as those of Completion,
    on the first piece of answer 0.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """A model in this process.

        with LLM("demo") as llm:
            print(llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=20))[0].text)

    `model` is "demo", a checkpoint folder or a name in the Hugging Face cache; options are those of EngineOptions.
    Raises ConfigError, CheckpointError or OptionError. An LLM is for one thread: a call while it is at work in another
    raises ConcurrentUseError.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        begin = time.perf_counter()
        folder = resolve_model(model)
        self.tokenizer = Tokenizer.load(folder)
        self.engine = Engine(folder, EngineOptions.create(**options))
        self._numbers = itertools.count()
        self._updates: dict[str, deque[Update]] = {}
        self._streams: dict[str, TextStream] = {}
        self._at_work = threading.Lock()
        self._left: deque[str] = deque()  # ids of requests that nobody waits for any more
        logger.info("%s is ready after %.1f s", model, time.perf_counter() - begin)

    @property
    def programs(self) -> list[PlannedProgram]:
        """What the engine runs: a program per kind of body or tail and bucket, as its plan cuts it into chains."""
        return self.engine.runner.blueprint.planned

    @property
    def buckets(self) -> Buckets:
        """The sizes that programs are compiled for."""
        return self.engine.runner.buckets

    @property
    def counts(self) -> StepCounts:
        """What has been computed so far: runs per program, tokens, padding."""
        return self.engine.counts

    @property
    def compile_report(self) -> CompileReport | None:
        """What compiling took; None for plan "off"."""
        return self.engine.runner.compile_report

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Answer all `prompts` (text or token ids), batched. `params`: for all, or one each.

        The n answers to one prompt follow each other. `priority`: higher goes first, before other callers' requests.
        What is unfinished after `timeout_s` seconds ends with finish_reason "timeout". Every prompt is checked before
        any is started. Raises RequestError that names the prompt at fault.
        """
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [_or_default(params)] * len(batch)
        if len(each) != len(batch) or not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError(f"params must be SamplingParams, one for all or {len(batch)} of them.", param="params")
        pairs = enumerate(zip(batch, each, strict=True))
        of_prompts = [self._requests(place, *pair, priority, timeout_s) for place, pair in pairs]
        requests = list(itertools.chain(*of_prompts))
        with self._alone():
            try:
                for request in requests:
                    self._start(request)
                return [answer for of_prompt in of_prompts for answer in self._complete_all(of_prompt)]
            finally:
                self._leave(requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generator[Delta]:
        """Answer one prompt, piece by piece, the n answers side by side. Leaving the iterator early aborts them.

        `priority` and `timeout_s` are as for `generate`; the time counts from this call.
        """
        params = _or_default(params)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}, expected SamplingParams.", param="params")
        return self._run(self._requests(0, prompt, params, priority, timeout_s))

    def logits(self, token_ids: Sequence[Token] | Array, chunk_tokens: int | Sequence[int] | None = None) -> np.ndarray:
        """Logits after every token of `token_ids`, float32 [len(token_ids), V]: see Engine.logits."""
        if isinstance(token_ids, str):
            raise RequestError("logits takes token ids; llm.tokenizer.encode makes them of text.", param="prompt")
        with self._alone():
            return self.engine.logits(_as_ids(token_ids), chunk_tokens)

    def close(self) -> None:
        """Free all device memory of this model."""
        with self._alone():
            self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Whatever uses the engine does so in here. Raises ConcurrentUseError if somebody else does."""
        if not self._at_work.acquire(blocking=False):
            raise ConcurrentUseError(
                "This LLM is at work in another thread. Use it from one thread; to send it requests from several, run "
                "`dsjax serve`."
            )
        try:
            self._abort_left()
            yield
        finally:
            self._abort_left()
            self._at_work.release()

    def _requests(
        self, place: int, prompt: Prompt, params: SamplingParams, priority: int, timeout_s: float | None
    ) -> list[Request]:
        """A request for each answer to the prompt at `place`."""
        limits = self.engine.limits
        try:
            is_text = isinstance(prompt, str)
            ids = encode_prompt(prompt, self.tokenizer, limits.max_model_len) if is_text else _as_ids(prompt)
            return [
                Request.create(f"llm-{next(self._numbers)}", ids, one, limits, priority, timeout_s)
                for one in params.answers()
            ]
        except RequestError as error:
            raise RequestError(f"Prompt {place}: {error}", param=error.param) from None

    def _run(self, requests: list[Request]) -> Generator[Delta]:
        try:
            with self._alone():
                for request in requests:
                    self._start(request)
            deltas = self._deltas(requests)
            while True:
                with self._alone():
                    delta = next(deltas, None)
                if delta is None:
                    return
                yield delta
        finally:
            self._leave(requests)

    def _start(self, request: Request) -> None:
        self.engine.add(request)
        self._updates[request.id] = deque()
        if self.tokenizer is not None:
            self._streams[request.id] = self.tokenizer.stream()

    def _complete_all(self, requests: list[Request]) -> list[Completion]:
        """The answers to one prompt, whose log-probabilities come with the first."""
        answers = [self._complete(request) for request in requests]
        return [replace(answer, prompt_logprobs=answers[0].prompt_logprobs) for answer in answers]

    def _complete(self, request: Request) -> Completion:
        deltas = list(self._deltas([request]))
        text = None if self.tokenizer is None else "".join(delta.text or "" for delta in deltas)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [one for delta in deltas for one in delta.logprobs or ()]
        return Completion(
            request.prompt,
            request.outputs,
            text,
            deltas[-1].finish_reason or "",
            logprobs,
            deltas[0].prompt_logprobs,
            request.cached_tokens or 0,
        )

    def _deltas(self, requests: list[Request]) -> Generator[Delta]:
        """Step the engine until `requests` have ended; other requests' answers are kept for whoever waits for them."""
        unfinished, begun = dict(enumerate(requests)), set()
        while unfinished:
            ready = [index for index, request in unfinished.items() if self._updates[request.id]]
            if not ready:
                self._step()
            for index in ready:
                update = self._updates[requests[index].id].popleft()
                yield self._delta(index, update, is_first=index not in begun)
                begun.add(index)
                if update.finish_reason is not None:
                    del unfinished[index]

    def _delta(self, index: int, update: Update, is_first: bool) -> Delta:
        request, is_last = update.request, update.finish_reason is not None
        prompt_logprobs = None
        if is_first and request.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *request.prompt_logprobs]
        text = None if self.tokenizer is None else self._streams[request.id].push(update.tokens, is_last)
        return Delta(update.tokens, text, update.finish_reason, index, update.logprobs, prompt_logprobs)

    def _step(self) -> None:
        if not self.engine.has_work:
            raise EngineDeadError("An answer was lost when the engine was interrupted; ask again.")
        for update in self.engine.step():
            if update.request.id in self._updates:
                self._updates[update.request.id].append(update)

    def _leave(self, requests: list[Request]) -> None:
        """Nobody waits for `requests` any more: abort them, at once or when whoever uses the engine is done.

        A stream may be left at any moment, from any thread: that is when Python finds that nobody holds it.
        """
        self._left.extend(request.id for request in requests)
        with suppress(ConcurrentUseError), self._alone():
            pass

    def _abort_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self.engine.abort(request_id)
            self._updates.pop(request_id, None)
            self._streams.pop(request_id, None)


def _or_default(params: Any) -> Any:
    return SamplingParams() if params is None else params


def _as_batch(prompts: Any) -> list[Any]:
    """A list of prompts, from one prompt or several. Raises RequestError if it is neither."""
    if not _is_prompt(prompts):
        raise RequestError(
            f"prompts is {reprlib.repr(prompts)}, expected text, token ids, or a list of either.", param="prompt"
        )
    if isinstance(prompts, str):
        return [prompts]
    return list(prompts) if len(prompts) == 0 or _is_prompt(prompts[0]) else [prompts]


def _is_prompt(value: Any) -> bool:
    """Whether `value` has the form of a prompt or of several: a single token has not, nor have bytes."""
    if isinstance(value, Array):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def _as_ids(prompt: Any) -> list[int]:
    """Token ids as Python integers. Raises RequestError for what is no sequence of integers."""
    if not _is_prompt(prompt):
        raise RequestError(f"the prompt is {reprlib.repr(prompt)}, expected text or token ids.", param="prompt")
    if isinstance(prompt, Array):
        if prompt.ndim != 1 or not jnp.issubdtype(prompt.dtype, jnp.integer):
            kind = f"an array of shape {prompt.shape} and dtype {prompt.dtype}"
            raise RequestError(f"the prompt is {kind}, expected integers in one dimension.", param="prompt")
        return np.asarray(prompt).tolist()
    return [_as_id(place, token) for place, token in enumerate(prompt)]


def _as_id(place: int, token: Any) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # of Python, NumPy or JAX
    except TypeError:
        pass
    raise RequestError(f"Token {reprlib.repr(token)} at place {place} of the prompt is no integer.", param="prompt")
