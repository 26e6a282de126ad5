"""What the host sends the device: named int32 fields in one array, so that a step costs one small transfer.

Shared by the host, which packs with NumPy, and the device, which unpacks inside a compiled segment. No JAX here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from dsjax.cache.kinds import PageKind
from dsjax.engine.sampling_params import MAX_BIASED_IDS

NONE = -1  # fills unused places: no row, no token
CACHED_PAGES_PER_CALL = 512  # page-table entries that one call of set_rows can write, per kind
LAST_TOKEN = -1  # token id that stands for "the token last sampled for this row", which only the device knows


@dataclass(frozen=True)
class Layout:
    """Named fields of fixed shape, stored one after the other."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def size(self) -> int:
        """Length of the packed array."""
        return sum(math.prod(shape) for _, shape in self.fields)

    @cached_property
    def _places(self) -> list[tuple[str, slice, tuple[int, ...]]]:
        sizes = [math.prod(shape) for _, shape in self.fields]
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return [(name, span, shape) for (name, shape), span in zip(self.fields, spans, strict=True)]

    def pack(self, values: Mapping[str, Any]) -> np.ndarray:
        """One int32 array [size] holding each field's leading values, the rest of it filled with NONE."""
        packed = np.full(self.size, NONE, np.int32)
        for name, place in self.unpack(packed).items():
            value = np.asarray(values[name], np.int32)
            place[: len(value)] = value
        return packed

    def unpack(self, packed: Any) -> dict[str, Any]:
        """The fields of `packed` as views (NumPy) or slices (JAX)."""
        return {name: packed[place].reshape(shape) for name, place, shape in self._places}


@dataclass(frozen=True)
class StepShape:
    """The static sizes of one body: `tokens` places for tokens, `rows` = max_num_seqs, with or without prefill."""

    tokens: int
    rows: int
    has_prefill: bool

    @property
    def decode_tokens(self) -> int:
        """Places at the front of the token arrays that may hold decode tokens."""
        return min(self.tokens, self.rows) if self.has_prefill else self.tokens


@dataclass(frozen=True)
class ConstraintShape:
    """The static sizes of one row's constraints: the vocabulary, and places for the ids that may end an answer."""

    vocab_size: int
    stop_ids: int
    biased_ids: int = MAX_BIASED_IDS
    history: int = 1024  # distinct output ids that one call of set_constraints takes

    @property
    def words(self) -> int:
        """Words of 32 bits, one bit for each token of the vocabulary."""
        return -(-self.vocab_size // 32)


@cache  # every step asks for one
def step_layout(shape: StepShape, kinds: tuple[PageKind, ...]) -> Layout:
    """Fields of one step.

    num_decode [1]: how many leading tokens are decode tokens. token_ids, token_rows, token_positions [T].
    sample_tokens [B]: indices of the tokens whose successor is sampled, or known and only scored: sample_targets [B]
    has the known ones, NONE for the others. chunks [B, 4]: row, first token, length, first position of each prefill
    chunk. new_pages.<kind> [n, 3]: row, place in its table, page id.
    """
    tokens, rows = shape.tokens, shape.rows
    fields: list[tuple[str, tuple[int, ...]]] = [
        ("num_decode", (1,)),
        ("token_ids", (tokens,)),
        ("token_rows", (tokens,)),
        ("token_positions", (tokens,)),
        ("sample_tokens", (rows,)),
        ("sample_targets", (rows,)),
    ]
    if shape.has_prefill:
        fields.append(("chunks", (rows, 4)))
    fields += [(f"new_pages.{kind.name}", (tokens // kind.page_tokens + shape.decode_tokens, 3)) for kind in kinds]
    return Layout(tuple(fields))


def row_layout(rows: int, kinds: Sequence[PageKind]) -> Layout:
    """Fields that set rows up for new requests.

    row [B], and for each the fields of the device's SamplingState (floats as their bits). pages.<kind> [n, 3]: row,
    place in its table, page id of pages that were found in the cache.
    """
    names = (
        "row",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop_from",
        "has_bias",
        "has_mask",
        "logprobs",
        "prompt_logprobs",
    )
    pages = [(f"pages.{kind.name}", (CACHED_PAGES_PER_CALL, 3)) for kind in kinds]
    return Layout((*((name, (rows,)) for name in names), ("seeds", (rows, 2)), *pages))


def constraint_layout(shape: ConstraintShape) -> Layout:
    """Fields that set one row's constraints: row [1], then those of the device's Constraints for it.

    output_ids, output_counts: tokens that the row has produced before. is_first [1]: 1 clears earlier counts.
    """
    return Layout(
        (
            ("row", (1,)),
            ("is_first", (1,)),
            ("stop_ids", (shape.stop_ids,)),
            ("bias_ids", (shape.biased_ids,)),
            ("biases", (shape.biased_ids,)),
            ("allowed", (shape.words,)),
            ("prompt", (shape.words,)),
            ("output_ids", (shape.history,)),
            ("output_counts", (shape.history,)),
        )
    )
