"""The scheduler: which requests run in the next step, and how many tokens of each. No JAX here.

Requests are ranked by priority, then by arrival. Running requests get their tokens first, in order of rank: one decode
token each, and what is left of a step's budget for prefill chunks; then waiting requests are admitted. Pages are taken
as they are reached. When none are left, or a request of higher priority waits for a row or for pages, the running
request of the lowest rank is preempted: it gives up row and pages, waits in its place, and is computed again later. The
first in rank can always preempt all others, and no request is larger than the cache, so it always advances, and after
it the next.
"""

import logging
import math
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dsjax.cache.kinds import PageKind
from dsjax.cache.pages import PagePool
from dsjax.engine.logprobs import Picked, TokenLogprobs
from dsjax.engine.request import Request
from dsjax.engine.scheduled import Admission, Chunk, Step
from dsjax.errors import RequestError

logger = logging.getLogger("dsjax")

# A request is admitted if every running one could still store this many tokens: fewer preemptions, at little cost.
HEADROOM_TOKENS = 64


@dataclass(frozen=True)
class Update:
    """News of a request: tokens that it produced, and why it ended ("stop", "length", "timeout", "abort"), if it did.

    `logprobs`: one per token, if the request asks for them.
    """

    request: Request
    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class _Budget:
    """What a step has left: tokens to compute, and picks beyond the one that every running request may need."""

    tokens: int
    picks: int


