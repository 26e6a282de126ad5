"""Requests. No JAX here: the server's HTTP process uses this module too."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from dsjax.cache.kinds import PageKind
from dsjax.cache.pages import Key, page_keys
from dsjax.engine.logprobs import TokenLogprobs
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
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens and leaves no room for an answer: this model's context is "
                f"{self.max_model_len} tokens. Shorten the prompt.",
                param="prompt",
            )
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                vocabulary = f"the vocabulary 0..{self.vocab_size - 1}"
                raise RequestError(
                    f"Token {token!r} at place {place} of the prompt is outside {vocabulary}.", param="prompt"
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

    `priority`: higher ones run first, `arrival` decides among equals. `deadline`: time.monotonic() at which it ends,
    finished or not. `computed`: leading tokens whose cache entries are written or on their way. `in_flight`: sampled
    tokens, and `picks_in_flight` results of any kind, that the host has not read yet. `row` and `pages` (per page kind)
    are held while running; `keys` name the contents of its full pages, of which the first `remembered` may be shared.
    `cached_tokens`: how many tokens of the prompt were found in the cache when it started.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    priority: int = 0
    deadline: float | None = None
    arrival: int = 0
    outputs: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    picks_in_flight: int = 0
    cached_tokens: int | None = None
    row: int | None = None
    pages: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[str, list[Key]] = field(default_factory=dict)
    remembered: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None

    @classmethod
    def create(
        cls,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        limits: Limits,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> "Request":
        """A request for one answer, checked against `limits`. Raises RequestError if it can never be served."""
        if params.n > 1:
            raise RequestError(
                f"n is {params.n}, but a request has one answer; make one of each of params.answers().", param="n"
            )
        limits.check_prompt(prompt)
        max_tokens = limits.resolve_max_tokens(len(prompt), params.max_tokens)
        params.check_fits(limits.vocab_size, max_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return cls(id, list(prompt), params, max_tokens, seed, check_priority(priority), deadline_after(timeout_s))

    @property
    def rank(self) -> tuple[int, int]:
        """Requests of lower rank go first."""
        return -self.priority, self.arrival

    @property
    def known_tokens(self) -> int:
        """Prompt and output tokens whose ids the host knows."""
        return len(self.prompt) + len(self.outputs)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return self.known_tokens + self.in_flight

    @property
    def most_stored(self) -> int:
        """Tokens that it can ever have in the cache: the last one sampled is never stored."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens still to be computed; 0 once all that may be sampled is in flight."""
        exhausted = len(self.outputs) + self.in_flight >= self.max_tokens
        return 0 if exhausted else self.num_tokens - self.computed

    @property
    def unscored(self) -> int | None:
        """The first token after which a logprob of the prompt is still asked for; None if none is."""
        if self.params.prompt_logprobs is None or len(self.prompt_logprobs) >= len(self.prompt) - 1:
            return None
        return len(self.prompt_logprobs)

    def tokens(self, start: int, length: int, unknown: int) -> list[int]:
        """The ids of tokens start..start+length-1, with `unknown` for those that are still in flight."""
        ids = [self.token(place) for place in range(start, min(start + length, self.known_tokens))]
        return ids + [unknown] * (length - len(ids))

    def token(self, place: int) -> int:
        """The id of a known token."""
        return self.prompt[place] if place < len(self.prompt) else self.outputs[place - len(self.prompt)]

    def page_keys(self, kind: PageKind) -> list[Key]:
        """Keys of the pages that the known tokens fill."""
        keys = self.keys.setdefault(kind.name, [])
        begin = len(keys) * kind.page_tokens
        if self.known_tokens - begin >= kind.page_tokens:
            tokens = self.tokens(begin, self.known_tokens - begin, unknown=-1)
            keys += page_keys(tokens, kind.page_tokens, after=keys[-1] if keys else b"")
        return keys


def check_priority(priority: Any) -> int:
    """`priority` as an int. Raises RequestError if it is none."""
    if isinstance(priority, bool) or not isinstance(priority, Integral) or not -(2**31) <= int(priority) < 2**31:
        raise RequestError(
            f"priority is {priority!r}, expected a 32-bit integer (higher runs first).", param="priority"
        )
    return int(priority)


def deadline_after(timeout_s: Any) -> float | None:
    """The time.monotonic() in `timeout_s` seconds. Raises RequestError unless that is a positive number or None."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not 0 < float(timeout_s) < math.inf:
        raise RequestError(f"timeout_s is {timeout_s!r}, expected a positive number of seconds.", param="timeout_s")
    return time.monotonic() + float(timeout_s)
