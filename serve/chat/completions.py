"""POST /v1/chat/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from dsjax.engine.request import Request as EngineRequest
from dsjax.errors import RequestError
from dsjax.serve.answers import Answers, Piece
from dsjax.serve.chat.prompt import encode_chat
from dsjax.serve.context import Context, FromApp
from dsjax.serve.disconnect import until_disconnect
from dsjax.serve.event_stream import EventStream, event, piece_event
from dsjax.serve.json_response import json_response
from dsjax.serve.logprobs import chat_logprobs, prompt_logprobs
from dsjax.serve.protocol import ChatRequest
from dsjax.serve.request_id import request_id_of, request_ids
from dsjax.serve.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    PromptLogprobs,
)
from dsjax.serve.token_names import TokenNames
from dsjax.serve.unsupported import UNSUPPORTED_CHAT, check_extra_fields

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(body: ChatRequest, http: Request, context: FromApp) -> Response:
    """Answer a conversation, with n choices."""
    request_id = request_id_of(http, body.request_id)
    model = context.check_model(body.model)
    check_extra_fields(body.model_extra, UNSUPPORTED_CHAT)
    with_usage = body.include_usage
    requests = await asyncio.to_thread(_engine_requests, body, context, request_id)
    answers = Answers(context, requests, len(requests))
    form = _Form(body, context.token_names)
    names = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
    if body.stream:
        return EventStream(_events(answers, form, partial(ChatChunk, **names), with_usage), answers)
    with contextlib.closing(answers):
        pieces = await until_disconnect(http.receive, answers.whole())
    return await json_response(lambda: form.completion(pieces, usage=answers.usage, **names))


def _engine_requests(body: ChatRequest, context: Context, request_id: str) -> list[EngineRequest]:
    """n requests, checked. Takes a while for long conversations, so it runs in a thread."""
    limits = context.engine.limits
    try:
        prompt = encode_chat(body.messages, context.tokenizer, limits.max_model_len)
        answers = body.sampling_params().answers()
        return [
            EngineRequest.create(each_id, prompt, one, limits, body.priority or 0, body.timeout_s)
            for each_id, one in zip(request_ids(request_id, len(answers)), answers, strict=True)
        ]
    except RequestError as error:
        raise _in_chat_terms(error, body) from None


def _in_chat_terms(error: RequestError, body: ChatRequest) -> RequestError:
    """The engine speaks of "prompt", "max_tokens" and "logprobs"; say which field of this request is meant."""
    if error.param == "prompt":
        return RequestError(str(error), param="messages")
    newer = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    name = ({"logprobs": "top_logprobs"} | newer).get(error.param or "")
    return error if name is None else RequestError(str(error).replace(error.param or "", name), param=name)


class _Form:
    """Answers in the shape that the request asks for."""

    def __init__(self, body: ChatRequest, names: TokenNames):
        self._body, self._names = body, names

    def completion(self, pieces: list[Piece], **rest: Any) -> ChatCompletion:
        """All answers, complete."""
        choices = [
            ChatChoice(
                index=piece.index,
                message=AssistantMessage(content=piece.text),
                finish_reason=piece.finish_reason or "",
                logprobs=self._logprobs(piece),
            )
            for piece in pieces
        ]
        return ChatCompletion(choices=choices, prompt_logprobs=self.prompt_logprobs(pieces[0]), **rest)

    def chunk_choice(self, piece: Piece) -> ChatChunkChoice:
        """A piece of an answer."""
        content = {"content": piece.text} if piece.text or not piece.finish_reason else {}
        return ChatChunkChoice(
            index=piece.index, delta=content, finish_reason=piece.finish_reason, logprobs=self._logprobs(piece)
        )

    def prompt_logprobs(self, piece: Piece) -> PromptLogprobs | None:
        """Those of the prompt, once: with the first piece of the first answer."""
        count = self._body.prompt_logprobs
        if count is None or piece.index > 0 or piece.prompt is None:
            return None
        return prompt_logprobs(piece.prompt, count, self._names)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        count = self._body.alternatives
        return None if count is None else chat_logprobs(piece.tokens, count, self._names)


async def _events(answers: Answers, form: _Form, frame: partial[ChatChunk], with_usage: bool) -> AsyncGenerator[str]:
    for index in range(len(answers)):
        opening = ChatChunkChoice(index=index, delta={"role": "assistant", "content": ""})
        yield event(frame(choices=[opening]), with_usage)

    def chunk_of(piece: Piece) -> ChatChunk:
        return frame(choices=[form.chunk_choice(piece)], prompt_logprobs=form.prompt_logprobs(piece))

    async for piece in answers:
        yield await piece_event(piece, chunk_of, with_usage)
    if with_usage:
        yield event(frame(choices=[], usage=answers.usage), with_usage)
