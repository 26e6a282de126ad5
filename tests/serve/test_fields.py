"""What request fields do to requests and answers, with an engine that is plain Python."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from dsjax.demo import CHECKPOINT
from dsjax.engine.logprobs import TokenLogprobs
from dsjax.engine.request import Request as EngineRequest
from dsjax.serve import completions
from dsjax.serve.chat import completions as chat_completions
from dsjax.serve.context import Context
from dsjax.serve.logprobs import prompt_logprobs
from dsjax.serve.messages import PromptResult, TokenBatch
from dsjax.serve.request_group import RequestGroup
from dsjax.tokenizer import Tokenizer
from tests.serve.fake_app import FakeEngine, call

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello!"}]
USER = "<｜User｜>"
IMPOSSIBLE = -9999.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer


def batch(ids: list[int], reason: str | None = None, prompt: PromptResult | None = None, **scores: Any) -> TokenBatch:
    """`ids` with log-probabilities -1, -2, ... and token 20 as the likeliest everywhere, if `scored`."""
    logprobs = [TokenLogprobs(-1.0 - i, [(20, -0.5), (21, IMPOSSIBLE)]) for i in range(len(ids))] if scores else None
    return TokenBatch("x", ids, reason, logprobs, prompt)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]", response.text
    return [json.loads(line) for line in lines]


def test_request_fields_reach_the_engine():
    fields = {
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "seed": -4,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "prompt_logprobs": 3,
    }
    lists = {"logit_bias": {"5": -100, "07": 1.5}, "allowed_token_ids": [9, 5], "stop_token_ids": [4]}
    more = {"priority": -3, "timeout_s": 1000, "request_id": "me"}
    for path, prompt, logprobs, expected in (
        (COMPLETIONS, {"prompt": [1, 2]}, {"logprobs": 4}, 4),
        (CHAT, {"messages": HELLO}, {"logprobs": True, "top_logprobs": 5}, 5),
        (CHAT, {"messages": HELLO}, {"logprobs": True}, 0),
    ):
        engine = FakeEngine(batch([5], "stop", PromptResult(0, []), scored=True))
        response = call(engine, path, Tokenizer.load(CHECKPOINT), **prompt, **fields, **lists, **more, **logprobs)
        assert response.status_code == 200, response.text
        [request] = engine.opened
        params = request.params
        assert {name: getattr(params, name) for name in fields} == fields
        assert (dict(params.logit_bias), params.allowed_token_ids) == ({5: -100, 7: 1.5}, (5, 9))
        assert (params.stop_token_ids, params.logprobs) == ((4,), expected)
        assert (request.id, request.max_tokens, request.seed, request.priority) == ("me", 9, -4, -3)
        assert request.deadline is not None
        assert engine.closed == 1


@pytest.mark.parametrize(
    ("path", "change", "param", "part"),
    [
        (COMPLETIONS, {"logit_bias": {"five": 1}}, "logit_bias", "'five' is no token id"),
        (COMPLETIONS, {"logit_bias": {"": 1}}, "logit_bias", "'' is no token id"),
        (COMPLETIONS, {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id"),
        (COMPLETIONS, {"logit_bias": {"4096": 1}}, "logit_bias", "outside the vocabulary 0..4095"),
        (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias", "outside the vocabulary"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        (COMPLETIONS, {"logit_bias": {"5": None}}, "logit_bias", "number"),
        (COMPLETIONS, {"logit_bias": [5]}, "logit_bias", "dictionary"),
        (COMPLETIONS, {"logit_bias": dict.fromkeys(map(str, range(513)), 1)}, "logit_bias", "at most 512"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        (COMPLETIONS, {"allowed_token_ids": [4096]}, "allowed_token_ids", "outside the vocabulary"),
        (COMPLETIONS, {"stop_token_ids": [-1]}, "stop_token_ids", "outside the vocabulary"),
        (COMPLETIONS, {"stop_token_ids": list(range(200))}, "stop_token_ids", "at most 64"),
        (COMPLETIONS, {"stop_token_ids": ["x"]}, "stop_token_ids", "integer"),
        (COMPLETIONS, {"min_p": 1}, "min_p", "below 1"),
        (COMPLETIONS, {"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
        (COMPLETIONS, {"frequency_penalty": "1"}, "frequency_penalty", "number"),
        (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty", "number from 1.17"),
        (COMPLETIONS, {"min_tokens": 17}, "min_tokens", "may have 16 tokens"),
        (COMPLETIONS, {"n": 0}, "n", "from 1 to 128"),
        (COMPLETIONS, {"n": 129}, "n", "from 1 to 128"),
        (COMPLETIONS, {"n": 100, "prompt": ["x"] * 21}, "n", "2100 answers; at most 2048"),
        (COMPLETIONS, {"n": 10**4299, "prompt": ["x"] * 21}, "n", "from 1 to 128"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {"logprobs": 21, "echo": True}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        (COMPLETIONS, {"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs", "from 0 to 20"),
        (COMPLETIONS, {"echo": 1}, "echo", "boolean"),
        (COMPLETIONS, {"priority": 2**31}, "priority", "32-bit"),
        (COMPLETIONS, {"timeout_s": 0}, "timeout_s", "positive"),
        (COMPLETIONS, {"prompt": ["x", "y"], "min_tokens": 17}, "min_tokens", "17"),
        (CHAT, {"logprobs": 1}, "logprobs", "boolean"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs", "needs logprobs: true"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs", "needs logprobs: true"),
        (CHAT, {"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "may have 3 tokens"),
        (CHAT, {"echo": True}, "echo", "not supported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_that_are_refused(tokenizer: Tokenizer, path: str, change: dict[str, Any], param: str, part: str):
    engine = FakeEngine([5])
    response = call(
        engine, path, tokenizer, **({"prompt": "The king"} if path == COMPLETIONS else {"messages": HELLO}) | change
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert part in response.json()["error"]["message"]
    assert not engine.opened


@pytest.mark.parametrize("count", [0, 1, 2])
def test_completion_logprobs(tokenizer: Tokenizer, count: int):
    """Also for tokens that are part of a character, whose text comes with the last one."""
    ids = tokenizer.encode("a 🌶 b", add_special_tokens=False)
    parts = [tokenizer.token_bytes(token) for token in ids]
    engine = FakeEngine(batch(ids[:2], scored=True), batch(ids[2:], "length", scored=True))
    [choice] = call(engine, COMPLETIONS, tokenizer, prompt=[1], logprobs=count).json()["choices"]
    assert choice["text"] == "a 🌶 b"
    logprobs = choice["logprobs"]
    assert len(ids) > 4
    assert logprobs["token_logprobs"] == [-1.0, -2.0, *(-1.0 - i for i in range(len(ids) - 2))]
    characters = [part.decode(errors="ignore") for part in parts]
    assert "" in characters
    for part, name in zip(parts, logprobs["tokens"], strict=True):
        assert name == (part.decode() if part.decode(errors="ignore") else "bytes:" + str(part)[2:-1])
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for part, offset in zip(characters, logprobs["text_offset"], strict=True):
        assert "a 🌶 b"[offset:].startswith(part)
    likeliest = {tokenizer.decode([20]): -0.5, tokenizer.decode([21]): IMPOSSIBLE}
    for name, own, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top == dict(list(likeliest.items())[:count]) | {name: own}


def test_chat_logprobs(tokenizer: Tokenizer):
    ids = tokenizer.encode("née", add_special_tokens=False)
    engine = FakeEngine(batch(ids, "stop", scored=True))
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    [choice] = call(engine, CHAT, tokenizer, **body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == choice["message"]["content"] == "née"
    assert [one["logprob"] for one in content] == [-1.0 - i for i in range(len(ids))]
    text = tokenizer.decode([20])
    assert all(
        one["top_logprobs"] == [{"token": text, "logprob": -0.5, "bytes": list(text.encode())}] for one in content
    )
    [choice] = call(engine, CHAT, tokenizer, **(body | {"top_logprobs": 0})).json()["choices"]
    assert all(one["top_logprobs"] == [] for one in choice["logprobs"]["content"])


@pytest.mark.parametrize("is_text", [True, False])
def test_echo(tokenizer: Tokenizer, is_text: bool):
    """Text comes back as it was sent, ids with their special tokens; the begin of text is no part of a text."""
    text = f"{USER}née 🌶!"
    ids = tokenizer.encode(text, add_special_tokens=is_text)
    answer = tokenizer.encode(" Ay", add_special_tokens=False)
    scores = PromptResult(3, [TokenLogprobs(-7.0, [(20, -0.5)])] * (len(ids) - 1))
    prompt: Any = text if is_text else ids
    engine = FakeEngine(batch(answer, "stop", scores, scored=True))
    response = call(engine, COMPLETIONS, tokenizer, prompt=prompt, echo=True, logprobs=1).json()
    [choice] = response["choices"]
    assert choice["text"] == f"{text} Ay"
    assert engine.opened[0].params.prompt_logprobs == 1
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *[-7.0] * (len(ids) - 1), *(-1.0 - i for i in range(len(answer)))]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1][tokenizer.decode([20])] == -0.5
    for token, offset in zip([*ids, *answer], logprobs["text_offset"], strict=True):
        part = "" if token == 0 else tokenizer.token_bytes(token).decode(errors="ignore")
        assert choice["text"][offset:].startswith(part)
    assert logprobs["text_offset"][-1] == len(choice["text"]) - len(tokenizer.decode(answer[-1:]))
    assert choice["prompt_logprobs"] is None
    assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}

    engine = FakeEngine(batch(answer, "stop", PromptResult(0, None)))
    plain = call(engine, COMPLETIONS, tokenizer, prompt=prompt, echo=True).json()["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (f"{text} Ay", None)
    assert engine.opened[0].params.prompt_logprobs is None


def test_prompt_logprobs(tokenizer: Tokenizer):
    scores = PromptResult(
        0, [TokenLogprobs(-7.0, [(20, -0.5), (22, -1.0)]), TokenLogprobs(-0.5, [(20, -0.5), (9, -2.0)])]
    )
    expected = [
        None,
        {
            "5": {"logprob": -7.0, "rank": None, "decoded_token": tokenizer.decode([5], False)},
            "20": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([20])},
        },
        {"20": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([20])}},
    ]
    engine = FakeEngine(batch([30], None, scores), batch([31], "stop"))
    body = {"prompt": [4, 5, 20], "prompt_logprobs": 1}
    assert call(engine, COMPLETIONS, tokenizer, **body).json()["choices"][0]["prompt_logprobs"] == expected
    first, second = events(call(engine, COMPLETIONS, tokenizer, **body, stream=True))
    assert first["choices"][0]["prompt_logprobs"] == expected
    assert second["choices"][0]["prompt_logprobs"] is None


def test_prompt_logprobs_of_a_chat(tokenizer: Tokenizer):
    ids = tokenizer.encode(tokenizer.render_chat(HELLO), add_special_tokens=False)
    scores = PromptResult(0, [TokenLogprobs(-7.0, [])] * (len(ids) - 1))
    engine = FakeEngine(batch([30], None, scores), batch([30], None, scores), batch([31], "stop"), batch([31], "stop"))
    body = {"messages": HELLO, "prompt_logprobs": 0, "n": 2}
    answer = call(engine, CHAT, tokenizer, **body).json()
    assert [len(one) for one in answer["prompt_logprobs"][1:]] == [1] * (len(ids) - 1)
    chunks = events(call(engine, CHAT, tokenizer, **body, stream=True))
    assert [chunk["prompt_logprobs"] is not None for chunk in chunks] == [False, False, True, False, False, False]


@pytest.mark.parametrize("reason", [None, "timeout"])
def test_all_answers_have_the_prompt_logprobs_of_the_first(tokenizer: Tokenizer, reason: str | None):
    """Also those whose first tokens are there before the prompt is scored, whole and streamed."""
    scores = [PromptResult(0, [TokenLogprobs(logprob, [(20, -0.5)])]) for logprob in (-7.0, -8.0)]
    unscored = PromptResult(0, None)
    arriving = [
        (1, batch([30], None, unscored, scored=True)),
        (3, batch([31], "stop", unscored, scored=True)),
        (0, batch([32], reason, scores[0], scored=True)),
        (2, batch([33], reason, scores[1], scored=True)),
        (1, batch([34], "stop", scored=True)),
    ]
    if reason is None:
        arriving += [(index, batch([35], "stop", scored=True)) for index in (0, 2)]

    class LateEngine(FakeEngine):
        def open(self, requests: Sequence[EngineRequest]) -> RequestGroup:
            self.opened += requests
            group = RequestGroup(requests[0].id, len(requests), self._close)
            for item in arriving:
                group.put(item)
            return group

    engine = LateEngine()
    body = {"prompt": [[4, 5], [6, 7]], "n": 2, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    whole = call(engine, COMPLETIONS, tokenizer, **body).json()["choices"]
    assert [request.params.prompt_logprobs for request in engine.opened] == [1, None, 1, None]
    for choice, own, logprob in zip(whole, ("5", "5", "7", "7"), (-7.0, -7.0, -8.0, -8.0), strict=True):
        assert choice["prompt_logprobs"][1][own]["logprob"] == logprob
        assert choice["logprobs"]["token_logprobs"][:2] == [None, logprob]
    pieces = [chunk["choices"][0] for chunk in events(call(engine, COMPLETIONS, tokenizer, **body, stream=True))]
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [piece["prompt_logprobs"] for piece in own] == [choice["prompt_logprobs"], *[None] * (len(own) - 1)]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_writes_prompt_logprobs_in_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str):
    """They may take seconds, in which nobody else would be served."""
    module, on_loop = {COMPLETIONS: completions, CHAT: chat_completions}[path], []

    def recorded(*arguments: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return prompt_logprobs(*arguments)

    monkeypatch.setattr(module, "prompt_logprobs", recorded)
    messages = [{"role": "user", "content": " king" * 70}]
    prompt = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    scores = PromptResult(0, [TokenLogprobs(-7.0, [(20, -0.5)])] * (len(prompt) - 1))
    engine = FakeEngine(batch([30], None, scores), batch([31], "stop"))
    body: dict[str, Any] = {"prompt": prompt} if path == COMPLETIONS else {"messages": messages}
    events(call(engine, path, tokenizer, **body, prompt_logprobs=1, stream=True))
    assert on_loop == [False]


def test_a_token_is_named_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    asked = []
    token_bytes = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token: asked.append(token) or token_bytes(token))
    context = Context(FakeEngine(), tokenizer, ("fake",))
    for _ in range(2):
        assert context.token_names.text(20) == tokenizer.decode([20])
        assert context.token_names.bytes(20) == list(tokenizer.decode([20]).encode())
    assert asked == [20]


def test_several_answers_to_several_prompts(tokenizer: Tokenizer):
    """Choice prompt * n + i; a prompt counts once; the seed is counted up."""
    first = [batch([40 + place], None, PromptResult(place, None)) for place in range(6)]
    last = [batch([50 + place], "length") for place in range(6)]
    engine = FakeEngine(*first, *last)
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 3, "seed": 7, "request_id": "me"}
    answer = call(engine, COMPLETIONS, tokenizer, **body).json()
    assert [(one.id, one.prompt, one.params.n, one.seed) for one in engine.opened] == [
        ("me", [1, 2, 3], 1, 7),
        ("me-1", [1, 2, 3], 1, 8),
        ("me-2", [1, 2, 3], 1, 9),
        ("me-3", [4, 5], 1, 7),
        ("me-4", [4, 5], 1, 8),
        ("me-5", [4, 5], 1, 9),
    ]
    texts = [tokenizer.decode([40 + place, 50 + place]) for place in range(6)]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0 + 3},
    }
    streamed = events(call(engine, COMPLETIONS, tokenizer, **body, stream=True))
    assert [chunk["choices"][0]["index"] for chunk in streamed] == [*range(6), *range(6)]


def test_several_chat_answers(tokenizer: Tokenizer):
    engine = FakeEngine(batch([40]), batch([41]), batch([42], "stop"), batch([43], "length"))
    answer = call(engine, CHAT, tokenizer, messages=HELLO, n=2).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, tokenizer.decode([40, 42]), "stop"),
        (1, tokenizer.decode([41, 43]), "length"),
    ]
    choices = [chunk["choices"][0] for chunk in events(call(engine, CHAT, tokenizer, messages=HELLO, n=2, stream=True))]
    assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 0, 1]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", "assistant", *[None] * 4]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_the_logprobs_of_the_whole(tokenizer: Tokenizer, path: str):
    ids = tokenizer.encode("née 🌶!", add_special_tokens=False)
    prompt = tokenizer.encode(tokenizer.render_chat(HELLO), add_special_tokens=False)
    scores = PromptResult(0, [TokenLogprobs(-7.0, [])] * (len(prompt) - 1))
    batches = [batch([ids[0]], None, scores, scored=True), *(batch([token], scored=True) for token in ids[1:])]
    engine = FakeEngine(*batches, batch([], "timeout", scored=True))
    body = (
        {"prompt": prompt, "logprobs": 2, "echo": True}
        if path == COMPLETIONS
        else {"messages": HELLO, "logprobs": True}
    )
    [whole] = call(engine, path, tokenizer, **body).json()["choices"]
    pieces = [chunk["choices"][0] for chunk in events(call(engine, path, tokenizer, **body, stream=True))]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["timeout"]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]] == values


def test_a_timeout_before_the_first_token(tokenizer: Tokenizer):
    """The prompt may then be scored in part only."""
    engine = FakeEngine(batch([], "timeout", PromptResult(0, [TokenLogprobs(-7.0, [])]), scored=True))
    [choice] = call(engine, COMPLETIONS, tokenizer, prompt=[5, 6, 7], echo=True, logprobs=0).json()["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("timeout", tokenizer.decode([5, 6, 7], False))
    assert choice["logprobs"]["token_logprobs"] == [None, -7.0, None]


def test_without_tokenizer_tokens_have_their_ids():
    scores = PromptResult(0, [TokenLogprobs(-7.0, [(8, -1.0)])])
    engine = FakeEngine(batch([9], "stop", scores, scored=True))
    [choice] = call(engine, COMPLETIONS, prompt=[5, 6], echo=True, logprobs=1).json()["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"] == {
        "tokens": ["token_id:5", "token_id:6", "token_id:9"],
        "token_logprobs": [None, -7.0, -1.0],
        "top_logprobs": [None, {"token_id:8": -1.0, "token_id:6": -7.0}, {"token_id:20": -0.5, "token_id:9": -1.0}],
        "text_offset": [0, 0, 0],
    }
