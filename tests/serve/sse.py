"""Reading server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

DONE = "[DONE]"


def read_events(response: httpx.Response) -> Iterator[Any]:
    """The JSON of each event, and DONE."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield DONE if data == DONE else json.loads(data)


def stream(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    """All events of a streamed request."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(read_events(response))
