"""What the engine is doing: its statistics, and a log line every few seconds while it works."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dsjax.engine.scheduler import Update
from dsjax.serve.messages import Stats

if TYPE_CHECKING:
    from dsjax.engine.core import Engine

logger = logging.getLogger("dsjax")

LOG_INTERVAL_S = 5.0
STATS_INTERVAL_S = 1.0


class Activity:
    """Counts what an engine produces, and tells when there is something to log or to report."""

    def __init__(self, engine: "Engine", clock: Callable[[], float] = time.monotonic):
        self._engine, self._clock = engine, clock
        self._active = False
        self._generated = 0
        self._logged, self._logged_at = self._stats(), clock()
        self._reported, self._reported_at = self._logged, self._logged_at

    def count(self, updates: Sequence[Update]) -> None:
        """Take in what a step produced."""
        self._generated += sum(len(update.tokens) for update in updates)

    def log(self) -> None:
        """Log a line if one is due: every few seconds while there is work, and when it ends."""
        now, was_active = self._clock(), self._active
        self._active = self._engine.has_work
        if self._active and not was_active:
            self._logged_at = now  # rates leave out the time before, when there was nothing to do
        elif was_active and (not self._active or now - self._logged_at >= LOG_INTERVAL_S):
            stats = self._stats()
            logger.info("%s", describe(self._logged, stats, now - self._logged_at))
            self._logged, self._logged_at = stats, now

    def report(self) -> Stats | None:
        """Statistics, if requests came or went since the last ones, or those are a second old."""
        now, open_before = self._clock(), (self._reported.running, self._reported.waiting)
        if self._open() == open_before and now - self._reported_at < STATS_INTERVAL_S:
            return None
        self._reported, self._reported_at = self._stats(), now
        return self._reported

    def _open(self) -> tuple[int, int]:
        return self._engine.running, self._engine.waiting

    def _stats(self) -> Stats:
        counts = self._engine.counts
        return Stats(
            *self._open(),
            counts.prefill_tokens,
            self._generated,
            counts.tokens,
            counts.padding,
            dict(counts.programs),
        )


def describe(before: Stats, now: Stats, seconds: float) -> str:
    """The log line for the `seconds` between two statistics."""
    seconds = max(seconds, 1e-3)
    generated = (now.generated_tokens - before.generated_tokens) / seconds
    prefilled = (now.prefill_tokens - before.prefill_tokens) / seconds
    padding, computed = now.padding_tokens - before.padding_tokens, now.computed_tokens - before.computed_tokens
    share = padding / (padding + computed) if padding + computed else 0.0
    runs = Counter(now.program_runs) - Counter(before.program_runs)
    programs = ", ".join(f"{name} x{count}" for name, count in sorted(runs.items())) or "none"
    return (
        f"{now.running} running, {now.waiting} waiting; generation {generated:.1f} tokens/s, "
        f"prefill {prefilled:.1f} tokens/s; padding {share:.0%}; programs run: {programs}"
    )
