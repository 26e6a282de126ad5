"""The answers to one HTTP request: tokens from the engine as text, token counts, and a log line for each."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.request import Request
from dsjax.errors import DsjaxError
from dsjax.serve.context import Context
from dsjax.serve.echo import Echo
from dsjax.serve.messages import PromptResult, TokenBatch
from dsjax.serve.responses import PromptTokensDetails, Usage
from dsjax.serve.scored_prompts import ScoredPrompts
from dsjax.tokenizer import TextStream

logger = logging.getLogger("dsjax")

FEW_TOKENS = 64


class Token(NamedTuple):
    """A token of an answer or a prompt. `offset`: how many characters of the text come before it.

    `logprobs` is None if they were not asked for, and for the first token of a prompt.
    """

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass
class Piece:
    """A piece of answer `index`, or all of it; with an echo the prompt is the beginning of the answer.

    `prompt`: the tokens of the prompt, on the first piece, if their log-probabilities were asked for. `finish_reason`
    is set on the last one.
    """

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] | None = None
    finish_reason: str | None = None

    @property
    def is_large(self) -> bool:
        """Whether there is so much to write that others would have to wait for it."""
        return len(self.tokens) + len(self.prompt or ()) > FEW_TOKENS

    def extend(self, following: "Piece") -> None:
        """Append the next piece of the same answer."""
        self.text += following.text
        self.tokens += following.tokens
        self.prompt = self.prompt or following.prompt
        self.finish_reason = following.finish_reason


@dataclass
class _Answer:
    """One answer so far. `stream` is None for a model without tokenizer. `characters`: of its text."""

    index: int
    request: Request
    stream: TextStream | None
    echo: Echo | None = None
    characters: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None

    def take(self, batch: TokenBatch) -> Piece:
        """What `batch` adds to the answer."""
        piece = Piece(self.index, finish_reason=batch.finish_reason)
        if batch.prompt is not None:
            self._begin(piece, batch.prompt)
        logprobs = batch.logprobs or [None] * len(batch.token_ids)
        for token, one in zip(batch.token_ids, logprobs, strict=True):
            piece.tokens.append(Token(token, self.characters, one))
            self._add_text(piece, [token])
        if batch.finish_reason is not None:
            self._add_text(piece, [], last=True)
        self.output_tokens += len(batch.token_ids)
        return piece

    def _begin(self, piece: Piece, result: PromptResult) -> None:
        self.cached_tokens = result.cached_tokens
        tokens = self._prompt_tokens(result.logprobs or [])
        if result.logprobs is not None:
            piece.prompt = tokens
        if self.echo is not None:
            piece.text, piece.tokens = self.echo.text, list(tokens)
            self.characters = len(self.echo.text)

    def _prompt_tokens(self, logprobs: list[TokenLogprobs]) -> list[Token]:
        ids = self.request.prompt
        offsets = self.echo.offsets if self.echo is not None else [0] * len(ids)
        missing = len(ids) - 1 - len(logprobs)
        return list(map(Token, ids, offsets, [None, *logprobs, *[None] * missing]))

    def _add_text(self, piece: Piece, tokens: list[int], last: bool = False) -> None:
        if self.stream is not None:
            text = self.stream.push(tokens, last)
            piece.text += text
            self.characters += len(text)


class Answers:
    """Starts `requests` and gives their answers piece by piece. Always `close` it: that aborts what has not ended.

    Each prompt has `per_prompt` requests in a row. `echoes`: one per request, for answers that begin with the prompt.
    Raises EngineDeadError, DuplicateRequestError or RequestError, at once or while it is iterated.
    """

    def __init__(
        self, context: Context, requests: Sequence[Request], per_prompt: int = 1, echoes: Sequence[Echo] | None = None
    ):
        tokenizer = context.tokenizer
        self._per_prompt = per_prompt
        self._answers = [
            _Answer(index, request, tokenizer.stream() if tokenizer else None, echoes[index] if echoes else None)
            for index, request in enumerate(requests)
        ]
        self._scored = ScoredPrompts(requests, per_prompt)
        self._begin = time.monotonic()
        self._group = context.engine.open(requests)

    def __len__(self) -> int:
        return len(self._answers)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for received in self._group:
                for index, batch in self._scored.take(*received):
                    yield self._take(self._answers[index], batch)
        except DsjaxError:
            self._end_all("error")
            raise

    async def whole(self) -> list[Piece]:
        """Each answer in one piece, once all are complete."""
        answers = [Piece(index) for index in range(len(self))]
        async for piece in self:
            answers[piece.index].extend(piece)
        return answers

    @property
    def usage(self) -> Usage:
        """Token counts so far; a prompt counts once, however many answers it has."""
        first_of_each = self._answers[:: self._per_prompt]
        prompt = sum(len(answer.request.prompt) for answer in first_of_each)
        completion = sum(answer.output_tokens for answer in self._answers)
        cached = PromptTokensDetails(cached_tokens=sum(answer.cached_tokens for answer in first_of_each))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=cached,
        )

    def _take(self, answer: _Answer, batch: TokenBatch) -> Piece:
        piece = answer.take(batch)
        if batch.finish_reason is not None:
            self._end(answer, batch.finish_reason)
        return piece

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
