"""POST /v1/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial

from fastapi import APIRouter, Request, Response

from dsjax.engine.request import Request as EngineRequest
from dsjax.errors import RequestError
from dsjax.serve.answers import Answers
from dsjax.serve.context import Context, FromApp
from dsjax.serve.disconnect import until_disconnect
from dsjax.serve.event_stream import EventStream, event
from dsjax.serve.protocol import Completion, CompletionChoice, CompletionRequest
from dsjax.serve.request_id import request_id_of
from dsjax.serve.unsupported import UNSUPPORTED_COMPLETION, check_extra_fields
from dsjax.tokenizer import encode_prompt

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", response_model=Completion)
async def create_completion(body: CompletionRequest, http: Request, context: FromApp) -> Response | Completion:
    """Continue one or several prompts; one choice each."""
    request_id = request_id_of(http, body.request_id)
    model = context.check_model(body.model)
    check_extra_fields(body.model_extra, UNSUPPORTED_COMPLETION)
    with_usage = body.include_usage
    requests = await asyncio.to_thread(_engine_requests, body, context, request_id)
    answers = Answers(context, requests)
    frame = partial(Completion, id=f"cmpl-{request_id}", created=int(time.time()), model=model)
    if body.stream:
        return EventStream(_events(answers, frame, with_usage), answers)
    with contextlib.closing(answers):
        texts = await until_disconnect(http.receive, answers.texts())
    choices = [CompletionChoice(index=i, text=text, finish_reason=why) for i, (text, why) in enumerate(texts)]
    return frame(choices=choices, usage=answers.usage)


def _engine_requests(body: CompletionRequest, context: Context, request_id: str) -> list[EngineRequest]:
    """One request per prompt, all checked. Takes a while for long prompts, so it runs in a thread."""
    tokenizer, limits = context.tokenizer, context.engine.limits
    params = body.sampling_params(DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    ids = [request_id, *(f"{request_id}-{place}" for place in range(1, len(body.prompt)))]
    requests = []
    for place, (each_id, prompt) in enumerate(zip(ids, body.prompt, strict=True)):
        try:
            is_text = isinstance(prompt, str)
            tokens = encode_prompt(prompt, tokenizer, limits.max_model_len) if is_text else prompt
            requests.append(EngineRequest.create(each_id, tokens, params, limits))
        except RequestError as error:
            which = f"prompt[{place}]: " if len(ids) > 1 else ""
            raise RequestError(f"{which}{error}", error.param) from None
    return requests


async def _events(answers: Answers, frame: partial[Completion], with_usage: bool) -> AsyncGenerator[str]:
    async for delta in answers:
        choice = CompletionChoice(index=delta.index, text=delta.text, finish_reason=delta.finish_reason)
        yield event(frame(choices=[choice]), with_usage)
    if with_usage:
        yield event(frame(choices=[], usage=answers.usage), with_usage)
