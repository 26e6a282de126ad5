"""The device's side of a step's inputs: unpacking, page tables, work lists and rotary angles, once per step.

Padding contract: a pad token has row none, id 0, no cache slot (nothing is written), no expert, length 0 and a zero
hidden row; no real row's result depends on what stands in pad rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.cache.kinds import PageKind
from dsjax.config import RopeConfig
from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.pallas_kernels.mla_prefill import PrefillChunks
from dsjax.rope import cos_sin
from dsjax.step.layout import NONE, StepShape, step_layout

NO_SLOT = jnp.iinfo(jnp.int32).max  # beyond every pool, so scatters with mode="drop" skip it


class StepInputs(NamedTuple):
    """What every layer of a body may read. T tokens, per page kind or rope table where a dict."""

    token_ids: jax.Array  # int32 [T]
    valid: jax.Array  # bool [T]
    slots: dict[str, jax.Array]  # int32 [T]: page * page_tokens + offset of each token's cache entry
    rope: dict[str, tuple[jax.Array, jax.Array]]  # cos, sin float32 [T, dim / 2]
    decode: DecodeRows  # the leading tokens
    prefill: PrefillChunks | None


class SampleInputs(NamedTuple):
    """Which tokens are followed by a sample in this step; int32 [B] each, in the host's order, unused places last.

    `tokens`: index of the token. `rows`: its row, B where unused. `last_rows`: its row if it is the last one sampled
    for that row, else B. `positions`: position of the sampled token. `targets`: NONE, or the known token there, which
    is scored and not sampled.
    """

    tokens: jax.Array
    rows: jax.Array
    last_rows: jax.Array
    positions: jax.Array
    targets: jax.Array


class Prepare(nnx.Module):
    """First piece of a body: packed step array -> inputs of all others; writes new pages into the page tables.

    `plan_decode`, called with page tables, rows and lengths, makes the plan of DecodeRows.
    """

    gives = ("page_tables", "inputs", "samples")

    def __init__(
        self,
        shape: StepShape,
        kinds: tuple[PageKind, ...],
        ropes: tuple[tuple[str, RopeConfig], ...],
        plan_decode: Callable[[dict, jax.Array, jax.Array], Any],
    ):
        self.shape, self.kinds, self.ropes, self.plan_decode = shape, kinds, ropes, plan_decode

    def __call__(self, packed: jax.Array, page_tables: dict, last_tokens: jax.Array):
        fields = step_layout(self.shape, self.kinds).unpack(packed)
        tables = {kind.name: add_pages(page_tables[kind.name], fields[f"new_pages.{kind.name}"]) for kind in self.kinds}
        positions, valid = fields["token_positions"], fields["token_rows"] >= 0
        rows = jnp.maximum(fields["token_rows"], 0)
        ids = jnp.where(fields["token_ids"] < 0, last_tokens[rows], fields["token_ids"])
        inputs = StepInputs(
            token_ids=jnp.where(valid, ids, 0),
            valid=valid,
            slots={kind.name: _slots(kind, tables[kind.name], rows, positions, valid) for kind in self.kinds},
            rope={name: cos_sin(rope, positions) for name, rope in self.ropes},
            decode=self._decode(fields, tables, rows, positions),
            prefill=self._prefill(fields),
        )
        return tables, inputs, self._samples(fields, rows, positions)

    def _decode(self, fields: dict, tables: dict, rows: jax.Array, positions: jax.Array) -> DecodeRows:
        n = self.shape.decode_tokens
        lengths = jnp.where(jnp.arange(n) < fields["num_decode"], positions[:n] + 1, 0)
        return DecodeRows(rows[:n], lengths, self.plan_decode(tables, rows[:n], lengths))

    def _prefill(self, fields: dict) -> PrefillChunks | None:
        return PrefillChunks(*jnp.maximum(fields["chunks"], 0).T) if self.shape.has_prefill else None

    def _samples(self, fields: dict, rows: jax.Array, positions: jax.Array) -> SampleInputs:
        tokens = jnp.maximum(fields["sample_tokens"], 0)
        none = self.shape.rows
        of_sample = jnp.where(fields["sample_tokens"] != NONE, rows[tokens], none)
        followed = jnp.append(of_sample[1:], none) == of_sample
        targets = fields["sample_targets"]
        last = jnp.where(followed | (targets != NONE), none, of_sample)
        return SampleInputs(tokens, of_sample, last, positions[tokens] + 1, targets)


def add_pages(table: jax.Array, new_pages: jax.Array) -> jax.Array:
    """The page table [B, n] with `new_pages` [m, 3] entered: row (negative: unused), place, page id."""
    row, place, page = new_pages.T
    return table.at[jnp.where(row < 0, table.shape[0], row), place].set(page, mode="drop")


def _slots(kind: PageKind, table: jax.Array, rows: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
    pages = table[rows, positions // kind.page_tokens]
    return jnp.where(valid, pages * kind.page_tokens + positions % kind.page_tokens, NO_SLOT)


class Collect(nnx.Module):
    """Last piece of a body: the hidden rows x [T, D] of the tokens that sample -> hidden [B, D]."""

    gives = ("hidden",)

    def __call__(self, x: jax.Array, samples: SampleInputs):
        return (x[samples.tokens],)


class Trim(nnx.Module):
    """First piece of a tail: the first `rows` of hidden [B, D] -> last_hidden [rows, D]."""

    gives = ("last_hidden",)

    def __init__(self, rows: int):
        self.rows = rows

    def __call__(self, hidden: jax.Array):
        return (hidden[: self.rows],)
