"""POST /v1/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from fastapi import APIRouter, Request, Response

from dsjax.engine.request import Request as EngineRequest
from dsjax.errors import RequestError
from dsjax.serve.answers import Answers, Piece
from dsjax.serve.context import Context, FromApp
from dsjax.serve.disconnect import until_disconnect
from dsjax.serve.echo import Echo, echo_of
from dsjax.serve.event_stream import EventStream, event, piece_event
from dsjax.serve.json_response import json_response
from dsjax.serve.logprobs import completion_logprobs, prompt_logprobs
from dsjax.serve.protocol import CompletionRequest
from dsjax.serve.request_id import request_id_of, request_ids
from dsjax.serve.responses import Completion, CompletionChoice
from dsjax.serve.token_names import TokenNames
from dsjax.serve.unsupported import UNSUPPORTED_COMPLETION, check_extra_fields
from dsjax.tokenizer import encode_prompt

router = APIRouter()


@router.post("/v1/completions", response_model=Completion)
async def create_completion(body: CompletionRequest, http: Request, context: FromApp) -> Response:
    """Continue one or several prompts, with n choices each."""
    request_id = request_id_of(http, body.request_id)
    model = context.check_model(body.model)
    check_extra_fields(body.model_extra, UNSUPPORTED_COMPLETION)
    with_usage = body.include_usage
    requests, echoes = await asyncio.to_thread(_engine_requests, body, context, request_id)
    answers = Answers(context, requests, body.n or 1, echoes)
    frame = partial(Completion, id=f"cmpl-{request_id}", created=int(time.time()), model=model)
    choice_of = partial(_choice, body=body, names=context.token_names)
    if body.stream:
        return EventStream(_events(answers, choice_of, frame, with_usage), answers)
    with contextlib.closing(answers):
        pieces = await until_disconnect(http.receive, answers.whole())
    return await json_response(lambda: frame(choices=[choice_of(piece) for piece in pieces], usage=answers.usage))


def _engine_requests(
    body: CompletionRequest, context: Context, request_id: str
) -> tuple[list[EngineRequest], list[Echo] | None]:
    """n requests per prompt, all checked, and their echoes. Takes a while for long prompts, so it runs in a thread."""
    tokenizer, limits = context.tokenizer, context.engine.limits
    answers = body.sampling_params().answers()
    ids = iter(request_ids(request_id, len(body.prompt) * len(answers)))
    requests, echoes = [], []
    for place, prompt in enumerate(body.prompt):
        try:
            is_text = isinstance(prompt, str)
            tokens = encode_prompt(prompt, tokenizer, limits.max_model_len) if is_text else prompt
            requests += [
                EngineRequest.create(next(ids), tokens, one, limits, body.priority or 0, body.timeout_s)
                for one in answers
            ]
        except RequestError as error:
            which = f"prompt[{place}]: " if len(body.prompt) > 1 else ""
            raise RequestError(f"{which}{error}", error.param) from None
        if body.echo:
            echoes += [echo_of(prompt, tokens, tokenizer)] * len(answers)
    return requests, echoes or None


def _choice(piece: Piece, body: CompletionRequest, names: TokenNames) -> CompletionChoice:
    logprobs = prompt = None
    if body.logprobs is not None:
        logprobs = completion_logprobs(piece.tokens, body.logprobs, names)
    if body.prompt_logprobs is not None and piece.prompt is not None:
        prompt = prompt_logprobs(piece.prompt, body.prompt_logprobs, names)
    return CompletionChoice(
        index=piece.index,
        text=piece.text,
        finish_reason=piece.finish_reason,
        logprobs=logprobs,
        prompt_logprobs=prompt,
    )


async def _events(
    answers: Answers, choice_of: Callable[[Piece], CompletionChoice], frame: partial[Completion], with_usage: bool
) -> AsyncGenerator[str]:
    async for piece in answers:
        yield await piece_event(piece, lambda piece: frame(choices=[choice_of(piece)]), with_usage)
    if with_usage:
        yield event(frame(choices=[], usage=answers.usage), with_usage)
