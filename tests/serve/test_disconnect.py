"""Clients that leave, and ids that are in use."""

import http.client
import json
import re
from typing import Any

import httpx
import pytest

from tests.serve.conftest import ROWS
from tests.serve.server_process import ServerProcess, wait_until
from tests.serve.sse import read_events

LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True}


class Caller:
    """A client that sends a request and does not wait for the answer."""

    def __init__(self, server: ServerProcess, request_id: str, body: dict[str, Any] = LONG):
        url = httpx.URL(server.url)
        self._connection = http.client.HTTPConnection(url.host, url.port)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def leave(self) -> None:
        self._connection.close()


def wait_for_load(client: httpx.Client, running: int, waiting: int = 0) -> None:
    """Wait until the engine has just these requests."""
    expected = {"status": "ok", "running": running, "waiting": waiting}
    wait_until(lambda: client.get("/health").json() == expected, f"{running} running, {waiting} waiting")


def check_aborted(server: ServerProcess, request_id: str) -> None:
    line = server.search_log(rf"request {re.escape(request_id)}: 3 prompt tokens, (\d+) output tokens, (\w+)")
    assert line[2] == "abort"
    assert int(line[1]) < LONG["max_tokens"]


def test_leaving_without_streaming(http: httpx.Client, server: ServerProcess):
    wait_for_load(http, 0)
    caller = Caller(server, "leaver")
    wait_for_load(http, 1)
    caller.leave()
    wait_for_load(http, 0)
    check_aborted(server, "leaver")


def test_leaving_a_stream(http: httpx.Client, server: ServerProcess):
    wait_for_load(http, 0)
    headers = {"X-Request-Id": "stream-leaver"}
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=headers) as response:
        assert response.headers["x-request-id"] == "stream-leaver"
        assert next(read_events(response))["choices"][0]["finish_reason"] is None
    wait_for_load(http, 0)
    check_aborted(server, "stream-leaver")


def test_leaving_several_prompts_and_the_queue(http: httpx.Client, server: ServerProcess):
    wait_for_load(http, 0)
    caller = Caller(server, "many", LONG | {"prompt": [[5, 6, 7]] * (ROWS + 2)})
    wait_for_load(http, ROWS, waiting=2)
    caller.leave()
    wait_for_load(http, 0)
    for request_id in ("many", *(f"many-{place}" for place in range(1, ROWS + 2))):
        check_aborted(server, request_id)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_duplicate_id(http: httpx.Client, server: ServerProcess, path: str, is_stream: bool):
    wait_for_load(http, 0)
    caller = Caller(server, "twin")
    wait_for_load(http, 1)
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": is_stream}
    second = http.post(path, json=body, headers={"X-Request-Id": "twin"})
    assert second.status_code == 409
    error = second.json()["error"]
    assert (error["param"], error["code"]) == ("request_id", "duplicate_request_id")
    assert "'twin' is still open" in error["message"]
    wait_for_load(http, 1)
    caller.leave()
    wait_for_load(http, 0)
    assert http.post(path, json=body, headers={"X-Request-Id": "twin"}).status_code == 200


def test_an_id_is_free_again_at_once(http: httpx.Client, server: ServerProcess):
    """Tokens of the first owner that are still on their way do not get into the second owner's answer."""
    alone = http.post("/v1/completions", json={"prompt": "The king", "temperature": 0, "max_tokens": 30}).json()
    for _ in range(5):
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "request_id": "reused"}) as response:
            next(read_events(response))
        body = {"prompt": "The king", "temperature": 0, "max_tokens": 30, "request_id": "reused"}
        second = wait_until(lambda body=body: _accepted(http, body), "the id to be free")
        assert second["choices"] == alone["choices"]


def _accepted(client: httpx.Client, body: dict[str, Any]) -> Any:
    response = client.post("/v1/completions", json=body)
    return response.json() if response.status_code == 200 else None
