"""A scheduled step: which tokens of which requests it computes, and what its tail is asked for. No JAX here."""

from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.engine.request import Request


class Pick(NamedTuple):
    """A place of a step at which the tail samples, or scores the known token `target`.

    `token`: index of the token before it in the step's token arrays.
    """

    request: Request
    token: int
    target: int | None


@dataclass
class Chunk:
    """Tokens start..start+length-1 of a request.

    `samples`: the step samples the token after the last one. `scored_from`: from this token on, the logprob of the
    prompt token that follows is asked for. `new_pages`: per page kind, pages that the request has just got, as (place
    in its page table, page id).
    """

    request: Request
    start: int
    length: int
    samples: bool
    scored_from: int | None
    new_pages: dict[str, list[tuple[int, int]]]

    @property
    def is_decode(self) -> bool:
        """Whether it goes through the decode kernel: a single token, be it a new one or the last of a prompt."""
        return self.length == 1

    def picks(self, offset: int) -> list[Pick]:
        """Its picks, if its first token stands at `offset` of the step."""
        request, picks = self.request, []
        if self.scored_from is not None:
            end = min(self.start + self.length, len(request.prompt) - 1)
            for place in range(max(self.start, self.scored_from), end):
                picks.append(Pick(request, offset + place - self.start, request.prompt[place + 1]))
        if self.samples:
            picks.append(Pick(request, offset + self.length - 1, None))
        return picks


class Admission(NamedTuple):
    """A request that has just got a row, and per page kind the cached pages that its table begins with."""

    request: Request
    cached_pages: dict[str, list[int]]


@dataclass
class Step:
    """Work for one step: chunks, decode tokens first."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)

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

    def close(self) -> None:
        """Put the chunks in order, and list what the tail is asked for, in the order of its results."""
        self.chunks.sort(key=lambda chunk: not chunk.is_decode)
        offset = 0
        for chunk in self.chunks:
            self.picks += chunk.picks(offset)
            offset += chunk.length
        for pick in self.picks:
            pick.request.picks_in_flight += 1
