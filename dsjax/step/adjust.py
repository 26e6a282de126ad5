"""What changes logits before a token is chosen: allowed and stop ids, biases, penalties.

Every change runs only if some place of the step asks for it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.step.sampling_state import Constraints, SamplingState


def wants_change(own: SamplingState, positions: jax.Array) -> jax.Array:
    """bool [R]: the places whose logits `adjust` changes."""
    return own.has_mask | _masks_stops(own, positions) | own.has_bias | own.has_penalties


def adjust(
    logits: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    own: SamplingState,
    constraints: Constraints,
    output_counts: jax.Array,
) -> jax.Array:
    """logits [R, V] as the requests want them changed; excluded tokens are -inf.

    `rows`, `positions` int32 [R]: row and position of each place. `own`: the sampling state of each place.
    `constraints`, `output_counts` [B, V] are those of all rows.
    """
    logits = where_any(own.has_mask, lambda x: allow_only(x, constraints.allowed[rows]), logits)
    logits = where_any(_masks_stops(own, positions), lambda x: exclude(x, constraints.stop_ids[rows]), logits)
    logits = where_any(
        own.has_bias, lambda x: add_biases(x, constraints.bias_ids[rows], constraints.biases[rows]), logits
    )
    return where_any(
        own.has_penalties, lambda x: penalise(x, own, constraints.prompt[rows], output_counts[rows]), logits
    )


def where_any(wanted: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """logits [R, V], changed in the rows where `wanted` bool [R]; `change` runs only if there is such a row."""
    return lax.cond(
        wanted.any(), lambda logits: jnp.where(wanted[:, None], change(logits), logits), lambda logits: logits, logits
    )


def allow_only(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """-inf wherever the bit of the token is not set in `allowed` uint32 [R, W]."""
    return jnp.where(unpack_bits(allowed, logits.shape[1]), logits, -jnp.inf)


def exclude(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """-inf at `ids` int32 [R, S]; a row that would have no token left stays as it is."""
    left = logits.at[_each_row(ids), ids].set(-jnp.inf, mode="drop")
    return jnp.where((left > -jnp.inf).any(axis=1, keepdims=True), left, logits)


def add_biases(logits: jax.Array, ids: jax.Array, biases: jax.Array) -> jax.Array:
    """`biases` float32 [R, N] added to the logits of `ids` int32 [R, N]."""
    return logits.at[_each_row(ids), ids].add(biases, mode="drop")


def penalise(logits: jax.Array, own: SamplingState, prompt: jax.Array, output_counts: jax.Array) -> jax.Array:
    """The penalties of Keskar et al. 2019 (repetition, which counts the prompt) and of OpenAI (answer only).

    `prompt` uint32 [R, W] has the bits of the prompt's tokens, `output_counts` int32 [R, V] the answer's.
    """
    in_output = output_counts > 0
    seen = in_output | unpack_bits(prompt, logits.shape[1])
    repetition = own.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    frequency = own.frequency_penalty[:, None] * output_counts
    return logits - frequency - own.presence_penalty[:, None] * in_output


def unpack_bits(words: jax.Array, count: int) -> jax.Array:
    """The first `count` bits of uint32 `words` [R, W], lowest bit first: bool [R, count]."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] == 1


def _each_row(ids: jax.Array) -> jax.Array:
    return jnp.arange(ids.shape[0])[:, None]


def _masks_stops(own: SamplingState, positions: jax.Array) -> jax.Array:
    return positions < own.stop_from
