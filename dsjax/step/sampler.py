"""The sampler: the last piece of a step, on the device.

Randomness is keyed by (the request's seed, the position of the sampled token), so a request draws the same noise in
whatever batch it runs, and however its prompt was cut into chunks.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.step.adjust import adjust, wants_change, where_any
from dsjax.step.inputs import SampleInputs
from dsjax.step.logprobs import token_logprobs
from dsjax.step.sampling_state import Constraints, SamplingState


class Sample(nnx.Module):
    """logits float32 [R, V] -> `tokens` int32 [R] and their `logprobs`, of the first R places that sample.

    A token sampled last for its row is remembered in last_tokens [B] and, for rows with penalties, counted in
    output_counts [B, V]; both are donated. Places with a target give that token, and change nothing.
    """

    gives = ("last_tokens", "output_counts", "tokens", "logprobs")

    def __call__(
        self,
        logits: jax.Array,
        samples: SampleInputs,
        sampling: SamplingState,
        constraints: Constraints,
        output_counts: jax.Array,
        last_tokens: jax.Array,
    ):
        places = jax.tree.map(lambda values: values[: logits.shape[0]], samples)
        total = last_tokens.shape[0]
        used, scored = places.rows < total, places.targets >= 0
        rows = jnp.minimum(places.rows, total - 1)
        own = jax.tree.map(lambda values: values[rows], sampling)
        drawn = neutral_unless(used & ~scored, own)
        chosen = choose(logits, rows, places.positions, drawn, constraints, output_counts)
        tokens = jnp.where(scored, places.targets, chosen)
        counted = jnp.where(drawn.has_penalties, places.last_rows, total)
        wanted = jnp.where(used, jnp.where(scored, own.prompt_logprobs, own.logprobs), -1)
        return (
            last_tokens.at[places.last_rows].set(tokens, mode="drop"),
            output_counts.at[counted, tokens].add(1, mode="drop"),
            tokens,
            token_logprobs(logits, tokens, wanted),
        )


def neutral_unless(drawn: jax.Array, own: SamplingState) -> SamplingState:
    """`own` where `drawn` bool [R]; elsewhere parameters that ask for nothing, so that they cause no work."""
    neutral = dict.fromkeys(SamplingState._fields, 0) | {"top_p": 1, "repetition_penalty": 1}
    neutral |= {"logprobs": -1, "prompt_logprobs": -1}

    def select(values: jax.Array, instead: int) -> jax.Array:
        shape = (-1, *[1] * (values.ndim - 1))
        return jnp.where(drawn.reshape(shape), values, jnp.asarray(instead, values.dtype))

    return SamplingState(**{name: select(values, neutral[name]) for name, values in own._asdict().items()})


def choose(
    logits: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    own: SamplingState,
    constraints: Constraints,
    output_counts: jax.Array,
) -> jax.Array:
    """The next token of each place: the likeliest at temperature 0, else a random one. int32 [R].

    Arguments as those of `adjust`. A step of plain greedy requests pays one branch, and copies no logits.
    """
    changed, random = wants_change(own, positions), own.temperature > 0

    def scaled(logits: jax.Array) -> jax.Array:
        return logits / jnp.where(random, own.temperature, 1.0)[:, None]

    def with_options() -> jax.Array:
        final = lax.cond(
            changed.any(),
            lambda: scaled(adjust(logits, rows, positions, own, constraints, output_counts)),
            lambda: scaled(logits),
        )
        greedy = _argmax(final)
        return lax.cond(random.any(), lambda: jnp.where(random, sample(final, positions, own), greedy), lambda: greedy)

    return lax.cond((changed | random).any(), with_options, lambda: _argmax(logits))


def sample(scaled: jax.Array, positions: jax.Array, own: SamplingState) -> jax.Array:
    """Draw one token per place from softmax(scaled [R, V]) cut by min_p, top_k and top_p: int32 [R].

    The cuts keep the tokens at least min_p times as likely as the likeliest, then the k likeliest, then the fewest of
    those whose probabilities (renormalised) reach top_p; tokens that tie with the last one kept are kept too. The draw
    is Gumbel-max.
    """
    vocabulary = scaled.shape[1]
    scaled = where_any(own.min_p > 0, lambda x: _cut_min_p(x, own.min_p), scaled)
    scaled = where_any(own.top_k > 0, lambda x: keep_heaviest(x, jnp.ones_like(x), own.top_k), scaled)
    scaled = where_any(own.top_p < 1, lambda x: keep_heaviest(x, jax.nn.softmax(x), own.top_p), scaled)
    noise = jax.vmap(lambda seed, position: _gumbel(seed, position, vocabulary))(own.seeds, positions)
    return _argmax(scaled + noise)


def _argmax(values: jax.Array) -> jax.Array:
    return jnp.argmax(values, axis=-1).astype(jnp.int32)


def _cut_min_p(scaled: jax.Array, min_p: jax.Array) -> jax.Array:
    least = scaled.max(axis=1, keepdims=True) + jnp.log(min_p)[:, None]
    return jnp.where(scaled >= least, scaled, -jnp.inf)


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
