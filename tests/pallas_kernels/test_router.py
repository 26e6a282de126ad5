"""The router against a plain float64 implementation of each variant."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import RouterConfig
from dsjax.pallas_kernels.router import IMPLEMENTATIONS
from dsjax.pallas_kernels.router.shapes import SHAPES
from dsjax.published import published

router = IMPLEMENTATIONS["reference"]


def route(h: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, config: RouterConfig):
    """Per token, with loops: chosen ids (best first) and weights."""
    for row in h:
        logits = weight @ row
        exp = np.exp(logits - logits.max())
        scores = exp / exp.sum() if config.scoring == "softmax" else 1 / (1 + np.exp(-logits))
        ranking = scores if bias is None else scores + bias
        groups = np.split(np.arange(len(scores)), config.num_groups)
        best = 1 if config.group_score == "max" else 2
        worth = [np.sort(ranking[group])[-best:].sum() for group in groups]
        kept = np.concatenate([groups[g] for g in np.argsort(worth)[::-1][: config.groups_kept]])
        ids = kept[np.argsort(ranking[kept])[::-1][: config.experts_per_token]]
        weights = scores[ids] / (scores[ids].sum() if config.normalize else 1)
        yield ids, weights * config.scaling_factor


@pytest.mark.parametrize("model", SHAPES)
def test_published_variants(model: str):
    config, hidden, tokens = published(model).moe.router, 96, 40
    rng = np.random.default_rng(len(model))
    h = rng.normal(size=(tokens, hidden)).astype(np.float32)
    weight = (rng.normal(size=(config.num_experts, hidden)) / hidden**0.5).astype(np.float32)
    bias = (0.3 * rng.normal(size=config.num_experts)).astype(np.float32) if config.has_bias else None
    valid = np.arange(tokens) % 7 != 3
    biases = None if bias is None else jnp.asarray(bias)
    ids, weights = router(jnp.asarray(h), jnp.asarray(weight), biases, jnp.asarray(valid), config=config)
    for token, (expected_ids, expected_weights) in enumerate(route(h.astype(np.float64), weight, bias, config)):
        if valid[token]:
            np.testing.assert_array_equal(ids[token], expected_ids)
            np.testing.assert_allclose(weights[token], expected_weights, rtol=1e-5)
        else:
            assert (np.asarray(ids[token]) == -1).all()


def test_ties_go_to_the_lowest_expert():
    config = RouterConfig(8, 3, "sigmoid", 1.0, normalize=True, has_bias=False)
    ids, weights = router(jnp.ones((1, 4)), jnp.ones((8, 4)), None, jnp.array([True]), config=config)
    np.testing.assert_array_equal(ids[0], [0, 1, 2])
    np.testing.assert_allclose(weights[0], 1 / 3, rtol=1e-6)


def test_products_of_bf16_are_not_rounded():
    """257 = 256 + 1 needs nine bits: a sum kept in bf16 would lose the 1."""
    config = RouterConfig(2, 1, "softmax", 1.0, normalize=False, has_bias=False)
    h = jnp.array([[256, 1]], jnp.bfloat16)
    weight = jnp.array([[1, 0], [1, 1]], jnp.bfloat16)
    ids, weights = router(h, weight, None, jnp.array([True]), config=config)
    assert int(ids[0, 0]) == 1
    np.testing.assert_allclose(weights[0, 0], np.e / (1 + np.e), rtol=1e-5)
