"""The answers to one HTTP request: tokens from the engine as text, token counts, and a log line for each."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from dsjax.engine.request import Request
from dsjax.errors import DsjaxError
from dsjax.serve.context import Context
from dsjax.serve.messages import TokenBatch
from dsjax.serve.protocol import Usage
from dsjax.tokenizer import TextStream

logger = logging.getLogger("dsjax")


@dataclass(frozen=True)
class Delta:
    """A piece of the answer to prompt `index`; `finish_reason` is set on the last one."""

    index: int
    text: str
    finish_reason: str | None


@dataclass
class _Answer:
    """One answer so far. `text` is None for a model without tokenizer."""

    request: Request
    text: TextStream | None
    output_tokens: int = 0
    finish_reason: str | None = None

    def take(self, batch: TokenBatch) -> str:
        """The text that the tokens of `batch` complete."""
        self.output_tokens += len(batch.token_ids)
        if self.text is None:
            return ""
        return self.text.push(batch.token_ids, last=batch.finish_reason is not None)


class Answers:
    """Starts `requests` and gives their answers piece by piece. Always `close` it: that aborts what has not ended.

    Raises EngineDeadError, DuplicateRequestError or RequestError, at once or while it is iterated.
    """

    def __init__(self, context: Context, requests: Sequence[Request]):
        tokenizer = context.tokenizer
        self._answers = [_Answer(request, tokenizer.stream() if tokenizer else None) for request in requests]
        self._begin = time.monotonic()
        self._group = context.engine.open(requests)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for index, batch in self._group:
                answer = self._answers[index]
                text = answer.take(batch)
                if batch.finish_reason is not None:
                    self._end(answer, batch.finish_reason)
                yield Delta(index, text, batch.finish_reason)
        except DsjaxError:
            self._end_all("error")
            raise

    async def texts(self) -> list[tuple[str, str]]:
        """Text and finish reason of each answer, once all are complete."""
        pieces: list[list[str]] = [[] for _ in self._answers]
        async for delta in self:
            pieces[delta.index].append(delta.text)
        return [("".join(each), answer.finish_reason or "") for each, answer in zip(pieces, self._answers, strict=True)]

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        prompt = sum(len(answer.request.prompt) for answer in self._answers)
        completion = sum(answer.output_tokens for answer in self._answers)
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

    def close(self) -> None:
        """Abort what has not ended."""
        self._end_all("abort")
        self._group.close()

    def _end_all(self, reason: str) -> None:
        for answer in self._answers:
            if answer.finish_reason is None:
                self._end(answer, reason)

    def _end(self, answer: _Answer, reason: str) -> None:
        answer.finish_reason = reason
        logger.info(
            "request %s: %d prompt tokens, %d output tokens, %s, %.2f s",
            answer.request.id,
            len(answer.request.prompt),
            answer.output_tokens,
            reason,
            time.monotonic() - self._begin,
        )
