"""What SamplingParams takes, refuses, and carries over the socket."""

from typing import Any

import msgspec
import numpy as np
import pytest

from dsjax import SamplingParams
from dsjax.engine.request import Limits, Request
from dsjax.errors import RequestError

LIMITS = Limits(vocab_size=1000, max_model_len=64, cache_tokens=64)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1, NAN, INF, 10**400, "hot", True, None)],
        *[("top_p", value) for value in (0, 1.1, -0.5, NAN)],
        *[("top_k", value) for value in (-2, 0.01, 2**31, NAN)],
        *[("min_p", value) for value in (-0.1, 1, NAN, None)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, True)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, "1")],
        *[("repetition_penalty", value) for value in (0, -1, INF, NAN, 1e-40)],
        *[("max_tokens", value) for value in (0, -1, 1.5, True)],
        *[("min_tokens", value) for value in (-1, 17, 1.5, None)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, 0.5)],
        *[("n", value) for value in (0, 129, 1.0, None)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, True, 1.0)],
        *[("stop_token_ids", value) for value in (5, None, "ab", [1.0], [True], {1: 2}, list(range(65)))],
        *[("allowed_token_ids", value) for value in ([], 5, ["a"], [None])],
        *[("logit_bias", value) for value in ([1], {"1": 1.0}, {1: 101}, {1: NAN}, {1: None}, {True: 1}, {1: -INF})],
        ("logit_bias", dict.fromkeys(range(513), 1.0)),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any):
    with pytest.raises(RequestError, match=f"^{field} (is|has|holds) ") as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {1000: 1.0}}, "Token 1000 in logit_bias is outside the vocabulary 0..999"),
        ({"allowed_token_ids": [1, -1]}, "Token -1 in allowed_token_ids"),
        ({"stop_token_ids": [2**40]}, "Token 1099511627776 in stop_token_ids"),
        ({"max_tokens": None, "min_tokens": 63}, "min_tokens is 63, but the answer may have 62 tokens"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused_when_the_request_is_made(params: dict, message: str):
    with pytest.raises(RequestError, match=message):
        Request.create("a", [1, 2], SamplingParams(**params), LIMITS)


def test_the_first_of_n_answers_alone_scores_the_prompt():
    params = SamplingParams(n=3, seed=7, prompt_logprobs=2, logprobs=1)
    expected = [SamplingParams(seed=7, prompt_logprobs=2, logprobs=1)]
    assert params.answers() == expected + [SamplingParams(seed=seed, logprobs=1) for seed in (8, 9)]
    with pytest.raises(RequestError, match="n is 3, but a request has one answer"):
        Request.create("a", [1, 2], params, LIMITS)


def test_ids_are_kept_as_sorted_tuples_and_numpy_is_welcome():
    ids: Any = np.array([7, 3, 7])
    bias: Any = {ids[0]: np.float32(1)}
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)
    assert params.stop_token_ids == params.allowed_token_ids == (3, 7)
    assert params == SamplingParams(stop_token_ids=(3, 7), allowed_token_ids=[3, 7], logit_bias={7: 1})


def test_an_allowed_list_may_have_any_length():
    assert len(SamplingParams(allowed_token_ids=range(2000)).allowed_token_ids or ()) == 2000


def test_parameters_survive_the_socket():
    params = SamplingParams(logit_bias={3: -1.5}, allowed_token_ids=[2, 3], stop_token_ids=[9], logprobs=0, n=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
