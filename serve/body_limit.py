"""A limit on the size of request bodies: nothing else runs while one is parsed."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.serve.errors import BodyTooLargeError

MAX_BODY_BYTES = 32 * 2**20


class BodyLimitMiddleware:
    """Raises BodyTooLargeError in whatever reads a body, once more than MAX_BODY_BYTES are announced or read."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        size = _announced(scope)
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            if size > MAX_BODY_BYTES:
                raise BodyTooLargeError(MAX_BODY_BYTES)
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise BodyTooLargeError(MAX_BODY_BYTES)
            return message

        await self._app(scope, receive_limited, send)


def _announced(scope: Scope) -> int:
    """The size that the Content-Length header gives, 0 without one. The HTTP parser has checked that it is a number."""
    return int(Headers(scope=scope).get("content-length", 0))
