"""Messages between the HTTP process and the engine process: msgpack arrays, told apart by their tag."""

import msgspec

from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Start a request that the HTTP process has checked against the engine's limits."""

    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int

    def to_request(self) -> Request:
        """The request as the engine takes it."""
        return Request(self.id, self.prompt, self.params, self.max_tokens, self.seed)


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Stop a request; nothing happens if it has ended meanwhile."""

    id: str


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """End the engine process at once, open requests included."""


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine can take requests within `limits`."""

    limits: Limits


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start, or has died; the process ends after this message."""

    message: str


class TokenBatch(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of a request, and why it ended ("stop", "length"), if it did."""

    id: str
    token_ids: list[int]
    finish_reason: str | None


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """All that one step produced."""

    batches: list[TokenBatch]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The engine did not take a request. `param`: the request field at fault, if it is one."""

    id: str
    message: str
    param: str | None


class Stats(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    """Requests in the engine now; tokens and program runs since it started.

    `prefill_tokens` were computed for prompts, `generated_tokens` sampled, `padding_tokens` added to fill buckets.
    """

    running: int
    waiting: int
    prefill_tokens: int
    generated_tokens: int
    computed_tokens: int
    padding_tokens: int
    program_runs: dict[str, int]


ToEngine = AddRequest | Abort | Shutdown
FromEngine = Ready | Failed | Outputs | Refused | Stats
