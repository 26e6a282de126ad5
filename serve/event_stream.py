"""Answers as server-sent events."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dsjax.errors import DsjaxError
from dsjax.serve.answers import Answers, Piece
from dsjax.serve.disconnect import ClientDisconnected, until_disconnect
from dsjax.serve.errors import describe_error

logger = logging.getLogger("dsjax")


class EventStream(Response):
    """Sends `events` and then [DONE]; an error on the way becomes the last event. Closes `answers` at the end.

    A client that leaves stops it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], answers: Answers):
        # x-accel-buffering: nginx would hold back small pieces
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._answers = events, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._answers), contextlib.suppress(ClientDisconnected):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._lines()) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": f"data: {line}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _lines(self) -> AsyncGenerator[str]:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for line in events:
                    yield line
        except Exception as error:  # the status is sent: all that is left is to say it in the stream
            if not isinstance(error, DsjaxError):
                logger.exception("A stream failed")
            yield json.dumps(describe_error(error)[1])
        else:
            yield "[DONE]"


async def piece_event(piece: Piece, chunk_of: Callable[[Piece], BaseModel], with_usage: bool) -> str:
    """The event that `chunk_of` makes of `piece`, in a thread if it is large: prompts' log-probabilities are."""

    def build() -> str:
        return event(chunk_of(piece), with_usage)

    return await asyncio.to_thread(build) if piece.is_large else build()


def event(chunk: BaseModel, with_usage: bool) -> str:
    """`chunk` as JSON; its usage field is there only in streams that end with token counts."""
    return chunk.model_dump_json(exclude=None if with_usage else {"usage"})
