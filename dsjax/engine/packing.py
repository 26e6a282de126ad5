"""From a scheduled step to the one array that the host sends for it. No JAX here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsjax.cache.kinds import PageKind
from dsjax.engine.request import Request
from dsjax.engine.scheduled import Admission, Step
from dsjax.step.layout import CACHED_PAGES_PER_CALL, LAST_TOKEN, StepShape, row_layout, step_layout

GREEDY_BELOW = 1e-5  # temperatures that would overflow logits in float32
SMALLEST_TOP_P = 1e-6  # below the probability of the likeliest of a million tokens, and not flushed to zero


def pack_step(step: Step, shape: StepShape, kinds: Sequence[PageKind]) -> np.ndarray:
    """The step's fields (see step_layout) as one int32 array."""
    chunks = step.chunks
    lengths = np.array([chunk.length for chunk in chunks])
    offsets = np.cumsum(lengths) - lengths
    rows = np.array([chunk.request.row for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    is_prefill = np.array([not chunk.is_decode for chunk in chunks])
    values = {
        "num_decode": [step.num_decode],
        "token_ids": [id for c in chunks for id in c.request.tokens(c.start, c.length, LAST_TOKEN)],
        "token_rows": np.repeat(rows, lengths),
        "token_positions": np.arange(step.num_tokens) + np.repeat(starts - offsets, lengths),
        "sample_tokens": [pick.token for pick in step.picks],
        "chunks": np.stack([rows, offsets, lengths, starts], axis=1)[is_prefill],
    }
    for kind in kinds:
        pages = [(c.request.row, *placed) for c in chunks for placed in c.new_pages[kind.name]]
        values[f"new_pages.{kind.name}"] = np.array(pages, np.int32).reshape(-1, 3)
    return step_layout(shape, tuple(kinds)).pack(values)


def pack_rows(admitted: Sequence[Admission], rows: int, kinds: Sequence[PageKind]) -> list[np.ndarray]:
    """What sets rows up for newly admitted requests (see row_layout): int32 arrays, one after the other."""
    requests = [admission.request for admission in admitted]
    layout, values = row_layout(rows, tuple(kinds)), _sampling_values(requests)
    pages = {kind.name: _cached_pages(admitted, kind.name) for kind in kinds}
    calls = max(1, *(-(-len(entries) // CACHED_PAGES_PER_CALL) for entries in pages.values()))
    packed = []
    for call in range(calls):
        part = slice(call * CACHED_PAGES_PER_CALL, (call + 1) * CACHED_PAGES_PER_CALL)
        values |= {f"pages.{name}": entries[part] for name, entries in pages.items()}
        packed.append(layout.pack(values))
    return packed


def _cached_pages(admitted: Sequence[Admission], kind: str) -> np.ndarray:
    """int32 [n, 3]: row, place in its table, page id."""
    entries = [(one.request.row, *placed) for one in admitted for placed in enumerate(one.cached_pages[kind])]
    return np.array(entries, np.int32).reshape(-1, 3)


def _sampling_values(requests: Sequence[Request]) -> dict[str, Any]:
    params = [request.params for request in requests]
    seeds = np.array([request.seed for request in requests], np.int64).view(np.uint32).reshape(-1, 2)
    return {
        "row": [request.row for request in requests],
        "temperature": _bits([p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params]),
        "top_k": [p.top_k for p in params],
        "top_p": _bits([max(p.top_p, SMALLEST_TOP_P) for p in params]),
        "seed_low": seeds[:, 0].view(np.int32),
        "seed_high": seeds[:, 1].view(np.int32),
    }


def _bits(numbers: list[float]) -> np.ndarray:
    """The bit patterns of float32 numbers as int32."""
    return np.array(numbers, np.float32).view(np.int32)
