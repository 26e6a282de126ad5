"""The engine process's loop, with an engine and a channel that are plain Python."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dsjax.engine import core
from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.options import EngineOptions
from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Update
from dsjax.errors import EngineDeadError, OptionError, RequestError
from dsjax.serve import engine_process
from dsjax.serve.activity import Activity, describe
from dsjax.serve.messages import (
    Abort,
    AddRequest,
    FromEngine,
    Outputs,
    PromptResult,
    Ready,
    Refused,
    Shutdown,
    Stats,
    TokenBatch,
)


@dataclass
class FakeEngine:
    """Gives every open request one token a step, until it has three."""

    open: dict[str, Request] = field(default_factory=dict)
    limits = Limits(100, 50, 50)
    closed = False

    waiting = 0

    def __post_init__(self):
        self.counts = SimpleNamespace(tokens=0, prefill_tokens=0, padding=0, programs={})

    @property
    def running(self) -> int:
        return len(self.open)

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request: Request) -> None:
        if request.id == "refused":
            raise RequestError("No.", param="prompt")
        self.open[request.id] = request
        self.counts.prefill_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    def step(self) -> list[Update]:
        updates = []
        for request in list(self.open.values()):
            request.outputs.append(7)
            ended = len(request.outputs) == 3
            if ended:
                del self.open[request.id]
            updates.append(Update(request, [7], "length" if ended else None))
        return updates

    def close(self) -> None:
        self.closed = True


class FakeChannel:
    """Hands out one script entry per call, and keeps what is sent."""

    def __init__(self, *script: list[Any]):
        self._script, self.sent = list(script), []

    def receive(self, wait: bool) -> list[Any]:
        while self._script:
            messages = self._script.pop(0)
            if messages or not wait:
                return messages
        return [Shutdown()] if wait else []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def add(request_id: str) -> AddRequest:
    return AddRequest(request_id, [1, 2], SamplingParams(), 16, 0)


def serve(monkeypatch: pytest.MonkeyPatch, channel: FakeChannel, make_engine) -> str | None:
    monkeypatch.setattr(core, "Engine", make_engine)
    return engine_process._serve(channel, Path("model"), EngineOptions())  # type: ignore[arg-type]


def test_a_step_is_one_message(monkeypatch: pytest.MonkeyPatch):
    channel, engine = FakeChannel([add("a"), add("b")]), FakeEngine()
    assert serve(monkeypatch, channel, lambda *_: engine) is None
    assert engine.closed
    [ready] = channel.of(Ready)
    assert ready.limits == engine.limits
    steps = [(None, PromptResult(0, None)), (None, None), ("length", None)]
    assert channel.of(Outputs) == [
        Outputs([TokenBatch(name, [7], reason, None, prompt) for name in "ab"]) for reason, prompt in steps
    ]


def test_what_is_sent_of_an_update():
    """The prompt's results go with the first news; nothing is lost in the message."""
    top = TokenLogprobs(-0.5, [(3, -0.25), (4, -9999.0)])
    request = Request.create(
        "a", [1, 2], SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=2), FakeEngine.limits
    )
    request.cached_tokens, request.prompt_logprobs, request.outputs = 1, [top], [7]
    first = engine_process.token_batch(Update(request, [7], None, [top]))
    assert first == TokenBatch("a", [7], None, [top], PromptResult(1, [top]))
    last = engine_process.token_batch(Update(request, [], "timeout"))
    assert last == TokenBatch("a", [], "timeout", None, None)
    wire = msgspec.msgpack.encode(Outputs([first, last]))
    assert msgspec.msgpack.decode(wire, type=FromEngine) == Outputs([first, last])


