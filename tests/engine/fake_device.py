"""A device in plain Python: it stores token ids where a real one stores latents, and follows page tables alike.

The token after a context is a hash of what the pages hold, so that a page that was shared, taken or given away wrongly
changes the answer.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from dsjax.engine.logprobs import Picked, TokenLogprobs
from dsjax.engine.scheduled import Step
from dsjax.engine.scheduler import Scheduler, Update

PAGE = 64
VOCABULARY = 50
GARBAGE = -7


def next_token(context: Sequence[int]) -> int:
    """What the model says after `context`."""
    return crc32(np.asarray(context, np.int32).tobytes()) % VOCABULARY


def answer(prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """What a request gets when it is alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """Pages, page tables and last tokens of a device, of one page kind "latent"."""

    def __init__(self, pages: int, rows: int):
        self.pages = np.full((pages, PAGE), GARBAGE)
        self.tables: dict[int | None, dict[int, int]] = {row: {} for row in range(rows)}
        self.last_tokens: dict[int | None, int] = dict.fromkeys(range(rows), GARBAGE)

    def run(self, step: Step) -> list[Picked]:
        """The results of `step`, in the order of its picks."""
        for request, cached in step.admitted:
            self.tables[request.row] = dict(enumerate(cached["latent"]))
        at: list[tuple[int | None, int]] = []  # row and position of each token
        for chunk in step.chunks:
            row = chunk.request.row
            self.tables[row].update(chunk.new_pages["latent"])
            for offset, token in enumerate(chunk.request.tokens(chunk.start, chunk.length, unknown=-1)):
                position = chunk.start + offset
                page = self.tables[row][position // PAGE]
                self.pages[page, position % PAGE] = self.last_tokens[row] if token < 0 else token
                at.append((row, position))
        return [self._pick(*at[pick.token], pick.target) for pick in step.picks]

    def _pick(self, row: int | None, position: int, target: int | None) -> Picked:
        context = [int(self.pages[self.tables[row][i // PAGE], i % PAGE]) for i in range(position + 1)]
        token = next_token(context) if target is None else target
        if target is None:
            self.last_tokens[row] = token
        return Picked(token, TokenLogprobs(-float(crc32(bytes(str((context, token)), "ascii"))), []))

    def lose_everything(self) -> None:
        self.pages[:] = GARBAGE
        self.tables = {row: {} for row in self.tables}
        self.last_tokens = dict.fromkeys(self.tables, GARBAGE)


class Loop:
    """Runs a scheduler on a fake device as the engine does: results are collected one step behind."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.pools["latent"].num_pages, scheduler.rows)
        self.pending: tuple[Step, list[Picked]] | None = None
        self.finished: dict[str, str] = {}
        self.last: Step | None = None

    def step(self) -> None:
        scheduled = self.last = self.scheduler.schedule()
        results = None if scheduled is None else (scheduled, self.device.run(scheduled))
        if self.pending is not None:
            self.note(self.scheduler.collect(*self.pending))
        self.pending = results

    def note(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                assert update.request.id not in self.finished, "a request ends once"
                self.finished[update.request.id] = update.finish_reason

    def abort(self, request_id: str) -> None:
        if (update := self.scheduler.abort(request_id)) is not None:
            self.note([update])

    def fail(self) -> None:
        """The device fails: its contents and the step in flight are lost."""
        self.pending = None
        self.device.lose_everything()
        self.scheduler.restart()

    def run_dry(self, most_steps: int) -> None:
        """Step until all has ended, in at most `most_steps` steps."""
        for _ in range(most_steps):
            if not self.scheduler.has_work and self.pending is None:
                return
            self.step()
        raise AssertionError(f"not done after {most_steps} steps: {self.scheduler.running} {self.scheduler.waiting}")
