"""From a scheduled step to the one array that the host sends for it. No JAX here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsjax.cache.kinds import PageKind
from dsjax.engine.request import Request
from dsjax.engine.scheduled import Admission, Step
from dsjax.step.layout import (
    CACHED_PAGES_PER_CALL,
    LAST_TOKEN,
    NONE,
    ConstraintShape,
    StepShape,
    constraint_layout,
    row_layout,
    step_layout,
)

GREEDY_BELOW = 1e-5  # temperatures that would overflow logits in float32
SMALLEST_TOP_P = 1e-6  # below the probability of the likeliest of a million tokens, and not flushed to zero


def pack_step(step: Step, shape: StepShape, kinds: tuple[PageKind, ...]) -> np.ndarray:
    """The step's fields (see step_layout) as one int32 array."""
    chunks = step.chunks
    lengths = np.array([chunk.length for chunk in chunks])
    offsets = np.cumsum(lengths) - lengths
    rows = np.array([chunk.request.row for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    values = {
        "num_decode": [step.num_decode if shape.has_prefill else step.num_tokens],
        "token_ids": [id for c in chunks for id in c.request.tokens(c.start, c.length, LAST_TOKEN)],
        "token_rows": np.repeat(rows, lengths),
        "token_positions": np.arange(step.num_tokens) + np.repeat(starts - offsets, lengths),
        "sample_tokens": [pick.token for pick in step.picks],
        "sample_targets": [NONE if pick.target is None else pick.target for pick in step.picks],
    }
    if shape.has_prefill:
        is_prefill = np.array([not chunk.is_decode for chunk in chunks])
        values["chunks"] = np.stack([rows, offsets, lengths, starts], axis=1)[is_prefill]
    for kind in kinds:
        pages = [(c.request.row, *placed) for c in chunks for placed in c.new_pages[kind.name]]
        values[f"new_pages.{kind.name}"] = np.array(pages, np.int32).reshape(-1, 3)
    return step_layout(shape, kinds).pack(values)


def pack_rows(admitted: Sequence[Admission], rows: int, kinds: Sequence[PageKind]) -> list[np.ndarray]:
    """What sets rows up for newly admitted requests (see row_layout): int32 arrays, one after the other."""
    requests = [admission.request for admission in admitted]
    layout, values = row_layout(rows, kinds), _sampling_values(requests)
    pages = {kind.name: _cached_pages(admitted, kind.name) for kind in kinds}
    packed = []
    for part in _parts(max(map(len, pages.values())), CACHED_PAGES_PER_CALL):
        values |= {f"pages.{name}": entries[part] for name, entries in pages.items()}
        packed.append(layout.pack(values))
    return packed


def pack_constraints(request: Request, shape: ConstraintShape, eos_token_ids: Sequence[int]) -> list[np.ndarray]:
    """The constraints of a newly admitted request (see constraint_layout): int32 arrays, one after the other.

    The tokens that it has produced already, before it was preempted, may take several.
    """
    params, layout = request.params, constraint_layout(shape)
    biases = params.logit_bias or {}
    ids, counts = np.unique(np.array(request.outputs, np.int32), return_counts=True)
    values = {
        "row": [request.row],
        "stop_ids": params.end_ids(eos_token_ids),
        "bias_ids": list(biases),
        "biases": _bits(list(biases.values())),
        "allowed": _bitmask(params.allowed_token_ids or (), shape.words),
        "prompt": _bitmask(request.prompt, shape.words),
    }
    packed = []
    for part in _parts(len(ids), shape.history):
        values |= {"is_first": [part.start == 0], "output_ids": ids[part], "output_counts": counts[part]}
        packed.append(layout.pack(values))
    return packed


def _sampling_values(requests: Sequence[Request]) -> dict[str, Any]:
    """The fields of row_layout that come from sampling parameters."""
    params = [request.params for request in requests]
    numbers = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return {
        "row": [request.row for request in requests],
        "temperature": _bits([p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params]),
        "top_k": [p.top_k for p in params],
        "top_p": _bits([max(p.top_p, SMALLEST_TOP_P) for p in params]),
        **{name: _bits([getattr(p, name) for p in params]) for name in numbers},
        "stop_from": [len(r.prompt) + r.params.min_tokens if r.params.min_tokens else 0 for r in requests],
        "has_bias": [bool(p.logit_bias) for p in params],
        "has_mask": [p.allowed_token_ids is not None for p in params],
        "logprobs": [NONE if p.logprobs is None else p.logprobs for p in params],
        "prompt_logprobs": [NONE if p.prompt_logprobs is None else p.prompt_logprobs for p in params],
        "seeds": np.array([request.seed for request in requests], np.int64).view(np.int32).reshape(-1, 2),
    }


def _cached_pages(admitted: Sequence[Admission], kind: str) -> np.ndarray:
    """int32 [n, 3]: row, place in its table, page id."""
    entries = [(one.request.row, *placed) for one in admitted for placed in enumerate(one.cached_pages[kind])]
    return np.array(entries, np.int32).reshape(-1, 3)


def _parts(count: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover `count` items; one at least."""
    return [slice(begin, begin + size) for begin in range(0, max(count, 1), size)]


def _bitmask(ids: Sequence[int], words: int) -> np.ndarray:
    """int32 [words] in which the bits of `ids` are set, lowest bit first."""
    bits = np.zeros(words * 32, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bits(numbers: list[float]) -> np.ndarray:
    """The bit patterns of float32 numbers as int32."""
    return np.array(numbers, np.float32).view(np.int32)
