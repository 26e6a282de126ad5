"""Messages between the HTTP process and the engine process: msgpack arrays, told apart by their tag."""

import msgspec

from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.request import Limits, Request
from dsjax.engine.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Start a request that the HTTP process has checked against the engine's limits."""

    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    priority: int = 0
    deadline: float | None = None  # in time.monotonic(), which the processes of a machine share

    @classmethod
    def of(cls, id: str, request: Request) -> "AddRequest":
        """The message that starts `request` in the engine, by the name of `id`."""
        return cls(
            id, request.prompt, request.params, request.max_tokens, request.seed, request.priority, request.deadline
        )

    def to_request(self) -> Request:
        """The request as the engine takes it."""
        return Request(self.id, self.prompt, self.params, self.max_tokens, self.seed, self.priority, self.deadline)


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


class PromptResult(msgspec.Struct, array_like=True, frozen=True):
    """What came out for a prompt: how many of its tokens were in the cache, and log-probabilities, if asked for.

    These begin with the second token: nothing precedes the first. An answer that ends early may lack the last ones.
    """

    cached_tokens: int
    logprobs: list[TokenLogprobs] | None


class TokenBatch(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of a request, and why it ended ("stop", "length", "timeout"), if it did.

    `logprobs`: one per token, if asked for. `prompt`: in the first batch of a request.
    """

    id: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None
    prompt: PromptResult | None = None


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
