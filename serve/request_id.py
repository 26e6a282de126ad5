"""Request ids: from the X-Request-Id header, the body, or made up; sent back as X-Request-Id with every response."""

import re
import uuid

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.errors import RequestError
from dsjax.serve.errors import error_response

HEADER = "X-Request-Id"
_VALID = re.compile(r"[\x21-\x7e]{1,128}")  # it goes into a header and into log lines


class RequestIdMiddleware:
    """Gives each request an id and puts it into the response's header. It wraps the whole app, its 500s included."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        try:
            if (given := Headers(scope=scope).get(HEADER)) is not None:
                state["request_id"] = checked_id(given)
        except RequestError as error:
            return await error_response(error)(scope, receive, send_with_id)
        await self._app(scope, receive, send_with_id)


def checked_id(request_id: str) -> str:
    """`request_id`, or RequestError if it cannot be one."""
    if not _VALID.fullmatch(request_id):
        raise RequestError(
            "The request id must be 1 to 128 printable ASCII characters without spaces.", param="request_id"
        )
    return request_id


def request_id_of(http: Request, from_body: str | None) -> str:
    """The id of this request: the header's, else that of the body, else the one made up for it."""
    if from_body is not None and HEADER not in http.headers:
        http.state.request_id = checked_id(from_body)
    return http.state.request_id


def request_ids(request_id: str, count: int) -> list[str]:
    """Ids for the engine's requests that a request with `request_id` becomes."""
    return [request_id, *(f"{request_id}-{place}" for place in range(1, count))]
