"""One server of the demo model for all tests that do not end it, and a factory for those that do."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.server_process import ServerProcess

ROWS = 2
CONTEXT = 2048
FLAGS = ("--max-num-seqs", str(ROWS), "--token-buckets", "32", "--max-model-len", str(CONTEXT))

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def start_any(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """start_any(model, *flags): a server process that shares compiled executables with the others."""
    cache: Path = tmp_path_factory.mktemp("cache")
    started: list[ServerProcess] = []
    numbers = itertools.count()

    def start(model: str = "demo", *flags: str) -> ServerProcess:
        folder = tmp_path_factory.mktemp(f"server{next(numbers)}")
        started.append(ServerProcess(model, *FLAGS, "--cache-dir", str(cache), *flags, folder=folder))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(start_any: Start) -> ServerProcess:
    return start_any("demo", "--served-model-name", "demo", "--served-model-name", "org/demo").wait_ready()


@pytest.fixture
def start(start_any: Start, server: ServerProcess) -> Start:
    """Like start_any, once the shared server has filled the cache of executables."""
    return start_any


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
