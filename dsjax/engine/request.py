"""Requests. No JAX here: the server's HTTP process uses this module too."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsjax.engine.sampling_params import SamplingParams
from dsjax.errors import RequestError


@dataclass(frozen=True)
class Limits:
    """What an engine can serve: its vocabulary, its context in tokens, and the cache that one request may fill."""

    vocab_size: int
    max_model_len: int
    cache_tokens: int

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise RequestError unless `prompt` is a non-empty list of known ids that leaves room for one more token."""
        if not len(prompt):
            raise RequestError("The prompt is empty; give at least one token.", param="prompt")
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                vocabulary = f"the vocabulary 0..{self.vocab_size - 1}"
                raise RequestError(
                    f"Token {token!r} at place {place} of the prompt is outside {vocabulary}.", param="prompt"
                )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens and leaves no room for an answer: this model's context is "
                f"{self.max_model_len} tokens. Shorten the prompt.",
                param="prompt",
            )

    def resolve_max_tokens(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens a request may produce. Raises RequestError if it asks for more than can ever fit."""
        room = min(self.max_model_len, self.cache_tokens) - prompt_tokens
        if room < 1:
            raise RequestError(
                f"The prompt has {prompt_tokens} tokens, but the cache holds {self.cache_tokens}. Shorten the prompt "
                "or start the engine with a larger cache.",
                param="prompt",
            )
        if max_tokens is not None and max_tokens > room:
            raise RequestError(
                f"max_tokens is {max_tokens}, but after the prompt of {prompt_tokens} tokens only {room} fit (context "
                f"{self.max_model_len}, cache {self.cache_tokens} tokens). Ask for at most {room}, or leave it out.",
                param="max_tokens",
            )
        return room if max_tokens is None else max_tokens


@dataclass(eq=False)
class Request:
    """One request on its way through the engine.

    `computed`: leading tokens whose cache entries are written or on their way. `in_flight`: sampled tokens that the
    host has not read yet. `row` and `pages` (per page kind) are held while running; `reserved` pages are still to come.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    row: int | None = None
    pages: dict[str, list[int]] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None

    @classmethod
    def create(cls, id: str, prompt: Sequence[int], params: SamplingParams, limits: Limits) -> "Request":
        """A request checked against `limits`. Raises RequestError if it can never be served."""
        limits.check_prompt(prompt)
        max_tokens = limits.resolve_max_tokens(len(prompt), params.max_tokens)
        params.check_fits(limits.vocab_size, max_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return cls(id, list(prompt), params, max_tokens, seed)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return len(self.prompt) + len(self.outputs) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens still to be computed; 0 once all that may be sampled is in flight."""
        exhausted = len(self.outputs) + self.in_flight >= self.max_tokens
        return 0 if exhausted else self.num_tokens - self.computed

    def tokens(self, start: int, length: int, unknown: int) -> list[int]:
        """The ids of tokens start..start+length-1, with `unknown` for those that are still in flight."""
        known = len(self.prompt) + len(self.outputs)
        ids = [self._token(place) for place in range(start, min(start + length, known))]
        return ids + [unknown] * (length - len(ids))

    def _token(self, place: int) -> int:
        return self.prompt[place] if place < len(self.prompt) else self.outputs[place - len(self.prompt)]