def test_a_request_arrives_as_it_was_sent():
    params = SamplingParams(
        temperature=0.5,
        logit_bias={5: -1.5},
        allowed_token_ids=[9, 5],
        stop_token_ids=[4],
        n=1,
        logprobs=0,
        min_tokens=2,
    )
    sent = Request.create("a", [1, 2], params, FakeEngine.limits, priority=-3, timeout_s=60)
    wire = msgspec.msgpack.encode(AddRequest.of("a/0", sent))
    arrived = msgspec.msgpack.decode(wire, type=AddRequest).to_request()
    assert (arrived.id, arrived.prompt, arrived.params) == ("a/0", [1, 2], params)
    assert (arrived.priority, arrived.deadline, arrived.seed) == (-3, sent.deadline, sent.seed)


def test_abort_and_refusal(monkeypatch: pytest.MonkeyPatch):
    channel = FakeChannel([add("a"), add("refused"), add("b")], [Abort("a"), Abort("unknown")])
    assert serve(monkeypatch, channel, lambda *_: FakeEngine()) is None
    assert channel.of(Refused) == [Refused("refused", "No.", "prompt")]
    tokens = [batch.id for outputs in channel.of(Outputs) for batch in outputs.batches]
    assert tokens == ["a", "b", "b", "b"]


def test_statistics_follow_the_requests(monkeypatch: pytest.MonkeyPatch):
    channel = FakeChannel([add("a")], [add("b")], [Abort("a")])
    serve(monkeypatch, channel, lambda *_: FakeEngine())
    assert [stats.running for stats in channel.of(Stats)] == [1, 2, 1, 0]
    assert channel.of(Stats)[-1].prefill_tokens == 4


def test_shutdown_ends_open_requests(monkeypatch: pytest.MonkeyPatch):
    channel = FakeChannel([add("a")], [Shutdown()])
    assert serve(monkeypatch, channel, lambda *_: FakeEngine()) is None
    assert len(channel.of(Outputs)) == 1


def test_a_dead_device(monkeypatch: pytest.MonkeyPatch):
    class Dead(FakeEngine):
        def step(self):
            raise EngineDeadError("The device failed.")

    assert serve(monkeypatch, FakeChannel([add("a")]), lambda *_: Dead()) == "The device failed."


def test_a_bug_is_logged_with_its_place(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    class Broken(FakeEngine):
        def step(self):
            raise ZeroDivisionError("secret")

    message = serve(monkeypatch, FakeChannel([add("a")]), lambda *_: Broken())
    assert message is not None
    assert message.startswith("The engine failed (ZeroDivisionError")
    assert "raise ZeroDivisionError" in caplog.text


def test_a_refused_option(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def refuse(*_):
        raise OptionError("Not that many.")

    channel = FakeChannel()
    assert serve(monkeypatch, channel, refuse) == "Not that many."
    assert not channel.sent
    assert not caplog.text


def test_log_line():
    before = Stats(0, 0, 100, 50, 150, 10, {"decode[1]": 5})
    now = Stats(3, 1, 164, 70, 250, 60, {"decode[1]": 25, "mixed[64]": 1})
    assert describe(before, now, 2.0) == (
        "3 running, 1 waiting; generation 10.0 tokens/s, prefill 32.0 tokens/s; padding 33%; "
        "programs run: decode[1] x20, mixed[64] x1"
    )


def test_when_lines_are_logged(caplog: pytest.LogCaptureFixture):
    """Every 5 s while there is work, once at its end, and with rates that leave out the idle time before."""
    caplog.set_level("INFO", logger="dsjax")
    now, engine = [0.0], FakeEngine()
    activity = Activity(engine, clock=lambda: now[0])  # type: ignore[arg-type]

    def lines_at(time: float) -> int:
        caplog.clear()
        now[0] = time
        activity.log()
        return len(caplog.records)

    assert lines_at(100) == 0
    engine.add(add("a").to_request())
    assert [lines_at(time) for time in (200, 204, 205.5, 207, 211)] == [0, 0, 1, 0, 1]
    activity.count(engine.step())
    engine.abort("a")
    assert lines_at(212) == 1
    assert "generation 1.0 tokens/s" in caplog.text
    assert lines_at(300) == 0
