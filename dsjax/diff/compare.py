"""Comparing two traces: which segment differs first, at which token, and how the difference grows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.diff.trace import Trace
from dsjax.errors import OptionError

LOGITS = "logits"


@dataclass(frozen=True)
class ValueDiff:
    """One value over all tokens. `differing` of `tokens` tokens differ, the `first` as (prompt, position in it).

    `max_abs`: largest difference of two elements. `relative`: Frobenius norm of the difference over that of A. Of
    integers (chosen experts), elements that differ count as 1 among ones.
    """

    name: str
    tokens: int
    differing: int
    first: tuple[int, int] | None
    max_abs: float
    relative: float
    is_integer: bool = False


@dataclass(frozen=True)
class SegmentDiff:
    """The values that one segment gives."""

    segment: str
    values: tuple[ValueDiff, ...]

    @property
    def first(self) -> ValueDiff | None:
        """The value in which the earliest token differs; None if none does."""
        return min((v for v in self.values if v.first is not None), key=lambda value: value.first or (), default=None)

    @property
    def worst(self) -> ValueDiff:
        """The value with the largest relative difference, integers aside."""
        return max(self.values, key=lambda value: (not value.is_integer, value.relative))


@dataclass(frozen=True)
class Prediction:
    """The first token that two settings predict differently: after `position` of `prompt`, ids `a` and `b`.

    `margin`: how far A's logit of `a` is above its logit of `b`.
    """

    prompt: int
    position: int
    a: int
    b: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """Two settings compared on the same tokens.

    `tapping`: largest change of A's and of B's logits by looking inside.
    """

    logits: ValueDiff
    segments: tuple[SegmentDiff, ...]
    tapping: tuple[float, float]
    predicted_alike: int
    first_prediction: Prediction | None

    @property
    def agree(self) -> bool:
        """Whether nothing differs."""
        return self.logits.differing == 0 and self.first is None

    @property
    def first(self) -> SegmentDiff | None:
        """The first segment, in the order in which they run, that differs."""
        return next((segment for segment in self.segments if segment.first is not None), None)


def compare(a: Sequence[Trace], b: Sequence[Trace], tolerance: float = 0.0) -> Comparison:
    """Compare the traces of two settings on the same sequences.

    A token differs in a value if the norm of the difference is above `tolerance` times the norm in A; at tolerance 0
    if any element differs. Integers count at tolerance 0 only. Raises OptionError if the models have
    different segments or shapes, ValueError for traces of different tokens.
    """
    if [one.tokens for one in a] != [one.tokens for one in b]:
        raise ValueError("the traces are of different tokens")
    if not tolerance >= 0:
        raise OptionError(f"tolerance is {tolerance}, expected a number of at least 0.")
    first, alike = _predictions(a, b)
    return Comparison(
        logits=_value_diff(LOGITS, [t.logits for t in a], [t.logits for t in b], tolerance),
        segments=tuple(_segment_diffs(a, b, tolerance)),
        tapping=(_tapping(a), _tapping(b)),
        predicted_alike=alike,
        first_prediction=first,
    )


def _segment_diffs(a: Sequence[Trace], b: Sequence[Trace], tolerance: float) -> list[SegmentDiff]:
    names = {path: list(values) for path, values in a[0].values.items()}
    others = {path: list(values) for path, values in b[0].values.items()}
    if names != others:
        odd = next(path for path in [*names, *others] if names.get(path) != others.get(path))
        raise OptionError(f"The two models differ in their segments, first in {odd}; compare models of one kind.")
    return [
        SegmentDiff(
            path,
            tuple(
                _value_diff(name, [t.values[path][name] for t in a], [t.values[path][name] for t in b], tolerance)
                for name in values
            ),
        )
        for path, values in names.items()
    ]


def _value_diff(name: str, a: Sequence[np.ndarray], b: Sequence[np.ndarray], tolerance: float) -> ValueDiff:
    is_integer = np.issubdtype(a[0].dtype, np.integer)
    differing, first, max_abs = 0, None, 0.0
    square_delta = square_a = 0.0
    for prompt, (one, other) in enumerate(zip(a, b, strict=True)):
        if one.shape != other.shape:
            raise OptionError(f"{name} is {one.shape[1:]} in A, {other.shape[1:]} in B; compare models of one shape.")
        if is_integer:
            one, other = np.ones(one.shape), np.where(one == other, 1.0, 0.0)
        delta, size = _difference(one, other), np.nan_to_num(_norms(one), posinf=0.0)
        norms = _norms(delta)
        differs = ~(norms <= tolerance * size) & (tolerance == 0 or not is_integer)
        if differs.any() and first is None:
            first = (prompt, int(np.argmax(differs)))
        differing += int(differs.sum())
        max_abs = float(np.maximum(max_abs, np.abs(delta).max(initial=0.0)))  # NaN if there is one
        square_delta, square_a = square_delta + float((norms**2).sum()), square_a + float((size**2).sum())
    relative = (square_delta / square_a) ** 0.5 if square_a else float(square_delta > 0)
    return ValueDiff(name, sum(map(len, a)), differing, first, max_abs, relative, is_integer)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """b - a as float64 [T, n]; 0 where both are NaN, or the same infinity."""
    a, b = (array.astype(np.float64).reshape(len(array), -1) for array in (a, b))
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, b - a)


def _norms(values: np.ndarray) -> np.ndarray:
    """Frobenius norm of each token's row, float64 [T]."""
    return np.linalg.norm(values.astype(np.float64).reshape(len(values), -1), axis=1)


def _tapping(traces: Sequence[Trace]) -> float:
    return max(float(np.abs(_difference(t.logits, t.tapped_logits)).max(initial=0.0)) for t in traces)


def _predictions(a: Sequence[Trace], b: Sequence[Trace]) -> tuple[Prediction | None, int]:
    """The first prediction that differs, and how many do not."""
    alike, first = 0, None
    for prompt, (one, other) in enumerate(zip(a, b, strict=True)):
        if one.logits.shape != other.logits.shape:
            raise OptionError("The two models have different vocabularies; compare models of one kind.")
        likeliest = one.logits.argmax(axis=1), other.logits.argmax(axis=1)
        same = likeliest[0] == likeliest[1]
        alike += int(same.sum())
        if first is None and not same.all():
            position = int(np.argmin(same))
            said, other_said = (int(tokens[position]) for tokens in likeliest)
            margin = float(one.logits[position, said] - one.logits[position, other_said])
            first = Prediction(prompt, position, said, other_said, margin)
    return first, alike
