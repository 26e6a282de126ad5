"""The sampler against NumPy: cuts, distributions, and what the draw may depend on."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.step.sampler import SamplingState, keep_heaviest, sample


def state(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, first_seed: int = 0
) -> SamplingState:
    seeds = np.stack([np.arange(rows) + first_seed, np.zeros(rows)], axis=1).astype(np.uint32)
    return SamplingState(
        jnp.full(rows, temperature), jnp.full(rows, top_k, jnp.int32), jnp.full(rows, top_p), jnp.asarray(seeds)
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def cut_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution that `sample` promises, in float64, for logits without ties."""
    probabilities = softmax(logits.astype(np.float64) / temperature)
    order = np.argsort(-probabilities)
    kept = order[: top_k or len(order)]
    within = probabilities[kept] / probabilities[kept].sum()
    kept = kept[: np.searchsorted(np.cumsum(within), top_p) + 1] if top_p < 1 else kept
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.7, 5, 1.0), (1.0, 0, 0.8), (0.9, 7, 0.6)]
)
def test_distribution_by_chi_square(temperature: float, top_k: int, top_p: float):
    draws, vocabulary = 20_000, 16
    logits = np.random.default_rng(3).normal(size=vocabulary).astype(np.float32) * 1.5
    expected = cut_distribution(logits, temperature, top_k, top_p) * draws
    rows = jnp.broadcast_to(jnp.asarray(logits), (draws, vocabulary))
    tokens = sample(rows, state(draws, temperature, top_k, top_p), jnp.zeros(draws, jnp.int32))
    counts = np.bincount(np.asarray(tokens), minlength=vocabulary)
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 45, "a fair sampler exceeds 45 once in 10,000 runs at 15 degrees of freedom"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_keep_heaviest_finds_the_exact_threshold(scale: float):
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(50, 40)) * scale).astype(np.float32)
    counts = rng.integers(1, 41, 50).astype(np.float32)
    kept = np.isfinite(np.asarray(keep_heaviest(jnp.asarray(values), jnp.ones((50, 40)), jnp.asarray(counts))))
    for row in range(50):
        largest = np.argsort(-values[row])[: int(counts[row])]
        assert set(np.flatnonzero(kept[row])) == set(largest)


def test_keep_heaviest_keeps_everything_if_the_target_is_out_of_reach():
    values = jnp.array([[0.0, -1.0, -jnp.inf, 3.0]])
    np.testing.assert_array_equal(keep_heaviest(values, jnp.ones((1, 4)), jnp.array([jnp.inf])), values)


def test_top_k_1_is_greedy_and_large_top_k_is_off():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, 100)), jnp.float32)
    positions = jnp.arange(64)
    np.testing.assert_array_equal(sample(logits, state(64, top_k=1), positions), jnp.argmax(logits, axis=1))
    off = sample(logits, state(64), positions)
    np.testing.assert_array_equal(sample(logits, state(64, top_k=2**31 - 1), positions), off)


def test_a_draw_depends_on_seed_and_position_only():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(32, 50)), jnp.float32)
    positions = jnp.arange(32) + 7
    together = np.asarray(sample(logits, state(32), positions))
    order = np.random.default_rng(3).permutation(32)
    shuffled = SamplingState(*(values[order] for values in state(32)))
    np.testing.assert_array_equal(sample(logits[order], shuffled, positions[order]), together[order])
    assert (np.asarray(sample(logits, state(32, first_seed=100), positions)) != together).any()
    assert (np.asarray(sample(logits, state(32), positions + 1)) != together).any()


def test_high_words_of_the_seed_count():
    logits = jnp.zeros((1, 1000))
    low = state(1)
    high = low._replace(seeds=jnp.array([[0, 1]], jnp.uint32))
    assert int(sample(logits, low, jnp.array([0]))[0]) != int(sample(logits, high, jnp.array([0]))[0])