class Scheduler:
    """Requests waiting and running, the rows and pages that they hold."""

    def __init__(
        self,
        kinds: Sequence[PageKind],
        pages: dict[str, int],
        rows: int,
        step_tokens: int,
        eos_token_ids: Collection[int],
        prefix_cache: bool = True,
    ):
        self.kinds = kinds
        self.pools = {kind.name: PagePool(pages[kind.name]) for kind in kinds}
        self.rows, self.step_tokens, self.eos_token_ids = rows, step_tokens, frozenset(eos_token_ids)
        self.prefix_cache = prefix_cache
        self.preemptions = 0
        self.waiting: list[Request] = []  # in order of rank, as is `running`
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._with_deadline: dict[str, Request] = {}
        self._arrivals = 0
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
        self._arrivals += 1
        request.arrival = self._arrivals
        insort(self.waiting, request, key=_rank)
        if request.deadline is not None:
            self._with_deadline[request.id] = request

    def abort(self, request_id: str) -> Update | None:
        """End a request wherever it is. None if no such request is open."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, "abort")
        return Update(request, [], "abort")

    def expire(self, now: float) -> list[Update]:
        """End the requests whose deadline has come; `now` as time.monotonic()."""
        expired = [r for r in self._with_deadline.values() if r.deadline is not None and r.deadline <= now]
        for request in expired:
            self._end(request, "timeout")
        return [Update(request, [], "timeout") for request in expired]

    def schedule(self, step_tokens: int | None = None) -> Step | None:
        """The next step of at most `step_tokens` tokens; None if there is nothing to compute.

        Pages are taken and requests counted forward, so every step must be run and then handed to `collect`.
        """
        self._make_way()
        step = Step()
        budget = _Budget(step_tokens or self.step_tokens, self.rows - len(self.running))
        decodes = [request.remaining == 1 for request in self.running]
        still_to_decode = sum(decodes)
        for request, is_decode in zip(list(self.running), decodes, strict=True):
            still_to_decode -= is_decode
            if request.row is not None:  # else it has just been preempted
                self._advance(step, request, budget, keep=still_to_decode)
        while budget.tokens and budget.picks and self.waiting and self._admit(step, self.waiting[0]):
            budget.picks -= 1
            self._advance(step, step.admitted[-1].request, budget)
        step.close()
        return step if step.chunks else None

    def collect(self, step: Step, picked: Sequence[Picked]) -> list[Update]:
        """Take in what the tail gave for `step`, one result per pick."""
        updates = []
        for pick, result in zip(step.picks, picked, strict=True):
            request = pick.request
            request.picks_in_flight -= 1
            request.in_flight -= pick.target is None
            if request.finish_reason is not None:
                continue
            if pick.target is None:
                updates.append(self._take(request, result))
            elif result.logprobs is not None:
                request.prompt_logprobs.append(result.logprobs)
        return updates

    def restart(self) -> None:
        """The device lost all caches and results in flight: forget them, so that open requests are computed again."""
        for request in list(self.running):
            self._unseat(request)
            insort(self.waiting, request, key=_rank)
        for request in self._requests.values():
            request.in_flight = request.picks_in_flight = 0
        for pool in self.pools.values():
            pool.reset()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        for pool in self.pools.values():
            pool.forget()

    def lost_pages(self) -> int:
        """With no request open: pages that are neither free nor cached, of which there should be none."""
        return sum(pool.num_pages - pool.free - pool.cached for pool in self.pools.values())

    def _advance(self, step: Step, request: Request, budget: _Budget, keep: int = 0) -> None:
        """Add as much of a running request to the step as pages and `budget` allow, less `keep` tokens."""
        scored_from = request.unscored
        length = min(request.remaining, budget.tokens - keep)
        if scored_from is not None:
            without_pick = max(scored_from - request.computed, 0)
            length = min(length, without_pick + 1 + budget.picks)
            budget.picks -= max(length - without_pick - 1, 0)
        length = self._make_room(request, length)
        if length < 1:
            return
        start, request.computed = request.computed, request.computed + length
        new_pages = {kind.name: self._grow(request, kind) for kind in self.kinds}
        samples = request.computed == request.num_tokens
        request.in_flight += samples
        self._remember(request)
        step.chunks.append(Chunk(request, start, length, samples, scored_from, new_pages))
        budget.tokens -= length

    def _make_way(self) -> None:
        """Preempt running requests of lower priority than the first that waits, until there is room for that one."""
        while self.waiting and self.running and self.running[-1].priority < self.waiting[0].priority:
            first = self.waiting[0]
            if first.picks_in_flight or self._fits(first, self._cached_prefix(first)):
                return
            self._preempt(self.running[-1])

    def _make_room(self, request: Request, length: int) -> int:
        """How many of `length` more tokens have room, once requests of lower rank have made way for them."""
        while (room := self._room(request)) < length and self.running[-1] is not request:
            self._preempt(self.running[-1])
        return min(length, room)

    def _room(self, request: Request) -> int:
        """How many more tokens of the request the pages hold that it has or could take."""
        ends = [
            (len(request.pages[kind.name]) + self.pools[kind.name].available) * kind.page_tokens for kind in self.kinds
        ]
        return min(ends) - request.computed

    def _grow(self, request: Request, kind: PageKind) -> list[tuple[int, int]]:
        """Take the pages that the computed tokens need beyond those that the request has."""
        held = request.pages[kind.name]
        new = self.pools[kind.name].take(kind.pages_for(request.computed) - len(held))
        placed = list(enumerate(new, start=len(held)))
        held += new
        return placed

    def _remember(self, request: Request) -> None:
        """Let others share the pages that the request has filled with known tokens."""
        if not self.prefix_cache:
            return
        filled = min(request.computed, request.known_tokens)
        for kind in self.kinds:
            begin, end = request.remembered.get(kind.name, 0), filled // kind.page_tokens
            if begin < end:
                keys, pages = request.page_keys(kind), request.pages[kind.name]
                for place in range(begin, end):
                    self.pools[kind.name].remember(pages[place], keys[place])
                request.remembered[kind.name] = end

    def _admit(self, step: Step, request: Request) -> bool:
        """Give the request a row and the cached pages of its prefix, if there is room for all its tokens."""
        if not self._free_rows or request.picks_in_flight:
            return False
        cached = self._cached_prefix(request)
        if not self._fits(request, cached):
            return False
        self.waiting.remove(request)
        request.row, request.pages = self._free_rows.pop(), {name: list(pages) for name, pages in cached.items()}
        for kind in self.kinds:
            self.pools[kind.name].share(cached[kind.name])
            request.computed = len(cached[kind.name]) * kind.page_tokens
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        insort(self.running, request, key=_rank)
        step.admitted.append(Admission(request, cached))
        return True

    def _cached_prefix(self, request: Request) -> dict[str, list[int]]:
        """Per kind, the cached pages that the request may begin with: those that every kind of page has.

        The last token is always computed, since its successor is sampled, and so are tokens that are to be scored.
        """
        if not self.prefix_cache:
            return {kind.name: [] for kind in self.kinds}
        found = {kind.name: self.pools[kind.name].find(request.page_keys(kind)) for kind in self.kinds}
        usable = request.num_tokens - 1 if request.unscored is None else request.unscored
        usable = min(usable, *(len(found[kind.name]) * kind.page_tokens for kind in self.kinds))
        usable -= usable % math.lcm(*(kind.page_tokens for kind in self.kinds))
        return {kind.name: found[kind.name][: usable // kind.page_tokens] for kind in self.kinds}

    def _fits(self, request: Request, cached: dict[str, list[int]]) -> bool:
        """Whether a row is free, and pages for all tokens of the request beyond those `cached`."""
        return bool(self._free_rows) and all(self._has_room(kind, request, cached[kind.name]) for kind in self.kinds)

    def _has_room(self, kind: PageKind, request: Request, cached: Sequence[int]) -> bool:
        pool = self.pools[kind.name]
        promised = sum(_wanted(kind, one) - len(one.pages[kind.name]) for one in self.running)
        return promised + _wanted(kind, request) - len(cached) + pool.unused(cached) <= pool.available

    def _take(self, request: Request, result: Picked) -> Update:
        request.outputs.append(result.token)
        reason = self._end_reason(request, result.token)
        if reason is not None:
            self._end(request, reason)
        return Update(request, [result.token], reason, None if result.logprobs is None else [result.logprobs])

    def _end_reason(self, request: Request, token: int) -> str | None:
        if token in request.params.stop_token_ids or (token in self.eos_token_ids and not request.params.ignore_eos):
            return "stop"
        return "length" if len(request.outputs) == request.max_tokens else None

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        del self._requests[request.id]
        self._with_deadline.pop(request.id, None)
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._unseat(request)

    def _preempt(self, request: Request) -> None:
        self._unseat(request)
        insort(self.waiting, request, key=_rank)
        self.preemptions += 1
        logger.debug("%s makes way for a request of higher rank", request.id)

    def _unseat(self, request: Request) -> None:
        """Take row and pages from a running request. Steps in flight may still write to them: the device runs in order,
        so that is over before anyone else's step begins."""
        request.remembered = {}  # contents that another page had may have been evicted since
        self._remember(request)
        self.running.remove(request)
        assert request.row is not None, "a running request has a row"
        self._free_rows.append(request.row)
        for name, pages in request.pages.items():
            self.pools[name].release(pages)
        request.row, request.pages, request.remembered, request.computed = None, {}, {}, 0


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _wanted(kind: PageKind, request: Request) -> int:
    """Pages that a request is given room for when others are admitted."""
    return kind.pages_for(min(request.num_tokens + HEADROOM_TOKENS, request.most_stored))
