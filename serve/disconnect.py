"""Noticing that the client has gone while its request is being served."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


class ClientDisconnected(Exception):
    """The client closed the connection before it had its answer."""


async def until_disconnect[T](receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects: ClientDisconnected then.

    The request's body must have been read already.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
