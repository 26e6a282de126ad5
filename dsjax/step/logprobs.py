"""Log-probabilities of sampled or known tokens, and the likeliest tokens beside them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.engine.sampling_params import MAX_ALTERNATIVES

NOT_FINITE = -9999.0  # stands for NaN and infinities, which JSON has no words for
GROUP = 128  # neighbouring tokens that `likeliest` takes or leaves together


class Logprobs(NamedTuple):
    """Per place: log-probability of its token, and ids and log-probabilities of the A likeliest tokens, best first.

    Meaningless where they were not asked for.
    """

    chosen: jax.Array  # float32 [R]
    top_ids: jax.Array  # int32 [R, A]
    top: jax.Array  # float32 [R, A]


def token_logprobs(logits: jax.Array, tokens: jax.Array, wanted: jax.Array) -> Logprobs:
    """Log-probabilities in softmax(logits [R, V]) of `tokens` int32 [R], and of the likeliest tokens.

    `wanted` int32 [R]: how many of the likeliest, negative for nothing at all. What no place wants is not computed.
    """
    places, alternatives = len(tokens), min(MAX_ALTERNATIVES, logits.shape[1])
    no_top = jnp.zeros((places, alternatives), jnp.int32), jnp.zeros((places, alternatives))

    def some() -> Logprobs:
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        ids, top = lax.cond((wanted > 0).any(), lambda: likeliest(logits, alternatives), lambda: no_top)
        return Logprobs(_finite(chosen - total)[:, 0], ids, _finite(top - total))

    return lax.cond((wanted >= 0).any(), some, lambda: Logprobs(jnp.zeros(places), *no_top))


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Ids int32 and values of the `count` largest logits [R, V] of each row, best first, the lower id of equal ones.

    The same as lax.top_k, which sorts the whole vocabulary on GPUs. The largest are in the `count` groups with the
    largest maxima, so only these are sorted.
    """
    rows, vocabulary = logits.shape
    padding = -vocabulary % GROUP
    groups = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, -1, GROUP)
    _, kept = lax.top_k(groups.max(axis=2), min(count, groups.shape[1]))
    kept = jnp.sort(kept, axis=1)  # ascending ids: the lower of equal ones wins, and padding comes last
    candidates = jnp.take_along_axis(groups, kept[:, :, None], axis=1).reshape(rows, -1)
    values, places = lax.top_k(candidates, count)
    ids = jnp.take_along_axis(kept, places // GROUP, axis=1) * GROUP + places % GROUP
    return ids.astype(jnp.int32), values


def _finite(logprobs: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(logprobs), logprobs, NOT_FINITE)
