"""How a server ends: by signal, by the death of its engine, by the death of its HTTP process."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve.conftest import Start
from tests.serve.server_process import ServerProcess, is_running, wait_until
from tests.serve.sse import DONE, read_events

FINISHES = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
LONG = FINISHES | {"max_tokens": 2000}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def check_nothing_left(server: ServerProcess, engine_pid: int) -> None:
    wait_until(lambda: not is_running(engine_pid), "the engine to end")
    wait_until(lambda: not list(server.socket_parent.glob("dsjax-*")), "the sockets to be removed")


def test_sigterm_lets_open_requests_finish(start: Start):
    server = start().wait_ready()
    engine = server.engine_pid()
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=FINISHES, timeout=120)
        wait_until(lambda: client.get("/health").json()["running"] == 1, "the first request")
        with client.stream("POST", "/v1/completions", json=FINISHES | STREAM) as response:
            events = read_events(response)
            next(events)
            server.signal(signal.SIGTERM)
            server.search_log("open requests have 30 s to finish")
            *_, usage, done = events
        assert done == DONE
        assert usage["usage"]["completion_tokens"] == FINISHES["max_tokens"]
        assert whole.result().json()["usage"]["completion_tokens"] == FINISHES["max_tokens"]
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert "Traceback" not in server.log
    check_nothing_left(server, engine)


@pytest.mark.parametrize(("drain_timeout", "signals"), [("0.2", 1), ("60", 2)])
def test_requests_that_cannot_finish_are_told(start: Start, drain_timeout: str, signals: int):
    """After the drain timeout, and after a second signal."""
    server = start("demo", "--drain-timeout", drain_timeout).wait_ready()
    engine = server.engine_pid()
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG | STREAM) as response:
        events = read_events(response)
        next(events)
        for _ in range(signals):
            server.signal(signal.SIGINT)
            server.search_log(f"open requests have {drain_timeout} s to finish")
        *_, last = events
    assert last["error"]["code"] == "shutting_down"
    assert server.wait() == 0
    assert "Traceback" not in server.log
    check_nothing_left(server, engine)


def test_death_of_the_engine(start: Start):
    server = start().wait_ready()
    engine = server.engine_pid()
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=120)
        with client.stream("POST", "/v1/completions", json=LONG | STREAM) as response:
            events = read_events(response)
            next(events)
            wait_until(lambda: httpx.get(f"{server.url}/health").json()["running"] == 2, "both requests")
            os.kill(engine, signal.SIGKILL)
            *_, last = events
        assert last["error"]["code"] == "engine_dead"
        assert "signal 9" in last["error"]["message"]
        assert whole.result().status_code == 503
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["type"] == "server_error"
        late = client.post("/v1/completions", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
    assert server.wait() == 1
    assert "ERROR http: The engine process ended: it was killed by signal 9" in server.log
    check_nothing_left(server, engine)


def test_the_engine_does_not_outlive_the_http_process(start: Start):
    server = start()
    engine = server.engine_pid()
    wait_until(lambda: list(server.socket_parent.glob("dsjax-*/engine")), "the socket")
    server.search_log("INFO engine: ")  # it is past its imports
    server.signal(signal.SIGKILL)
    server.wait()
    check_nothing_left(server, engine)


def test_sigterm_while_starting(start: Start):
    server = start()
    engine = server.engine_pid()
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in server.log
    check_nothing_left(server, engine)
