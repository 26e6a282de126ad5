"""POST /v1/chat/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial

from fastapi import APIRouter, Request, Response

from dsjax.engine.request import Request as EngineRequest
from dsjax.errors import RequestError
from dsjax.serve.answers import Answers
from dsjax.serve.chat.prompt import encode_chat
from dsjax.serve.context import Context, FromApp
from dsjax.serve.disconnect import until_disconnect
from dsjax.serve.event_stream import EventStream, event
from dsjax.serve.protocol import AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest
from dsjax.serve.request_id import request_id_of
from dsjax.serve.unsupported import UNSUPPORTED_CHAT, check_extra_fields

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(body: ChatRequest, http: Request, context: FromApp) -> Response | ChatCompletion:
    """Answer a conversation."""
    request_id = request_id_of(http, body.request_id)
    model = context.check_model(body.model)
    check_extra_fields(body.model_extra, UNSUPPORTED_CHAT)
    with_usage = body.include_usage
    request = await asyncio.to_thread(_engine_request, body, context, request_id)
    answers = Answers(context, [request])
    names = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
    if body.stream:
        return EventStream(_events(answers, partial(ChatChunk, **names), with_usage), answers)
    with contextlib.closing(answers):
        [(text, why)] = await until_disconnect(http.receive, answers.texts())
    choice = ChatChoice(message=AssistantMessage(content=text), finish_reason=why)
    return ChatCompletion(**names, choices=[choice], usage=answers.usage)


def _engine_request(body: ChatRequest, context: Context, request_id: str) -> EngineRequest:
    """The request, checked. Takes a while for long conversations, so it runs in a thread."""
    limits = context.engine.limits
    newer_name = body.max_completion_tokens is not None
    try:
        prompt = encode_chat(body.messages, context.tokenizer, limits.max_model_len)
        params = body.sampling_params(body.max_completion_tokens if newer_name else body.max_tokens)
        return EngineRequest.create(request_id, prompt, params, limits)
    except RequestError as error:
        raise _in_chat_terms(error, newer_name) from None


def _in_chat_terms(error: RequestError, newer_name: bool) -> RequestError:
    """The engine speaks of "prompt" and "max_tokens"; say which field of this request is meant."""
    if error.param == "prompt":
        return RequestError(str(error), param="messages")
    if error.param == "max_tokens" and newer_name:
        return RequestError(str(error).replace("max_tokens", "max_completion_tokens"), param="max_completion_tokens")
    return error


async def _events(answers: Answers, frame: partial[ChatChunk], with_usage: bool) -> AsyncGenerator[str]:
    yield event(frame(choices=[ChatChunkChoice(delta={"role": "assistant", "content": ""})]), with_usage)
    async for delta in answers:
        content = {"content": delta.text} if delta.text or not delta.finish_reason else {}
        choice = ChatChunkChoice(delta=content, finish_reason=delta.finish_reason)
        yield event(frame(choices=[choice]), with_usage)
    if with_usage:
        yield event(frame(choices=[], usage=answers.usage), with_usage)
