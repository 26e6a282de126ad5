"""Engine processes that say what a test needs, without an engine. They stand in for engine_process.run_engine."""

import sys
from pathlib import Path

from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Limits
from dsjax.serve.engine_process import Channel
from dsjax.serve.messages import Abort, AddRequest, Failed, Outputs, Ready, Refused, Shutdown, TokenBatch

LIMITS = Limits(vocab_size=100, max_model_len=50, cache_tokens=50)
FAIL, REFUSE, LAST_WORDS, DIE = 90, 91, 92, 93  # first prompt tokens that ask for something special


def echo_engine(socket_folder: Path, model_folder: Path, options: EngineOptions) -> None:
    """Sends each prompt back, one token a message; after an abort, one more token, as an engine may."""
    channel = Channel(socket_folder)
    channel.send(Ready(LIMITS))
    while True:
        for message in channel.receive(wait=True):
            match message:
                case Shutdown():
                    channel.close()
                    return
                case Abort(id=request_id):
                    channel.send(Outputs([TokenBatch(request_id, [99], None)]))
                case AddRequest():
                    _answer(channel, message)


def _answer(channel: Channel, request: AddRequest) -> None:
    first = request.prompt[0]
    if first == FAIL:
        channel.send(Outputs([TokenBatch(request.id, [1], None)]))
        channel.send(Failed("The device is on fire."))
        channel.close()
        sys.exit(1)
    if first == DIE:
        sys.exit(3)
    if first == REFUSE:
        channel.send(Refused(request.id, "Not this one.", "prompt"))
        return
    for place, token in enumerate(request.prompt):
        ended = place == len(request.prompt) - 1 and first != LAST_WORDS
        channel.send(Outputs([TokenBatch(request.id, [token], "length" if ended else None)]))


def failing_engine(socket_folder: Path, model_folder: Path, options: EngineOptions) -> None:
    """Cannot start, and says why."""
    channel = Channel(socket_folder)
    channel.send(Failed(f"{model_folder} is no good."))
    channel.close()
    sys.exit(1)


def mute_engine(socket_folder: Path, model_folder: Path, options: EngineOptions) -> None:
    """Ends before it says anything."""
    sys.exit(7)
