"""Log-probabilities against float64, and what becomes of NaN and infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dsjax.step.logprobs import NOT_FINITE, Logprobs, likeliest, token_logprobs


@pytest.fixture(scope="module")
def compute():
    return jax.jit(token_logprobs)


@pytest.mark.parametrize("vocabulary", [5, 20, 128, 300, 2600])
def test_likeliest_is_top_k(vocabulary: int):
    """With ties, masked tokens, and rows that have fewer finite logits than are asked for."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.integers(-20, 20, (30, vocabulary)).astype(np.float32)
    logits[10:20] = -np.inf
    logits[15:20, rng.integers(0, vocabulary, 4)] = 1.0
    logits[20:] = rng.normal(size=(10, vocabulary))
    count = min(20, vocabulary)
    ids, values = likeliest(jnp.asarray(logits), count)
    expected_values, expected_ids = lax.top_k(logits, count)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(values, expected_values)


def test_against_float64(compute):
    logits = np.random.default_rng(0).normal(size=(16, 300)).astype(np.float32) * 4
    tokens = np.arange(16, dtype=np.int32) * 7
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    order = np.argsort(-exact, axis=1)[:, :20]
    found = compute(logits, tokens, np.full(16, 20))
    np.testing.assert_allclose(found.chosen, exact[np.arange(16), tokens], atol=4e-6)
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(exact, order, axis=1), atol=4e-6)
    chosen_only = compute(logits, tokens, np.append(np.full(15, -1), 0))
    np.testing.assert_array_equal(chosen_only.chosen[15], found.chosen[15])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("all_of_it", [True, False])
def test_logprobs_are_always_finite(compute, poison: float, all_of_it: bool):
    logits = np.random.default_rng(1).normal(size=(16, 300)).astype(np.float32)
    logits[:, slice(None) if all_of_it else slice(3, 5)] = poison
    found: Logprobs = compute(logits, np.full(16, 4, np.int32), np.full(16, 5))
    assert np.isfinite(found.chosen).all()
    assert np.isfinite(found.top).all()
    assert (np.asarray(found.chosen) == NOT_FINITE).all()
    assert (np.asarray(found.top_ids) < 300).all()
