"""Router in plain JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.config import RouterConfig


@partial(jax.jit, static_argnames="config")
def router(
    h: jax.Array, weight: jax.Array, bias: jax.Array | None, valid: jax.Array, *, config: RouterConfig
) -> tuple[jax.Array, jax.Array]:
    """Choose experts (DeepSeek-V2 paper, section 2.2; DeepSeek-V3 paper, section 2.1.2).

    Args:
      h: normed hidden rows [T, D]. weight: [E, D]; products are exact and summed in float32.
      bias: correction added to the scores for choosing only, float32 [E], or None.
      valid: bool [T], False for pad tokens.

    Returns:
      ids int32 [T, K], best first, ties to the lowest id, -1 throughout for pad tokens; weights float32 [T, K].
    """
    logits = lax.dot_general(h, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = jax.nn.softmax(logits) if config.scoring == "softmax" else jax.nn.sigmoid(logits)
    ranking = scores if bias is None else scores + bias
    if config.groups_kept < config.num_groups:
        ranking = jnp.where(_in_kept_groups(ranking, config), ranking, -jnp.inf)
    _, ids = lax.top_k(ranking, config.experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if config.normalize:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    return jnp.where(valid[:, None], ids, -1), weights * config.scaling_factor


def _in_kept_groups(ranking: jax.Array, config: RouterConfig) -> jax.Array:
    """Bool [T, E]: whether the expert's group is among the best `groups_kept` of its token."""
    tokens, experts = ranking.shape
    grouped = ranking.reshape(tokens, config.num_groups, experts // config.num_groups)
    best = lax.top_k(grouped, 1 if config.group_score == "max" else 2)[0]
    _, kept = lax.top_k(best.sum(axis=-1), config.groups_kept)
    is_kept = jax.nn.one_hot(kept, config.num_groups, dtype=bool).any(axis=1)
    return jnp.repeat(is_kept, experts // config.num_groups, axis=1)
