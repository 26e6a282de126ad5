"""Fields that the sampler acts on, on a real server."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from dsjax.demo import CHECKPOINT
from dsjax.tokenizer import Tokenizer
from tests.serve.server_process import ServerProcess
from tests.serve.sse import DONE, stream

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
KING = "The king"
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer


def post(client: httpx.Client, path: str = PATH, **body) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def choice_of(client: httpx.Client, **body) -> dict:
    [choice] = post(client, **body)["choices"]
    return choice


def scored_as_a_prompt(client: httpx.Client, ids: list[int], alternatives: int = 1) -> dict:
    body = GREEDY | {"max_tokens": 1}
    return choice_of(client, prompt=ids, echo=True, logprobs=alternatives, **body)["logprobs"]


def test_greedy_takes_the_likeliest_and_an_echo_scores_it_alike(http: httpx.Client, tokenizer: Tokenizer):
    """The same tokens, sampled one by one and then scored as a prompt, have the same log-probabilities."""
    answer = choice_of(http, prompt=KING, logprobs=3, **GREEDY)["logprobs"]
    for own, top in zip(answer["token_logprobs"], answer["top_logprobs"], strict=True):
        assert own == max(top.values()) <= 0
        assert len(top) == 3
    ids = tokenizer.encode(KING)
    whole = [*ids, *tokenizer.encode("".join(answer["tokens"]), add_special_tokens=False)]
    assert len(whole) == len(ids) + 12
    scores = scored_as_a_prompt(http, whole, alternatives=3)
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    answered = slice(len(ids), len(whole))
    assert scores["tokens"][answered] == answer["tokens"]
    assert scores["token_logprobs"][answered] == pytest.approx(answer["token_logprobs"], abs=1e-3)
    for found, expected in zip(scores["top_logprobs"][answered], answer["top_logprobs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-3)


def test_zero_alternatives_still_give_the_token(http: httpx.Client):
    logprobs = choice_of(http, prompt=KING, logprobs=0, **GREEDY)["logprobs"]
    for name, own, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top == {name: own}


def test_log_probabilities_are_those_before_biases_and_limits(http: httpx.Client, tokenizer: Tokenizer):
    body = GREEDY | {"max_tokens": 1}
    top = choice_of(http, prompt=KING, logprobs=20, **body)["logprobs"]["top_logprobs"][0]
    assert len(top) == 20
    assert sum(math.exp(logprob) for logprob in top.values()) < 1
    for name, logprob in list(top.items())[::5]:
        [token] = tokenizer.encode(name, add_special_tokens=False)
        forced = {"allowed_token_ids": [token], "logit_bias": {str(token): -50}, "temperature": 2}
        answer = choice_of(http, prompt=KING, logprobs=0, **(body | forced))["logprobs"]
        assert answer["tokens"] == [name]
        assert answer["token_logprobs"][0] == pytest.approx(logprob, abs=1e-3)


def test_fifty_prompts_are_scored_at_once_as_they_are_one_by_one(http: httpx.Client, tokenizer: Tokenizer):
    """What evaluation harnesses do: ids, echo, logprobs 1, max_tokens 1, greedy."""
    text = tokenizer.encode("To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer")
    prompts = [text[: 2 + place % len(text)] for place in range(50)]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, **GREEDY, "max_tokens": 1}
    choices = post(http, **body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(50))
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert all(own <= max(top.values()) for own, top in zip(*_scored(logprobs), strict=True))
    for place in (0, 7, 49):
        alone = scored_as_a_prompt(http, prompts[place])
        together = choices[place]["logprobs"]
        assert alone["tokens"] == together["tokens"]
        assert alone["token_logprobs"][1:] == pytest.approx(together["token_logprobs"][1:], abs=1e-3)


def _scored(logprobs: dict) -> tuple[list[float], list[dict[str, float]]]:
    return logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:]


def test_fifty_scoring_requests_at_a_time(http: httpx.Client, server: ServerProcess, tokenizer: Tokenizer):
    ids = tokenizer.encode("My kingdom for a horse")
    expected = scored_as_a_prompt(http, ids)["token_logprobs"][1:]

    def score(_: int) -> list[float]:
        with server.client() as client:
            return scored_as_a_prompt(client, ids)["token_logprobs"][1:]

    with ThreadPoolExecutor(10) as pool:
        for scores in pool.map(score, range(50)):
            assert scores == pytest.approx(expected, abs=1e-3)


def test_biases_and_allowed_tokens(http: httpx.Client, tokenizer: Tokenizer):
    [wanted] = tokenizer.encode("x", add_special_tokens=False)
    biased = choice_of(http, prompt=KING, logit_bias={str(wanted): 100}, **GREEDY)
    assert biased["text"] == "x" * 12
    plain = choice_of(http, prompt=KING, logprobs=0, **GREEDY)["logprobs"]["tokens"]
    [usual] = tokenizer.encode(plain[0], add_special_tokens=False)
    banned = choice_of(http, prompt=KING, logit_bias={str(usual): -100}, logprobs=0, **GREEDY)
    assert plain[0] not in banned["logprobs"]["tokens"]
    allowed = list(range(17, 2017))
    answer = choice_of(http, prompt=KING, allowed_token_ids=allowed, logprobs=0, max_tokens=12, seed=1)
    names = {tokenizer.token_bytes(token) for token in allowed}
    assert all(name.encode() in names for name in answer["logprobs"]["tokens"] if not name.startswith("bytes:"))


def test_stop_tokens(http: httpx.Client, tokenizer: Tokenizer):
    whole = choice_of(http, prompt=KING, logprobs=0, **GREEDY)
    tokens = whole["logprobs"]["tokens"]
    [stop] = tokenizer.encode(tokens[3], add_special_tokens=False)
    stopped = choice_of(http, prompt=KING, logprobs=0, stop_token_ids=[stop], **GREEDY)
    assert stopped["finish_reason"] == "stop"
    assert stopped["logprobs"]["tokens"] == tokens[: tokens.index(tokens[3]) + 1]
    later = choice_of(http, prompt=KING, logprobs=0, stop_token_ids=[stop], min_tokens=8, **GREEDY)
    assert tokens[3] not in later["logprobs"]["tokens"][:8]


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1e30}], ids=str
)
def test_penalties_make_answers_less_repetitive(http: httpx.Client, penalty: dict):
    body = {"prompt": "the the the the", "allowed_token_ids": list(range(17, 57)), **GREEDY, "max_tokens": 40}
    plain = choice_of(http, logprobs=0, **body)["logprobs"]["tokens"]
    varied = choice_of(http, logprobs=0, **body, **penalty)["logprobs"]["tokens"]
    assert len(set(varied)) > len(set(plain))


def test_min_p_leaves_the_likeliest_only(http: httpx.Client):
    greedy = choice_of(http, prompt=KING, **GREEDY)
    assert choice_of(http, prompt=KING, **(GREEDY | {"temperature": 1, "min_p": 0.999999}))["text"] == greedy["text"]


def test_answers_of_one_prompt(http: httpx.Client):
    """Each is what its own seed gives alone; greedy ones are equal."""
    body = {"prompt": [KING, "My lord,"], "max_tokens": 10, "ignore_eos": True}
    several = post(http, n=3, seed=5, **body)
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    for answer in range(3):
        alone = post(http, seed=5 + answer, **body)["choices"]
        assert [choice["text"] for choice in several["choices"][answer::3]] == [choice["text"] for choice in alone]
    assert several["usage"]["completion_tokens"] == 60
    assert several["usage"]["prompt_tokens"] == post(http, **body)["usage"]["prompt_tokens"]
    greedy = post(http, CHAT, messages=HELLO, n=4, **GREEDY)["choices"]
    assert len({choice["message"]["content"] for choice in greedy}) == 1


def test_a_prompt_that_comes_again_is_cached(http: httpx.Client):
    body = {"prompt": list(range(100, 300)), **GREEDY}
    first, second = post(http, **body), post(http, **body)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert second["choices"] == first["choices"]


def test_a_timeout_ends_an_answer(http: httpx.Client):
    body = {"prompt": [5, 6], "max_tokens": 2000, "ignore_eos": True, "timeout_s": 0.2}
    answer = post(http, **body)
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert answer["usage"]["completion_tokens"] < 2000
    *_, last, done = stream(http, PATH, **body)
    assert (last["choices"][0]["finish_reason"], done) == ("timeout", DONE)


def test_openai_client_completions(api: openai.OpenAI, tokenizer: Tokenizer):
    body = {"model": "demo", "prompt": KING, "max_tokens": 5, "temperature": 0.0}
    answer = api.completions.create(**body, n=2, logprobs=2, echo=True)  # type: ignore[call-overload]
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text.startswith(KING)
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(tokenizer.encode(KING)) + 5


def test_openai_client_chat(api: openai.OpenAI):
    body: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 5, "temperature": 0.0}
    whole = api.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert "".join(one.token for one in content).startswith(whole.choices[0].message.content)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    pieces = [
        one
        for chunk in api.chat.completions.create(**body, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content or ()
    ]
    assert [one.token for one in pieces] == [one.token for one in content]
    assert [one.logprob for one in pieces] == pytest.approx([one.logprob for one in content], abs=1e-3)
