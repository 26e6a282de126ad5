"""EngineClient against engine processes that say what the test needs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.errors import DsjaxError, EngineDeadError, RequestError
from dsjax.serve import engine_client
from dsjax.serve.engine_client import EngineClient
from dsjax.serve.errors import DuplicateRequestError
from dsjax.serve.request_group import RequestGroup
from tests.serve import fake_engine
from tests.serve.fake_engine import DIE, FAIL, LAST_WORDS, LIMITS, REFUSE


def request(request_id: str, *prompt: int) -> Request:
    return Request.create(request_id, list(prompt), SamplingParams(max_tokens=5), LIMITS)


async def tokens_of(group: RequestGroup) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    async for index, batch in group:
        found.setdefault(index, []).extend(batch.token_ids)
    group.close()
    return [found[index] for index in sorted(found)]


@asynccontextmanager
async def started(on_death: Callable[[], None] = lambda: None) -> AsyncIterator[EngineClient]:
    client = EngineClient(Path("model"), EngineOptions(), on_death)
    try:
        await client.start()
        yield client
    finally:
        await client.close()
    assert not client._socket_folder.exists()
    assert not client._process.is_alive()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run(test, engine): run an async test with `engine` in place of the real one."""

    def run(test: Callable[[], Coroutine[Any, Any, None]], engine=fake_engine.echo_engine) -> None:
        monkeypatch.setattr(engine_client, "run_engine", engine)
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


def test_requests_and_ids(run):
    async def test():
        async with started() as client:
            assert client.limits == LIMITS
            assert client.alive
            group = client.open([request("a", 1, 2, 3), request("a-1", 4, 5)])
            with pytest.raises(DuplicateRequestError, match="'a' is still open"):
                client.open([request("a", 6), request("a-1", 7)])
            other = client.open([request("b", 8)])
            assert await tokens_of(client.open([request("a-1", 7)])) == [[7]]  # a client's own
            assert await tokens_of(group) == [[1, 2, 3], [4, 5]]
            assert await tokens_of(other) == [[8]]
            with pytest.raises(RequestError, match=r"Not this one\.") as refused:
                await tokens_of(client.open([request("c", REFUSE)]))
            assert refused.value.param == "prompt"

    run(test)


def test_an_aborted_id_can_be_used_at_once(run):
    async def test():
        async with started() as client:
            first = client.open([request("same", LAST_WORDS, 1, 1)])
            await anext(first)
            first.close()
            assert await tokens_of(client.open([request("same", 2, 3)])) == [[2, 3]]
            assert await tokens_of(client.open([request("same", 4)])) == [[4]]

    run(test)


def test_an_id_is_in_use_until_all_its_requests_have_ended(run):
    async def test():
        async with started() as client:
            old = client.open([request("same", 1), request("same-1", LAST_WORDS)])
            async for index, batch in old:
                if (index, batch.finish_reason) == (0, "length"):
                    break
            with pytest.raises(DuplicateRequestError):
                client.open([request("same", 2)])
            old.close()
            new = client.open([request("same", LAST_WORDS)])
            old.close()
            with pytest.raises(DuplicateRequestError):
                client.open([request("same", 2)])
            new.close()
            assert await tokens_of(client.open([request("same", 2)])) == [[2]]
            assert not client._routes
            assert not client._groups

    run(test)


@pytest.mark.parametrize(
    ("kind", "message"), [(FAIL, "The device is on fire."), (DIE, "The engine process ended: its exit code is 3.")]
)
def test_death(run, kind: int, message: str):
    async def test():
        died = asyncio.Event()
        async with started(died.set) as client:
            waiting = client.open([request("waiting", LAST_WORDS)])
            await anext(waiting)
            killer = client.open([request("killer", kind)])
            for group in (waiting, killer):
                with pytest.raises(EngineDeadError) as death:
                    await tokens_of(group)
                assert str(death.value) == message
                group.close()
            await died.wait()
            assert not client.alive
            with pytest.raises(EngineDeadError):
                client.open([request("late", 1)])

    run(test)


def test_tokens_before_a_failure_arrive(run):
    async def test():
        async with started() as client:
            group = client.open([request("x", FAIL)])
            _, batch = await anext(group)
            assert batch.token_ids == [1]

    run(test)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (fake_engine.failing_engine, "^model is no good"),
        (fake_engine.mute_engine, "while starting: its exit code is 7"),
    ],
)
def test_failure_to_start(run, engine, message: str):
    async def test():
        with pytest.raises(DsjaxError, match=message):
            async with started():
                pass

    run(test, engine)


def test_stop_while_starting(run):
    async def test():
        async def start():
            async with started():
                pass

        starting = asyncio.ensure_future(start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(test)
