"""What admission writes and what steps leave behind: counts of the answer, histories, rows that others held before."""

import numpy as np

from dsjax import SamplingParams
from dsjax.engine.request import Request
from dsjax.engine.scheduled import Admission
from dsjax.step.layout import CACHED_PAGES_PER_CALL, NONE
from tests.step.rows import VOCABULARY, Places, Rows, distribution, request

PENALTIES = SamplingParams(
    temperature=0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=None
)
PROMPT = [3, 4, 4, 5, 39]


def logits_of_step(step: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(count, VOCABULARY)).astype(np.float32)


def step_greedily(rows: Rows, requests: list[Request], logits: np.ndarray) -> None:
    """Sample the next token of each request, which must be the one of the float64 model."""
    tokens, _ = rows.sample(logits, Places.next_of(requests))
    for own, token, row_logits in zip(requests, tokens.tolist(), logits, strict=True):
        assert token == distribution(row_logits, own).argmax()
        own.outputs.append(token)


def test_penalties_follow_the_answer_over_30_steps():
    """Beside a row without penalties, whose tokens are not counted."""
    requests = [request(PENALTIES, PROMPT), request(SamplingParams(temperature=0), PROMPT), request(PENALTIES, [7])]
    rows = Rows(requests)
    for step in range(30):
        step_greedily(rows, requests, np.tile(logits_of_step(step % 3), (3, 1)))
    assert len(set(requests[0].outputs)) > len(set(requests[1].outputs)) == 3
    counts = np.asarray(rows.output_counts)
    np.testing.assert_array_equal(counts[0], np.bincount(requests[0].outputs, minlength=VOCABULARY))
    assert (counts[1] == 3).all()


def test_a_preempted_request_goes_on_where_it_was():
    """Its history takes several calls (three distinct ids each), and another row had it before."""
    whole = request(PENALTIES, PROMPT)
    rows = Rows([request(PENALTIES, [8]), whole])
    for step in range(12):
        step_greedily(rows, [whole], logits_of_step(step))
    whole.row = 0
    rows.admit([Admission(whole, {"latent": []})])
    np.testing.assert_array_equal(rows.output_counts[0], rows.output_counts[1])
    for step in range(12, 20):
        step_greedily(rows, [whole], logits_of_step(step))


def test_a_row_keeps_nothing_of_the_request_before():
    own = request(
        SamplingParams(temperature=0, allowed_token_ids=[2], logit_bias={2: 5}, presence_penalty=2, min_tokens=9), [5]
    )
    rows = Rows([own])
    step_greedily(rows, [own], logits_of_step(0))
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={9: 1}), PENALTIES):
        following = request(params, PROMPT)
        following.row = 0
        rows.admit([Admission(following, {"latent": []})])
        for step in range(5):
            step_greedily(rows, [following], logits_of_step(step))


def test_stop_ids_come_back_after_min_tokens():
    own = request(SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[6]), PROMPT)
    rows, logits = Rows([own]), np.zeros((1, VOCABULARY), np.float32)
    logits[0, [1, 6, 9]] = 3, 2, 1
    for _ in range(4):
        step_greedily(rows, [own], logits)
    assert own.outputs == [9, 9, 9, 1]


def test_known_tokens_are_scored_and_change_nothing():
    """Three prompt tokens of row 1 are scored, then its next token is sampled; row 0 is scored only."""
    scored = SamplingParams(temperature=0, presence_penalty=2, prompt_logprobs=0, max_tokens=None)
    requests = [request(scored, PROMPT), request(scored, PROMPT)]
    rows, logits = Rows(requests), logits_of_step(1, 5)
    places = Places(np.array([0, 1, 1, 1, 1]), np.array([2, 1, 2, 3, 4]), np.array([4, 4, 4, 5, NONE]))
    tokens, logprobs = rows.sample(logits, places)
    assert tokens[:4].tolist() == [4, 4, 4, 5]
    assert tokens[4] == logits[4].argmax()
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs.chosen[:4], expected[np.arange(4), tokens[:4]], rtol=1e-5)
    assert rows.last_tokens[:2].tolist() == [7, tokens[4]]
    counts = np.asarray(rows.output_counts)
    assert counts[0].sum() == 0
    assert np.flatnonzero(counts[1]).tolist() == [tokens[4]]


def test_cached_pages_of_many_requests_take_several_calls():
    requests = [request(SamplingParams(), [5]) for _ in range(3)]
    rows = Rows(requests)
    pages = [list(range(1, 1 + count)) for count in (CACHED_PAGES_PER_CALL, 7, 2 * CACHED_PAGES_PER_CALL)]
    rows.admit([Admission(own, {"latent": held}) for own, held in zip(requests, pages, strict=True)])
    table = np.asarray(rows.page_tables["latent"])
    for row, held in enumerate(pages):
        assert table[row, : len(held)].tolist() == held
        assert not table[row, len(held) :].any()
