"""The HTTP process's end of the connection to the engine process: starting it, asking it, noticing its death."""

import asyncio
import itertools
import logging
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import zmq
import zmq.asyncio

from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Limits, Request
from dsjax.errors import DsjaxError, EngineDeadError, OptionError, RequestError
from dsjax.serve.engine_process import run_engine, socket_address
from dsjax.serve.errors import DuplicateRequestError
from dsjax.serve.messages import (
    Abort,
    AddRequest,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Stats,
    ToEngine,
    TokenBatch,
)
from dsjax.serve.request_group import RequestGroup

logger = logging.getLogger("dsjax")

STOP_TIMEOUT_S = 10.0  # for an engine that was told to stop
LAST_WORDS_S = 0.2  # how long the messages of a dead engine may take to arrive


class _Route(NamedTuple):
    """Where the tokens of an open request go."""

    group: RequestGroup
    index: int


class EngineClient:
    """An engine in a process of its own. `on_death` is called once if it ends unasked after it was ready."""

    def __init__(self, model_folder: Path, options: EngineOptions, on_death: Callable[[], None] = lambda: None):
        self._on_death = on_death
        self._socket_folder = Path(tempfile.mkdtemp(prefix="dsjax-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._bind()
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(self._socket_folder, model_folder, options), name="dsjax-engine"
        )
        self._exited = asyncio.Event()
        self._receiver: asyncio.Task[None] | None = None
        self._limits: Limits | None = None
        self._closing = False
        self._routes: dict[str, _Route] = {}
        self._groups: dict[str, RequestGroup] = {}  # by the client's id
        self._serial = itertools.count()
        self.error: EngineDeadError | None = None
        self.stats: Stats | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._limits is not None and self.error is None

    @property
    def limits(self) -> Limits:
        """What the engine can serve; known once it has started."""
        assert self._limits is not None, "the engine has not started"
        return self._limits

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises DsjaxError if the engine cannot be built."""
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._note_exit)
        match await self._first_message():
            case Ready(limits=limits):
                self._limits = limits
            case Failed(message=message):
                raise DsjaxError(message)
            case _:
                raise EngineDeadError(f"The engine process ended while starting: {self._exit_reason()}.")
        self._receiver = asyncio.create_task(self._receive())
        self._receiver.add_done_callback(self._receiver_ended)

    def open(self, requests: Sequence[Request]) -> RequestGroup:
        """Start `requests`, all or none. To the client, all of them go by the id of the first.

        Raises EngineDeadError, or DuplicateRequestError if that id is in use.
        """
        if self.error is not None:
            raise self.error
        client_id = requests[0].id
        if client_id in self._groups:
            raise DuplicateRequestError(client_id)
        group = self._groups[client_id] = RequestGroup(client_id, len(requests), self._close_group)
        try:
            for index, request in enumerate(requests):
                self._start_request(group, index, request)
        except EngineDeadError:
            self._close_group(group)
            raise
        return group

    def fail_open_requests(self, error: DsjaxError) -> None:
        """End every open request with `error`."""
        groups = list(self._groups.values())
        self._groups.clear()
        self._routes.clear()
        for group in groups:
            group.wire_ids.clear()
            group.put(error)

    async def close(self) -> None:
        """Stop the engine and remove what it leaves. Open requests get no answer."""
        self._closing = True
        try:
            if self.alive:
                self._send(Shutdown())
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._exited.wait()
        except (EngineDeadError, TimeoutError):
            logger.warning("The engine process did not stop when asked and is killed.")
        finally:
            self._release()

    def _bind(self) -> None:
        try:
            self._socket.bind(socket_address(self._socket_folder))
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            self._socket_folder.rmdir()
            raise OptionError(
                f"Cannot make a socket in {self._socket_folder} ({error}). Set TMPDIR to a folder with a short path."
            ) from None

    def _start_request(self, group: RequestGroup, index: int, request: Request) -> None:
        # The engine gets ids of ours: a client may use an id again while tokens of its aborted request are on the way.
        wire_id = f"{request.id}/{next(self._serial)}"
        self._routes[wire_id] = _Route(group, index)
        group.wire_ids.add(wire_id)
        self._send(AddRequest.of(wire_id, request))

    def _close_group(self, group: RequestGroup) -> None:
        for wire_id in list(group.wire_ids):
            self._end(wire_id)
            if self.alive and not self._closing:
                self._send(Abort(wire_id))

    def _end(self, wire_id: str) -> _Route | None:
        """Forget a request, which is over; None if it was aborted before. With its group's last one the id is free."""
        route = self._routes.pop(wire_id, None)
        if route is not None:
            route.group.wire_ids.remove(wire_id)
            if not route.group.wire_ids:
                del self._groups[route.group.id]
        return route

    def _send(self, message: ToEngine) -> None:
        # Without limits on the queue, sending fails at once or not at all, so there is nothing to wait for.
        sent = cast(asyncio.Future, self._socket.send(self._encoder.encode(message), zmq.NOBLOCK))
        if sent.exception() is not None:
            raise EngineDeadError("The engine process is gone.")

    async def _first_message(self) -> FromEngine | None:
        """What the process says first; None if it ends without a word."""
        message = asyncio.ensure_future(self._next_message())
        exited = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({message, exited}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({message}, timeout=LAST_WORDS_S)
            return message.result() if message.done() else None
        finally:
            message.cancel()
            exited.cancel()

    async def _next_message(self) -> FromEngine:
        return self._decoder.decode(await self._socket.recv())

    async def _receive(self) -> None:
        """Hand on what the engine sends, until it says that it has failed."""
        while True:
            match await self._next_message():
                case Outputs(batches=batches):
                    for batch in batches:
                        self._hand_on(batch)
                case Refused(id=wire_id, message=message, param=param):
                    if (route := self._end(wire_id)) is not None:
                        route.group.put(RequestError(message, param))
                case Stats() as stats:
                    self.stats = stats
                case Failed(message=message):
                    return self._die(message)

    def _hand_on(self, batch: TokenBatch) -> None:
        ended = batch.finish_reason is not None
        route = self._end(batch.id) if ended else self._routes.get(batch.id)
        if route is not None:  # else it was aborted meanwhile
            route.group.put((route.index, batch))

    def _receiver_ended(self, receiver: asyncio.Task[None]) -> None:
        """Without a receiver no request would ever end, so an error in it ends the server too."""
        if not receiver.cancelled() and (error := receiver.exception()) is not None:
            logger.error("Reading from the engine failed", exc_info=error)
            self._die("The server cannot read what the engine sends.")

    def _note_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self._exited.set()
        loop.call_later(LAST_WORDS_S, lambda: self._die(f"The engine process ended: {self._exit_reason()}."))

    def _exit_reason(self) -> str:
        self._process.join(timeout=0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"it was killed by signal {-code} (by the system, if memory ran out)"
        return f"its exit code is {code}"

    def _die(self, message: str) -> None:
        if self._closing or not self.alive:
            return
        logger.error("%s", message)
        self.error = EngineDeadError(message)
        self.fail_open_requests(self.error)
        self._on_death()

    def _release(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
        if self._process.pid is not None:
            if self._process.is_alive():
                asyncio.get_running_loop().remove_reader(self._process.sentinel)
                self._process.kill()
            self._process.join()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._socket_folder, ignore_errors=True)
