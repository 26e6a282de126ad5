"""Timing device work that is enqueued: contenders take turns, so that a drift of the machine meets all of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

WARM_UP_RUNS = 3  # XLA records a CUDA graph in the second run


class Contender(Protocol):
    """Something to time. `run` enqueues `calls` calls that run one after another, `wait` returns when all have run."""

    name: str
    calls: int

    def run(self) -> None: ...

    def wait(self) -> None: ...


class JaxChain:
    """An executable of `calls` calls; each waits for the one before by needing its result.

    step(*state) -> state is that executable. It donates its state, so that its CUDA graph finds all buffers in place.
    """

    def __init__(self, name: str, calls: int, step: Callable[..., tuple], state: tuple[Any, ...]):
        self.name, self.calls, self.step, self.state = name, calls, step, state

    def run(self) -> None:
        self.state = self.step(*self.state)

    def wait(self) -> None:
        jax.block_until_ready(self.state)


class TorchGraph:
    """A CUDA graph of calls, in the order of the stream that they were captured from."""

    def __init__(self, name: str, calls: Sequence[Callable[[], Any]]):
        import torch  # pyright: ignore

        self.name, self.calls, self.synchronize = name, len(calls), torch.cuda.synchronize
        calls[0]()  # what libraries set up at first use cannot be captured
        self.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def run(self) -> None:
        self.graph.replay()

    def wait(self) -> None:
        self.synchronize()


def time_in_turns(contenders: Sequence[Contender], rounds: int, round_s: float) -> list[list[float]]:
    """Per contender its microseconds a call, one figure a round; a round gives each about `round_s` seconds."""
    for contender in contenders:
        _seconds(contender, WARM_UP_RUNS)
    runs = [max(1, round(round_s * WARM_UP_RUNS / _seconds(contender, WARM_UP_RUNS))) for contender in contenders]
    seconds = [[_seconds(one, count) for one, count in zip(contenders, runs, strict=True)] for _ in range(rounds)]
    return [
        [spent[i] / (count * one.calls) * 1e6 for spent in seconds]
        for i, (one, count) in enumerate(zip(contenders, runs, strict=True))
    ]


def _seconds(contender: Contender, runs: int) -> float:
    contender.wait()
    begin = time.perf_counter()
    for _ in range(runs):
        contender.run()
    contender.wait()
    return time.perf_counter() - begin
