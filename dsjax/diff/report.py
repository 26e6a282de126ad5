"""A comparison as text and as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from dsjax.diff.compare import Comparison, SegmentDiff, ValueDiff
from dsjax.diff.trace import ForcedTokens


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain dicts and lists, with its verdict: "agree", and the segment that differs "first".

    Numbers that are not finite, which JSON cannot say, are None.
    """
    first = comparison.first
    verdict = {"agree": comparison.agree, "first": None if first is None else first.segment}
    return verdict | _finite(asdict(comparison))


def _finite(value: Any) -> Any:
    """`value`, with None in place of each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(comparison: Comparison, sequences: Sequence[ForcedTokens]) -> str:
    """What agrees, what differs first, and a table of how the difference grows."""
    lines = [_tokens(comparison), _logits(comparison.logits), *_tapping(comparison), _first(comparison, sequences)]
    if comparison.first is not None:
        lines += ["", f"{'segment':28} {'value':16} {'tokens':>10} {'max abs':>10} {'relative':>10}"]
        lines += _table(comparison.segments)
    return "\n".join(lines)


def _tokens(comparison: Comparison) -> str:
    total, first = comparison.logits.tokens, comparison.first_prediction
    if first is None:
        return f"tokens:   all {total} predictions agree"
    return (
        f"tokens:   {comparison.predicted_alike} of {total} predictions agree; the first that does not: after token "
        f"{first.position} of prompt {first.prompt}, A says {first.a} and B {first.b} (A's margin: {first.margin:.3g})"
    )


def _logits(logits: ValueDiff) -> str:
    if not logits.differing:
        return f"logits:   agree (largest difference {logits.max_abs:.3g})"
    return (
        f"logits:   differ after {logits.differing} of {logits.tokens} tokens, max abs {logits.max_abs:.3g}, relative "
        f"{logits.relative:.3g}"
    )


def _tapping(comparison: Comparison) -> Iterator[str]:
    for side, change in zip("AB", comparison.tapping, strict=True):
        if change:
            yield (
                f"note:     looking inside changes {side}'s logits by up to {change:.3g}: the executables that show "
                "their values are not bit-equal to those that serve"
            )


def _first(comparison: Comparison, sequences: Sequence[ForcedTokens]) -> str:
    segment = comparison.first
    if segment is None or segment.first is None or segment.first.first is None:
        return "segments: all agree"
    value, (prompt, position) = segment.first, segment.first.first
    token = sequences[prompt].token_ids[position]
    return (
        f"segments: {segment.segment} differs first, in {value.name} of token {position} (id {token}) of prompt "
        f"{prompt}; over all tokens max abs {value.max_abs:.3g}, relative {value.relative:.3g}"
    )


def _table(segments: Sequence[SegmentDiff]) -> Iterator[str]:
    """A line per segment that differs, with its worst value; neighbours that agree share one."""
    for agrees, group in groupby(segments, key=lambda segment: segment.first is None):
        members = list(group)
        if agrees:
            ends = [members[0].segment, members[-1].segment]
            yield f"{' .. '.join(ends[: len(members)])}: equal"
            continue
        for segment in members:
            worst = segment.worst
            tokens = f"{worst.differing}/{worst.tokens}"
            yield f"{segment.segment:28} {worst.name:16} {tokens:>10} {worst.max_abs:>10.3g} {worst.relative:>10.3g}"
