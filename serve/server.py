"""One run of `dsjax serve`: the listening socket, the engine process, the HTTP server, and an orderly end."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from dsjax.engine.options import EngineOptions
from dsjax.serve.app import build_app
from dsjax.serve.context import Context
from dsjax.serve.engine_client import EngineClient
from dsjax.serve.errors import ShuttingDownError
from dsjax.serve.listening import bound_sockets, cannot_listen
from dsjax.tokenizer import Tokenizer

logger = logging.getLogger("dsjax")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH_NOTICE_S = 2.0  # /health says 503 for this long after the engine's death, then the server ends
CLOSE_GRACE_S = 2  # for connections to take their last bytes once open requests have failed


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen, what to call the model, how long open requests may take to finish at the end."""

    host: str
    port: int
    names: tuple[str, ...]
    drain_timeout_s: float


class Server:
    """Serves one model until a signal or the engine's death ends it."""

    def __init__(self, model_folder: Path, engine_options: EngineOptions, options: ServerOptions):
        self._begin = time.perf_counter()
        self._model_folder, self._engine_options, self._options = model_folder, engine_options, options
        self._http: _HttpServer | None = None
        self._work: asyncio.Task[int] | None = None
        self._signal: int | None = None
        self._cut: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """The exit code: 0 after an orderly stop, 1 if the engine died, 128 + signal if a signal cut it short.

        Raises DsjaxError if the server cannot start.
        """
        loop = asyncio.get_running_loop()
        self._work = asyncio.ensure_future(self._serve())
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            return 128 + self._signal
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def _serve(self) -> int:
        tokenizer = Tokenizer.load(self._model_folder)
        with bound_sockets(self._options.host, self._options.port) as listeners:
            engine = EngineClient(self._model_folder, self._engine_options, on_death=self._end_after_notice)
            try:
                await engine.start()
                context = Context(engine, tokenizer, self._options.names)
                self._http = self._http_server(context, engine)
                await self._http.serve(sockets=listeners)
                if self._cut is not None:  # all connections have ended in time; the engine may take longer to stop
                    self._cut.cancel()
            finally:
                await engine.close()
        return 0 if engine.error is None else 1

    def _http_server(self, context: Context, engine: EngineClient) -> "_HttpServer":
        config = uvicorn.Config(
            build_app(context),
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            timeout_graceful_shutdown=math.ceil(self._options.drain_timeout_s) + CLOSE_GRACE_S,
        )
        return _HttpServer(config, engine, self._announce, self._options)

    def _announce(self, port: int) -> None:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        seconds = time.perf_counter() - self._begin
        print(
            f"dsjax serves {self._options.names[0]} at http://{host}:{port} (ready after {seconds:.1f} s)", flush=True
        )

    def _stop(self, number: int) -> None:
        """The first signal lets open requests finish, the second fails them. Before the start one signal ends all."""
        assert self._work is not None, "signals are handled while there is work"
        self._signal = number
        if self._http is None:
            self._work.cancel()
        elif not self._http.should_exit:
            seconds = self._options.drain_timeout_s
            logger.info("Stopping: open requests have %g s to finish; signal again to stop at once.", seconds)
            self._http.should_exit = True
        else:
            self._http.give_up()
            self._cut = asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._work.cancel)

    def _end_after_notice(self) -> None:
        asyncio.get_running_loop().call_later(DEATH_NOTICE_S, self._end)

    def _end(self) -> None:
        if self._http is not None:
            self._http.should_exit = True


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal after a clean stop."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: EngineClient,
        announce: Callable[[int], None],
        options: ServerOptions,
    ):
        super().__init__(config)
        self._engine, self._announce, self._options = engine, announce, options

    def give_up(self) -> None:
        """Tell open requests that they will not be finished."""
        self._engine.fail_open_requests(
            ShuttingDownError("The server is stopping and cannot finish this request; send it again, elsewhere.")
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        port = sockets[0].getsockname()[1]
        try:
            await super().startup(sockets)
        except OSError as error:  # two servers may be bound to one address, but only one can listen
            raise cannot_listen(self._options.host, port, error) from None
        self._announce(port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._options.drain_timeout_s, self.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
