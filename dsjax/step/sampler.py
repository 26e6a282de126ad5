"""The sampler: the last pieces of a step, on the device.

Randomness is keyed by (the request's seed, the position of the sampled token), so a request draws the same noise in
whatever batch it runs, and however its prompt was cut into chunks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.cache.kinds import PageKind
from dsjax.step.inputs import SampleInputs, add_pages
from dsjax.step.layout import row_layout


class SamplingState(NamedTuple):
    """Sampling parameters of every row, on the device, [B] each.

    `temperature` float32, 0 is greedy. `top_k` int32, 0 is off. `top_p` float32, 1 is off. `seeds` uint32 [B, 2].
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seeds: jax.Array

    @classmethod
    def empty(cls, rows: int) -> "SamplingState":
        """Abstract parameters of `rows` rows."""
        shapes = ((rows,), jnp.float32), ((rows,), jnp.int32), ((rows,), jnp.float32), ((rows, 2), jnp.uint32)
        abstract: Any = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        return cls(*abstract)


class SetRows(nnx.Module):
    """Sets rows up for new requests: their sampling parameters, and the pages of their prefixes that were cached."""

    gives = ("sampling", "page_tables")

    def __init__(self, rows: int, kinds: tuple[PageKind, ...]):
        self.rows, self.kinds = rows, kinds

    def __call__(self, packed: jax.Array, sampling: SamplingState, page_tables: dict):
        fields = row_layout(self.rows, self.kinds).unpack(packed)
        tables = {kind.name: add_pages(page_tables[kind.name], fields[f"pages.{kind.name}"]) for kind in self.kinds}
        rows = jnp.where(fields["row"] < 0, self.rows, fields["row"])
        seeds = jnp.stack([fields["seed_low"], fields["seed_high"]], axis=1)
        new = SamplingState(
            temperature=lax.bitcast_convert_type(fields["temperature"], jnp.float32),
            top_k=fields["top_k"],
            top_p=lax.bitcast_convert_type(fields["top_p"], jnp.float32),
            seeds=lax.bitcast_convert_type(seeds, jnp.uint32),
        )
        return jax.tree.map(lambda old, value: old.at[rows].set(value, mode="drop"), sampling, new), tables


class Sample(nnx.Module):
    """logits float32 [R, V] -> the next token of each sampling row, int32 [R], remembered in last_tokens [B]."""

    gives = ("last_tokens", "tokens")

    def __call__(self, logits: jax.Array, samples: SampleInputs, sampling: SamplingState, last_tokens: jax.Array):
        count = logits.shape[0]
        rows, positions = samples.rows[:count], samples.positions[:count]
        own = jax.tree.map(lambda values: values[jnp.minimum(rows, values.shape[0] - 1)], sampling)
        random = (rows < last_tokens.shape[0]) & (own.temperature > 0)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens = lax.cond(
            random.any(), lambda: jnp.where(random, sample(logits, own, positions), greedy), lambda: greedy
        )
        return last_tokens.at[samples.last_rows[:count]].set(tokens, mode="drop"), tokens


def sample(logits: jax.Array, sampling: SamplingState, positions: jax.Array) -> jax.Array:
    """Draw one token per row from softmax(logits / temperature) cut to top-k, then to top-p: int32 [R].

    The cuts keep the k likeliest tokens, then the fewest of those whose probabilities (renormalised) reach top_p;
    tokens that tie with the last one kept are kept too. The draw is Gumbel-max.
    """
    scaled = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    vocabulary = logits.shape[1]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocabulary).astype(jnp.float32)
    scaled = keep_heaviest(scaled, jnp.ones_like(scaled), top_k)
    top_p = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)
    scaled = keep_heaviest(scaled, jax.nn.softmax(scaled), top_p)
    noise = jax.vmap(lambda seed, position: _gumbel(seed, position, vocabulary))(sampling.seeds, positions)
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def keep_heaviest(values: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Keep the fewest largest `values` [R, V] whose `weights` add up to `target` [R]; the others become -inf.

    No sort: bisection over the ordered bit patterns of float32 finds the threshold in 32 passes. Everything is kept
    where the weights never reach the target.
    """
    ordered = _ordered_bits(values)

    def halve(_, bounds):
        low, high = bounds  # the weights at or above `low` reach the target; those above `high` do not
        middle = low + (high - low + 1) // 2
        reached = jnp.sum(jnp.where(ordered >= middle[:, None], weights, 0.0), axis=1) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    rows = values.shape[0]
    bounds = jnp.zeros(rows, jnp.uint32), jnp.full(rows, jnp.iinfo(jnp.uint32).max - 1, jnp.uint32)
    threshold, _ = lax.fori_loop(0, 32, halve, bounds)
    return jnp.where(ordered >= threshold[:, None], values, -jnp.inf)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """uint32 that orders like the float32 `values`."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _gumbel(seed: jax.Array, position: jax.Array, count: int) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (count,), jnp.float32)
