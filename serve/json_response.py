"""Large answers as JSON, without keeping others waiting."""

import asyncio
from collections.abc import Callable

from fastapi import Response
from pydantic import BaseModel


async def json_response(build: Callable[[], BaseModel]) -> Response:
    """The response with the body that `build` makes, in a thread: log-probabilities can be many megabytes."""
    content = await asyncio.to_thread(lambda: build().model_dump_json())
    return Response(content, media_type="application/json")
