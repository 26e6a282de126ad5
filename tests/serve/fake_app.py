"""The HTTP application with an engine that is plain Python, and says what a test needs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from dsjax.engine.request import Limits, Request
from dsjax.errors import DsjaxError, EngineDeadError
from dsjax.serve.app import build_app
from dsjax.serve.context import Context
from dsjax.serve.messages import Stats, TokenBatch
from dsjax.serve.request_group import RequestGroup
from dsjax.tokenizer import Tokenizer


class FakeEngine:
    """Answers with `items`: tokens, batches of tokens, or an error. The n-th request gets each n-th of several."""

    stats: Stats | None = None
    error: EngineDeadError | None = None
    limits = Limits(vocab_size=4096, max_model_len=100, cache_tokens=100)

    def __init__(self, *items: list[int] | TokenBatch | DsjaxError):
        self._items, self.opened, self.closed = items, [], 0

    @property
    def alive(self) -> bool:
        return self.error is None

    def open(self, requests: Sequence[Request]) -> RequestGroup:
        if self.error is not None:
            raise self.error
        self.opened += requests
        group = RequestGroup(requests[0].id, len(requests), self._close)
        for place, item in enumerate(self._items):
            if isinstance(item, list):
                is_last = place + len(requests) >= len(self._items)
                item = TokenBatch("x", item, "stop" if is_last else None)
            group.put(item if isinstance(item, DsjaxError) else (place % len(requests), item))
        return group

    def _close(self, _: RequestGroup) -> None:
        self.closed += 1


def call(engine: FakeEngine, path: str, tokenizer: Tokenizer | None = None, **body: Any) -> httpx.Response:
    """POST `body` (GET without one) to an app around `engine`."""

    async def send() -> httpx.Response:
        app = build_app(Context(engine, tokenizer, ("fake",)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await (client.post(path, json=body) if body else client.get(path))

    return asyncio.run(send())
