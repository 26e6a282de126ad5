"""Requests that belong together, and the tokens that the engine makes for them."""

import asyncio
from collections.abc import Callable

from dsjax.errors import DsjaxError
from dsjax.serve.messages import TokenBatch


class RequestGroup:
    """Requests that were opened together; iterating gives (index, TokenBatch) until all have ended.

    `id` is that of all of them to the client; `wire_ids` are those that the engine still works at. Raises
    EngineDeadError if the engine dies, RequestError if it refuses one of them. Always `close` it.
    """

    def __init__(self, id: str, count: int, close: Callable[["RequestGroup"], None]):
        self.id = id
        self.wire_ids: set[str] = set()
        self._unfinished, self._close = count, close
        self._queue: asyncio.Queue[tuple[int, TokenBatch] | DsjaxError] = asyncio.Queue()

    def __aiter__(self) -> "RequestGroup":
        return self

    async def __anext__(self) -> tuple[int, TokenBatch]:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, DsjaxError):
            raise item
        self._unfinished -= item[1].finish_reason is not None
        return item

    def put(self, item: tuple[int, TokenBatch] | DsjaxError) -> None:
        """Hand over the next result."""
        self._queue.put_nowait(item)

    def close(self) -> None:
        """Abort what has not ended."""
        self._close(self)
