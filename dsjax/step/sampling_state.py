"""What the device knows of every row's sampling parameters, and the two programs that set it at admission."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.cache.kinds import PageKind
from dsjax.step.inputs import add_pages
from dsjax.step.layout import ConstraintShape, constraint_layout, row_layout


class SamplingState(NamedTuple):
    """The numbers of every row, [B] each. See SamplingParams for their meaning.

    Neutral values: 0; 1 for top_p and repetition_penalty; -1 for logprobs and prompt_logprobs. `stop_from`: first
    position at which the row's stop ids may be sampled. `has_bias` and `has_mask`: whether the row's entries in
    Constraints are its own; those of others are left over from earlier requests.
    """

    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    presence_penalty: jax.Array  # float32
    frequency_penalty: jax.Array  # float32
    repetition_penalty: jax.Array  # float32
    stop_from: jax.Array  # int32
    has_bias: jax.Array  # bool
    has_mask: jax.Array  # bool
    logprobs: jax.Array  # int32
    prompt_logprobs: jax.Array  # int32
    seeds: jax.Array  # uint32 [B, 2]

    @classmethod
    def abstract(cls, rows: int) -> "SamplingState":
        """Shapes and dtypes for `rows` rows."""
        dtypes: dict[str, Any] = dict.fromkeys(cls._fields, jnp.float32)
        dtypes |= dict.fromkeys(("top_k", "stop_from", "logprobs", "prompt_logprobs"), jnp.int32)
        dtypes |= dict.fromkeys(("has_bias", "has_mask"), jnp.bool)
        arrays = {name: _aval((rows,), dtype) for name, dtype in dtypes.items()}
        return cls(**arrays | {"seeds": _aval((rows, 2), jnp.uint32)})

    @property
    def has_penalties(self) -> jax.Array:
        """bool [B]: whether any penalty is on."""
        additive = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return additive | (self.repetition_penalty != 1)


class Constraints(NamedTuple):
    """The larger parameters of every row, written for requests that use them. W words of 32 bits cover the vocabulary.

    Unused places of `stop_ids` and `bias_ids` hold V, which scatters drop.
    """

    stop_ids: jax.Array  # int32 [B, S]
    bias_ids: jax.Array  # int32 [B, MAX_BIASED_IDS]
    biases: jax.Array  # float32 [B, MAX_BIASED_IDS]
    allowed: jax.Array  # uint32 [B, W]: bit v % 32 of word v // 32 is set if token v may be sampled
    prompt: jax.Array  # uint32 [B, W]: likewise, if token v is in the prompt

    @classmethod
    def abstract(cls, rows: int, shape: ConstraintShape) -> "Constraints":
        """Shapes and dtypes for `rows` rows."""
        dtypes = (jnp.int32, jnp.int32, jnp.float32, jnp.uint32, jnp.uint32)
        widths = (shape.stop_ids, shape.biased_ids, shape.biased_ids, shape.words, shape.words)
        return cls(*(_aval((rows, width), dtype) for width, dtype in zip(widths, dtypes, strict=True)))


class SetRows(nnx.Module):
    """Sets up the rows that requests have just got: sampling state, and pages that hold a cached prefix already."""

    gives = ("sampling", "page_tables")

    def __init__(self, rows: int, kinds: Sequence[PageKind]):
        self.rows, self.kinds = rows, tuple(kinds)

    def __call__(self, packed: jax.Array, sampling: SamplingState, page_tables: dict):
        fields = row_layout(self.rows, self.kinds).unpack(packed)
        rows = jnp.where(fields["row"] < 0, self.rows, fields["row"])
        tables = {kind.name: add_pages(page_tables[kind.name], fields[f"pages.{kind.name}"]) for kind in self.kinds}
        updated = {
            name: old.at[rows].set(_from_bits(fields[name], old.dtype), mode="drop")
            for name, old in sampling._asdict().items()
        }
        return SamplingState(**updated), tables


class SetConstraints(nnx.Module):
    """Sets the constraints of one row, and adds a chunk of the tokens that it has produced before to its counts."""

    gives = ("constraints", "output_counts")

    def __init__(self, shape: ConstraintShape):
        self.shape = shape

    def __call__(self, packed: jax.Array, constraints: Constraints, output_counts: jax.Array):
        fields = constraint_layout(self.shape).unpack(packed)
        row, is_first = fields["row"][0], fields["is_first"][0] == 1
        new = Constraints(
            stop_ids=self._or_none(fields["stop_ids"]),
            bias_ids=self._or_none(fields["bias_ids"]),
            biases=_from_bits(fields["biases"], jnp.float32),
            allowed=_from_bits(fields["allowed"], jnp.uint32),
            prompt=_from_bits(fields["prompt"], jnp.uint32),
        )
        counts = jnp.where(is_first, 0, output_counts[row])
        counts = counts.at[self._or_none(fields["output_ids"])].add(fields["output_counts"], mode="drop")
        constraints = jax.tree.map(lambda old, value: old.at[row].set(value), constraints, new)
        return constraints, output_counts.at[row].set(counts)

    def _or_none(self, ids: jax.Array) -> jax.Array:
        """Token ids with an id beyond the vocabulary in unused places."""
        return jnp.where(ids < 0, self.shape.vocab_size, ids)


def _from_bits(values: jax.Array, dtype: Any) -> jax.Array:
    """int32 from the host as what it stands for: the bits of a float or unsigned number, or a truth value."""
    if dtype == jnp.bool:
        return values == 1
    return lax.bitcast_convert_type(values, dtype)


def _aval(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
