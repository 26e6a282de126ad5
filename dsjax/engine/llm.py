"""LLM: the offline API."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsjax.checkpoint.resolve import resolve_model
from dsjax.engine.core import Engine
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Update
from dsjax.errors import EngineDeadError, RequestError
from dsjax.tokenizer import TextStream, Tokenizer, encode_prompt

logger = logging.getLogger("dsjax")

Token = int | np.integer
Prompt = str | Sequence[Token] | np.ndarray


@dataclass(frozen=True)
class Completion:
    """A finished answer. `text` is None for a checkpoint without tokenizer. `finish_reason`: "stop" or "length"."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it is made; `finish_reason` is set on the last one."""

    token_ids: list[int]
    text: str | None
    finish_reason: str | None


class LLM:
    """A model in this process.

        with LLM("demo") as llm:
            print(llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=20))[0].text)

    `model` is "demo" or a checkpoint folder; options are those of EngineOptions. Raises ConfigError, CheckpointError or
    OptionError. Not thread-safe.
    """

    def __init__(self, model: str | Path, **options: Any):
        begin = time.perf_counter()
        folder = resolve_model(model)
        self.tokenizer = Tokenizer.load(folder)
        self.engine = Engine(folder, EngineOptions.create(**options))
        self._ids = (f"llm-{number}" for number in itertools.count())
        self._updates: dict[str, deque[Update]] = {}
        self._streams: dict[str, TextStream] = {}
        logger.info("%s is ready after %.1f s", model, time.perf_counter() - begin)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer all `prompts` (text or token ids), batched. `params`: for all, or one each.

        Every prompt is checked before any is started. Raises RequestError that names the prompt at fault.
        """
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch) or not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError(f"params must be SamplingParams, one for all or {len(batch)} of them.", param="params")
        requests = [self._request(place, *pair) for place, pair in enumerate(zip(batch, each, strict=True))]
        try:
            for request in requests:
                self._start(request)
            return [self._complete(request) for request in requests]
        finally:
            for request in requests:
                self._forget(request)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """Answer one prompt, piece by piece. Leaving the iterator early aborts the request."""
        return self._run(self._request(0, prompt, params or SamplingParams()))

    def logits(self, token_ids: Sequence[Token] | np.ndarray, chunk_tokens: int | None = None) -> np.ndarray:
        """Logits after every token of `token_ids`, float32 [len(token_ids), V]: see Engine.logits."""
        return self.engine.logits(_as_ids(token_ids), chunk_tokens)

    def close(self) -> None:
        """Free all device memory of this model."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, place: int, prompt: Prompt, params: SamplingParams) -> Request:
        try:
            ids = encode_prompt(prompt, self.tokenizer) if isinstance(prompt, str) else _as_ids(prompt)
            return Request.create(next(self._ids), ids, params, self.engine.limits)
        except RequestError as error:
            raise RequestError(f"Prompt {place}: {error}", param=error.param) from None

    def _run(self, request: Request) -> Generator[Delta]:
        try:
            self._start(request)
            yield from self._deltas(request)
        finally:
            self._forget(request)

    def _start(self, request: Request) -> None:
        self.engine.add(request)
        self._updates[request.id] = deque()
        if self.tokenizer is not None:
            self._streams[request.id] = self.tokenizer.stream()

    def _complete(self, request: Request) -> Completion:
        deltas = list(self._deltas(request))
        text = None if self.tokenizer is None else "".join(delta.text or "" for delta in deltas)
        return Completion(request.prompt, request.outputs, text, deltas[-1].finish_reason or "")

    def _deltas(self, request: Request) -> Generator[Delta]:
        """Step the engine until `request` has ended; other requests' answers are kept for whoever waits for them."""
        finished = False
        while not finished:
            while not self._updates[request.id]:
                self._step()
            update = self._updates[request.id].popleft()
            finished = update.finish_reason is not None
            yield Delta(update.tokens, self._text(request, update.tokens, finished), update.finish_reason)

    def _step(self) -> None:
        if not self.engine.has_work:
            raise EngineDeadError("An answer was lost when the engine was interrupted; ask again.")
        for update in self.engine.step():
            if update.request.id in self._updates:
                self._updates[update.request.id].append(update)

    def _text(self, request: Request, tokens: list[int], last: bool) -> str | None:
        return None if self.tokenizer is None else self._streams[request.id].push(tokens, last)

    def _forget(self, request: Request) -> None:
        self.engine.abort(request.id)
        self._updates.pop(request.id, None)
        self._streams.pop(request.id, None)


def _as_batch(prompts: Any) -> list[Any]:
    """A list of prompts, from one prompt or several. Raises RequestError if it is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(f"prompts is {prompts!r}, expected text, token ids, or a list of either.", param="prompt")
    is_one = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | np.ndarray)
    return [prompts] if is_one else list(prompts)


def _as_ids(prompt: Any) -> list[Any]:
    """Token ids as a list, NumPy integers as Python ones; what is no integer is left for the request's own check."""
    if not isinstance(prompt, Sequence | np.ndarray):
        raise RequestError(f"the prompt is {prompt!r}, expected text or token ids.", param="prompt")
    return [int(token) if isinstance(token, np.integer) else token for token in prompt]
