"""The scheduler: which requests run in the next step, and how many tokens of each. No JAX here.

Decode tokens go first, then prefill chunks of running requests, then new requests in order of arrival, up to the token
budget of a step. A request is admitted once a row is free and its whole footprint can be reserved, so it never has to
be stopped half-way.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dsjax.cache.kinds import PageKind
from dsjax.cache.pages import PagePool
from dsjax.engine.request import Request
from dsjax.errors import RequestError


@dataclass
class Chunk:
    """Tokens start..start+length-1 of a request.

    `samples`: the step samples the token after the last one. `new_pages`: per page kind, pages that the request has
    just got, as (place in its page table, page id).
    """

    request: Request
    start: int
    length: int
    samples: bool
    new_pages: dict[str, list[tuple[int, int]]]

    @property
    def is_decode(self) -> bool:
        """Whether it goes through the decode kernel: a single token, be it a new one or the last of a prompt."""
        return self.length == 1


@dataclass
class Step:
    """Work for one step: chunks, decode tokens first. `admitted` requests have just got their rows."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_decode(self) -> int:
        """How many of them are decode tokens; these come first."""
        return sum(chunk.length for chunk in self.chunks if chunk.is_decode)

    @property
    def is_decode(self) -> bool:
        """Whether the step has decode tokens only."""
        return all(chunk.is_decode for chunk in self.chunks)

    @property
    def sampling(self) -> list[Request]:
        """The requests that sample, in the order in which the device returns their tokens."""
        return [chunk.request for chunk in self.chunks if chunk.samples]


@dataclass(frozen=True)
class Update:
    """News of a request: tokens that it produced, and why it ended ("stop", "length", "abort"), if it did."""

    request: Request
    tokens: list[int]
    finish_reason: str | None


class Scheduler:
    """Requests waiting and running, the rows and pages that they hold."""

    def __init__(
        self,
        kinds: Sequence[PageKind],
        pages: dict[str, int],
        rows: int,
        step_tokens: int,
        eos_token_ids: Collection[int],
    ):
        self.kinds = kinds
        self.pools = {kind.name: PagePool(pages[kind.name]) for kind in kinds}
        self.step_tokens, self.eos_token_ids = step_tokens, frozenset(eos_token_ids)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if its id is in use."""
        if request.id in self._requests:
            raise RequestError(
                f"A request with id {request.id!r} is still open; choose another id.", param="request_id"
            )
        self._requests[request.id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Update | None:
        """End a request wherever it is. None if no such request is open."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, "abort")
        return Update(request, [], "abort")

    def schedule(self, step_tokens: int | None = None) -> Step | None:
        """The next step of at most `step_tokens` tokens; None if there is nothing to compute.

        Pages are taken and requests counted forward, so every step must be run and then handed to `collect`.
        """
        step, budget = Step(), step_tokens or self.step_tokens
        ready = [request for request in self.running if request.remaining]
        for request in sorted(ready, key=lambda request: request.remaining > 1):
            budget -= self._add_chunk(step, request, budget)
        while budget and self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            step.admitted.append(request)
            budget -= self._add_chunk(step, request, budget)
        step.chunks.sort(key=lambda chunk: not chunk.is_decode)
        return step if step.chunks else None

    def collect(self, step: Step, tokens: Sequence[int]) -> list[Update]:
        """Take in the `tokens` that `step` sampled, one per request of step.sampling."""
        updates = []
        for request, token in zip(step.sampling, tokens, strict=True):
            request.in_flight -= 1
            if request.finish_reason is None:
                request.outputs.append(token)
                reason = self._end_reason(request, token)
                if reason is not None:
                    self._end(request, reason)
                updates.append(Update(request, [token], reason))
        return updates

    def _end_reason(self, request: Request, token: int) -> str | None:
        if token in self.eos_token_ids and not request.params.ignore_eos:
            return "stop"
        return "length" if len(request.outputs) == request.max_tokens else None

    def _add_chunk(self, step: Step, request: Request, budget: int) -> int:
        """Add as much of the request as the budget allows; returns the number of tokens."""
        length = min(request.remaining, budget)
        if length == 0:
            return 0
        start, request.computed = request.computed, request.computed + length
        new_pages = {kind.name: self._grow(request, kind) for kind in self.kinds}
        samples = request.computed == request.num_tokens
        request.in_flight += samples
        step.chunks.append(Chunk(request, start, length, samples, new_pages))
        return length

    def _grow(self, request: Request, kind: PageKind) -> list[tuple[int, int]]:
        """Take the pages that the computed tokens need beyond those that the request has."""
        held = len(request.pages[kind.name])
        missing = kind.pages_for(request.computed) - held
        new = self.pools[kind.name].take(missing)
        request.reserved[kind.name] -= missing
        request.pages[kind.name] += new
        return list(enumerate(new, start=held))

    def _admit(self, request: Request) -> bool:
        """Give the request a row and reserve its pages, if there is room for all of it."""
        last = len(request.prompt) + request.max_tokens - 1  # the last token sampled is never stored
        needed = {kind.name: kind.pages_for(last) for kind in self.kinds}
        if not self._free_rows or any(self.pools[name].unreserved < count for name, count in needed.items()):
            return False
        for name, count in needed.items():
            self.pools[name].reserve(count)
        request.row, request.reserved = self._free_rows.pop(), needed
        request.pages = {kind.name: [] for kind in self.kinds}
        self.running.append(request)
        return True

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        del self._requests[request.id]
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give back all that the request holds. Steps in flight may still write to its row and pages: the device runs
        in order, so that is over before anyone else's step begins."""
        if request.row is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._free_rows.append(request.row)
        for name, pages in request.pages.items():
            self.pools[name].release(pages, request.reserved[name])
        request.row, request.pages, request.reserved = None, {}, {}
