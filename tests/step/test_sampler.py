"""The whole sampler against NumPy in float64: distributions, and what a draw may depend on."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from dsjax import SamplingParams
from dsjax.engine.request import Request
from dsjax.step.layout import NONE
from dsjax.step.sampler import keep_heaviest
from tests.step.rows import PLACES, VOCABULARY, Places, Rows, distribution, request

LEAST_LIKELY = 1e-5  # a fair sampler fails one test in 100,000
LOGITS = np.random.default_rng(3).normal(size=VOCABULARY).astype(np.float32) * 1.5
PROMPT, OUTPUTS = [3, 4, 4, 5, 39, 2], [5, 6, 6, 6, 7, 8, 9, 10]
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "cuts": {"temperature": 0.9, "min_p": 0.02, "top_k": 7, "top_p": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.8},
    "penalties": {"presence_penalty": -1, "frequency_penalty": 0.9, "repetition_penalty": 0.6, "temperature": 0.8},
    "bias": {"logit_bias": {0: 2.0, 5: -100, 39: 1.5}},
    "allowed": {"allowed_token_ids": [0, 5, 31, 32, 39]},
    "min_tokens": {"min_tokens": len(OUTPUTS) + 1, "stop_token_ids": [2, 7]},
    "min_tokens_reached": {"min_tokens": len(OUTPUTS), "stop_token_ids": [2, 7]},
    "min_tokens_without_eos": {"min_tokens": 50, "stop_token_ids": [7], "ignore_eos": True},
    "greedy": {"temperature": 0},
    "greedy_constrained": {"temperature": 0, "logit_bias": {0: 3}, "repetition_penalty": 5, "min_tokens": 20},
    "everything": {
        "allowed_token_ids": range(30),
        "min_tokens": 30,
        "stop_token_ids": [9],
        "logit_bias": {3: 2.0, 35: 100.0},
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "temperature": 1.3,
        "min_p": 0.01,
        "top_k": 20,
        "top_p": 0.95,
    },
}


def requests_with(names: list[str]) -> list[Request]:
    return [
        request(SamplingParams(max_tokens=None, seed=11 + i, **OPTIONS[name]), PROMPT, OUTPUTS)
        for i, name in enumerate(names)
    ]


def draw(requests: list[Request]) -> np.ndarray:
    """Tokens [requests, PLACES]: the rows at many positions, as if each had the answer OUTPUTS there."""
    count, first = len(requests), len(PROMPT) + len(OUTPUTS)
    rows = Rows(requests)
    # min_tokens depends on the position: move its end along with the positions
    still_masked = rows.sampling.stop_from > first
    rows.sampling = rows.sampling._replace(stop_from=jnp.where(still_masked, jnp.iinfo(jnp.int32).max, 0))
    steps, counts = [], rows.output_counts
    for step in range(count):
        rows.output_counts = counts
        places = step * PLACES + np.arange(PLACES)
        steps.append(rows.sample(LOGITS, Places(places % count, 100 + places // count, np.full(PLACES, NONE)))[0])
    return np.concatenate(steps).reshape(-1, count).T


def check_distribution(tokens: np.ndarray, expected: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    common = expected * len(tokens) >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * len(tokens)
    statistic = ((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    assert chi2.sf(statistic, max(np.count_nonzero(wanted) - 1, 1)) > LEAST_LIKELY


def test_distributions_of_different_options_in_one_batch():
    requests = requests_with(list(OPTIONS))
    tokens = draw(requests)
    for own, of_row in zip(requests, tokens, strict=True):
        check_distribution(of_row, distribution(LOGITS, own))


@pytest.mark.parametrize("name", OPTIONS)
def test_distribution_of_each_option_alone(name: str):
    """Alone, the branches of all other options are not taken."""
    requests = requests_with([name])
    check_distribution(draw(requests)[0], distribution(LOGITS, requests[0]))


def test_a_draw_does_not_depend_on_the_neighbours():
    together = draw(requests_with(list(OPTIONS)))
    for i, own in enumerate(requests_with(list(OPTIONS))):
        np.testing.assert_array_equal(draw([own])[0], together[i])


def test_a_draw_depends_on_seed_and_position_only():
    def tokens(seeds: list[int]) -> np.ndarray:
        return draw([request(SamplingParams(max_tokens=None, seed=seed), PROMPT, OUTPUTS) for seed in seeds])

    np.testing.assert_array_equal(tokens([5, 9, 2**40]), tokens([9, 2**40, 5])[[2, 0, 1]])
    low, high, negative = tokens([5, 5 + 2**32, -(2**63) + 5])
    assert (low != high).any(), "the high word of the seed counts"
    assert (low != negative).any()
    assert len(set(low.tolist())) > 5, "positions draw different noise"


def test_greedy_with_every_option():
    requests = [
        request(SamplingParams(max_tokens=None, **OPTIONS[name] | {"temperature": 0}), PROMPT, OUTPUTS)
        for name in OPTIONS
    ]
    tokens, _ = Rows(requests).sample(LOGITS, Places.next_of(requests))
    assert tokens.tolist() == [int(distribution(LOGITS, own).argmax()) for own in requests]
    assert len(set(tokens.tolist())) > 1, "the options make a difference"


def test_top_k_1_is_greedy_and_large_top_k_is_off():
    ones = draw([request(SamplingParams(max_tokens=None, top_k=1, seed=1), PROMPT)])
    assert (ones == LOGITS.argmax()).all()
    huge, off = draw([request(SamplingParams(max_tokens=None, top_k=k, seed=1), PROMPT) for k in (2**31 - 1, 0)])
    np.testing.assert_array_equal(huge, off)


def test_stop_ids_stay_possible_if_nothing_else_is_allowed():
    own = request(SamplingParams(max_tokens=None, allowed_token_ids=[1, 7], stop_token_ids=[7], min_tokens=50), PROMPT)
    assert set(draw([own])[0]) <= {1, 7}


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
