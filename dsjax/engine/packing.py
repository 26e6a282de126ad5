"""From a scheduled step to the one array that the host sends for it. No JAX here."""

from collections.abc import Sequence

import numpy as np

from dsjax.cache.kinds import PageKind
from dsjax.engine.request import Request
from dsjax.engine.scheduler import Step
from dsjax.step.layout import LAST_TOKEN, StepShape, row_layout, step_layout

GREEDY_BELOW = 1e-5  # temperatures that would overflow logits in float32
SMALLEST_TOP_P = 1e-6  # below the probability of the likeliest of a million tokens, and not flushed to zero


def pack_step(step: Step, shape: StepShape, kinds: Sequence[PageKind], collect_all: bool = False) -> np.ndarray:
    """The step's fields (see step_layout) as one int32 array.

    With `collect_all` the tail sees every token of the step, not only the last ones of its rows.
    """
    chunks = step.chunks
    lengths = np.array([chunk.length for chunk in chunks])
    offsets = np.cumsum(lengths) - lengths
    rows = np.array([chunk.request.row for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    samples, is_prefill = (
        np.array(flags, bool) for flags in zip(*((c.samples, not c.is_decode) for c in chunks), strict=True)
    )
    values = {
        "num_decode": [step.num_decode],
        "token_ids": [id for c in chunks for id in c.request.tokens(c.start, c.length, LAST_TOKEN)],
        "token_rows": np.repeat(rows, lengths),
        "token_positions": np.arange(step.num_tokens) + np.repeat(starts - offsets, lengths),
        "sample_tokens": np.arange(step.num_tokens) if collect_all else (offsets + lengths - 1)[samples],
        "chunks": np.stack([rows, offsets, lengths, starts], axis=1)[is_prefill],
    }
    for kind in kinds:
        pages = [(c.request.row, *placed) for c in chunks for placed in c.new_pages[kind.name]]
        values[f"new_pages.{kind.name}"] = np.array(pages, np.int32).reshape(-1, 3)
    return step_layout(shape, tuple(kinds)).pack(values)


def pack_rows(requests: Sequence[Request], rows: int) -> np.ndarray:
    """Rows and sampling parameters of newly admitted requests (see row_layout) as one int32 array."""
    params = [request.params for request in requests]
    seeds = np.array([request.seed for request in requests], np.int64).view(np.uint32).reshape(-1, 2)
    values = {
        "row": [request.row for request in requests],
        "temperature": _bits([p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params]),
        "top_k": [p.top_k for p in params],
        "top_p": _bits([max(p.top_p, SMALLEST_TOP_P) for p in params]),
        "seed_low": seeds[:, 0].view(np.int32),
        "seed_high": seeds[:, 1].view(np.int32),
    }
    return row_layout(rows).pack(values)


def _bits(numbers: list[float]) -> np.ndarray:
    """The bit patterns of float32 numbers as int32."""
    return np.array(numbers, np.float32).view(np.int32)
