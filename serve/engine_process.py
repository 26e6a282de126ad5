"""The engine process: it builds the engine, then turns requests from the HTTP process into tokens until told to stop.

The HTTP process imports this module to start it, so the engine, and with it JAX, is imported once the process runs.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from dsjax.engine.options import EngineOptions
from dsjax.engine.scheduler import Update
from dsjax.errors import DsjaxError, RequestError
from dsjax.serve.activity import Activity
from dsjax.serve.logs import set_up_logging
from dsjax.serve.messages import (
    Abort,
    AddRequest,
    Failed,
    FromEngine,
    Outputs,
    PromptResult,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
    TokenBatch,
)

if TYPE_CHECKING:
    from dsjax.engine.core import Engine

logger = logging.getLogger("dsjax")

FLUSH_MS = 2000  # how long the last messages may take to reach the HTTP process


def socket_address(socket_folder: Path) -> str:
    """Where the two processes meet."""
    return f"ipc://{socket_folder / 'engine'}"


def run_engine(socket_folder: Path, model_folder: Path, options: EngineOptions) -> None:
    """Body of the engine process. It exits with 0 when told to stop, with 1 after a failure."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the HTTP process decides: Ctrl-C reaches both, and must drain
        signal.signal(stop, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(socket_folder,), daemon=True).start()
    set_up_logging("engine")
    channel = Channel(socket_folder)
    failure = _serve(channel, model_folder, options)
    if failure is not None:
        channel.send(Failed(failure))
    channel.close()
    sys.exit(0 if failure is None else 1)


class Channel:
    """The engine's end of the connection to the HTTP process."""

    def __init__(self, socket_folder: Path):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # tokens are never dropped, and a slow reader never stops the engine
        self._socket.connect(socket_address(socket_folder))
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)

    def receive(self, wait: bool) -> list[ToEngine]:
        """All messages that are there; with `wait`, at least one."""
        messages = []
        while self._socket.poll(None if wait and not messages else 0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages

    def send(self, message: FromEngine) -> None:
        """Send `message`; returns at once."""
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Deliver what was sent, then disconnect."""
        self._socket.close(linger=FLUSH_MS)
        self._context.term()


class EngineLoop:
    """Messages in, steps, tokens out."""

    def __init__(self, engine: "Engine", channel: Channel):
        self._engine, self._channel = engine, channel
        self._activity = Activity(engine)

    def run(self) -> None:
        """Serve until told to stop. Raises EngineDeadError if the device fails."""
        while self._take_messages():
            self._activity.log()  # work may have begun, or ended by an abort
            if self._engine.has_work:
                self._step()
                self._activity.log()
            if (stats := self._activity.report()) is not None:
                self._channel.send(stats)

    def _take_messages(self) -> bool:
        """Act on all messages that are there, waiting for one if there is nothing else to do. False: stop."""
        for message in self._channel.receive(wait=not self._engine.has_work):
            match message:
                case AddRequest():
                    self._add(message)
                case Abort(id=request_id):
                    self._engine.abort(request_id)
                case Shutdown():
                    return False
        return True

    def _add(self, message: AddRequest) -> None:
        try:
            self._engine.add(message.to_request())
        except RequestError as error:
            self._channel.send(Refused(message.id, str(error), error.param))

    def _step(self) -> None:
        updates = self._engine.step()
        self._activity.count(updates)
        if updates:
            self._channel.send(Outputs([token_batch(update) for update in updates]))


def token_batch(update: Update) -> TokenBatch:
    """What the HTTP process is told of `update`."""
    request, prompt = update.request, None
    if len(request.outputs) == len(update.tokens):  # the first news of it
        logprobs = None if request.params.prompt_logprobs is None else request.prompt_logprobs
        prompt = PromptResult(request.cached_tokens or 0, logprobs)
    return TokenBatch(request.id, update.tokens, update.finish_reason, update.logprobs, prompt)


def _serve(channel: Channel, model_folder: Path, options: EngineOptions) -> str | None:
    """Build the engine and run it until told to stop; returns what went wrong, if something did."""
    try:
        from dsjax.engine.core import Engine

        engine = Engine(model_folder, options)
        channel.send(Ready(engine.limits))
        EngineLoop(engine, channel).run()
        engine.close()
    except DsjaxError as error:
        return str(error)
    except Exception as error:  # whatever it is, the HTTP process must hear of it
        logger.exception("The engine failed")
        return f"The engine failed ({type(error).__name__}: {error}). The log of the server says where."
    return None


def _end_with_parent(socket_folder: Path) -> None:
    """End this process when the HTTP process is gone, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine process is started by the HTTP process"
    parent.join()
    shutil.rmtree(socket_folder, ignore_errors=True)
    os._exit(1)
