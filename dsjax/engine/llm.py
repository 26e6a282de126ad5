"""LLM: the offline API."""

import itertools
import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsjax.checkpoint.resolve import resolve_model
from dsjax.engine.core import Engine
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Request, SamplingParams
from dsjax.errors import RequestError
from dsjax.tokenizer import TextStream, Tokenizer

logger = logging.getLogger("dsjax")

Prompt = str | Sequence[int] | np.ndarray


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
        self._answers: dict[str, list[Delta]] = {}
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
        batch = self._as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"There are {len(batch)} prompts, but {len(each)} sampling parameters.", param="params")
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

    def logits(self, token_ids: Sequence[int], chunk_tokens: int | None = None) -> np.ndarray:
        """Logits after every token of `token_ids`, float32 [len(token_ids), V]: see Engine.logits."""
        return self.engine.logits(list(token_ids), chunk_tokens)

    def close(self) -> None:
        """Free all device memory of this model."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _as_batch(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        return [prompts] if is_one else list(prompts)  # type: ignore[list-item]

    def _request(self, place: int, prompt: Prompt, params: SamplingParams) -> Request:
        try:
            ids = self._encode(prompt) if isinstance(prompt, str) else [_as_int(token) for token in prompt]
            return Request.create(next(self._ids), ids, params, self.engine.limits)
        except RequestError as error:
            raise RequestError(f"Prompt {place}: {error}", param=error.param) from None

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json; give token ids.", param="prompt")
        if not text:
            raise RequestError("the prompt is empty; give at least one token.", param="prompt")
        return self.tokenizer.encode(text)

    def _run(self, request: Request) -> Generator[Delta]:
        try:
            self._start(request)
            yield from self._deltas(request)
        finally:
            self._forget(request)

    def _start(self, request: Request) -> None:
        self.engine.add(request)
        self._answers[request.id] = []
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
            while not self._answers[request.id]:
                self._step()
            delta = self._answers[request.id].pop(0)
            finished = delta.finish_reason is not None
            yield delta

    def _step(self) -> None:
        for update in self.engine.step():
            if update.request.id in self._answers:
                text = self._text(update.request.id, update.tokens, update.finish_reason is not None)
                self._answers[update.request.id].append(Delta(update.tokens, text, update.finish_reason))

    def _text(self, request_id: str, tokens: list[int], finished: bool) -> str | None:
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        return stream.push(tokens) + (stream.finish() if finished else "")

    def _forget(self, request: Request) -> None:
        self.engine.abort(request.id)
        self._answers.pop(request.id, None)
        self._streams.pop(request.id, None)


def _as_int(token: Any) -> Any:
    """NumPy integers as Python ones; everything else is left for the request's own check."""
    return int(token) if isinstance(token, np.integer) else token
