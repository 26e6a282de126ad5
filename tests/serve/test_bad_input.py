"""Bad requests get a 400 that says what is wrong, and the server goes on."""

import json
from typing import Any

import httpx
import pytest

from dsjax.serve.body_limit import MAX_BODY_BYTES

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello!"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [  # what the body adds, param, part of the message
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1]"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [[1], []]}, "prompt", "prompt[1]"),
    ({"prompt": None}, "prompt", "text, token ids"),
    ({"prompt": 5}, "prompt", "text, token ids"),
    ({"prompt": {"a": 1}}, "prompt", "text, token ids"),
    ({"prompt": [1, "a"]}, "prompt", "item"),
    ({"prompt": ["a", [1]]}, "prompt", "item 1"),
    ({"prompt": [1.5]}, "prompt", "item 0"),
    ({"prompt": [True]}, "prompt", "item 0"),
    ({"prompt": [[1], [2, None]]}, "prompt", "item 1"),
    ({"prompt": [4096]}, "prompt", "4096"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [[1], [10**30]]}, "prompt", "prompt[1]"),
    ({"prompt": [5] * 2048}, "prompt", "2048"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": "é" * 100_000}, "prompt", "200000 bytes of text. That is at least 6667 tokens"),
    ({"prompt": ["x", "x" * 100_000]}, "prompt", "prompt[1]: The prompt has 100000 bytes"),
    ({"prompt": ["x"] * 2049}, "prompt", "2049 prompts; at most 2048"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": 2048}, "max_tokens", "2048"),
    ({"max_tokens": 1.0}, "max_tokens", "integer"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": "1"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"temperature": [1]}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": 0.01}, "top_k", "integer"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": True}, "top_k", "integer"),
    ({"top_k": 10**12}, "top_k", "from -1 to 2147483647"),
    ({"seed": 2**63}, "seed", "from -2**63 to 2**63 - 1"),
    ({"seed": 0.5}, "seed", "integer"),
    ({"stream": "true"}, "stream", "boolean"),
    ({"stream": 1}, "stream", "boolean"),
    ({"ignore_eos": "false"}, "ignore_eos", "boolean"),
    ({"user": 5}, "user", "string"),
    ({"request_id": 5}, "request_id", "string"),
    ({"request_id": "a b"}, "request_id", "ASCII"),
    ({"request_id": "a\r\nX-Evil: 1"}, "request_id", "ASCII"),
    ({"request_id": ""}, "request_id", "ASCII"),
    ({"model": 5}, "model", "string"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": 1}, "stream_options", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage"),
]
UNSUPPORTED: list[dict[str, Any]] = [
    {"stop": "x"},
    {"stop": ["x"]},
    {"response_format": {"type": "json_object"}},
    {"best_of": 2},
    {"skip_special_tokens": False},
    {"use_beam_search": True},
]
UNSUPPORTED_COMPLETIONS: list[dict[str, Any]] = [{"suffix": "x"}, {"max_completion_tokens": 5}]
UNSUPPORTED_CHAT: list[dict[str, Any]] = [
    {"echo": True},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"reasoning_effort": "high"},
    {"chat_template_kwargs": {"thinking": True}},
]
BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": ["Hello"]}, "messages", "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0]"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages", "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text only"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "surrogate"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages", "template"),
    ({"messages": [{"role": "user", "content": "thou art " * 3000}]}, "messages", "no room"),
    ({"messages": [{"role": "user", "content": "thou art " * 90_000}]}, "messages", "bytes of text"),
    ({"messages": HELLO * 8193}, "messages", "at most 8192"),
    ({"messages": [{"role": "user"}] * 8000}, "messages", "messages[4]"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens"),
    ({"temperature": "hot"}, "temperature", "number"),
]


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """POST as ASCII: httpx itself refuses text that is not valid Unicode."""
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def check_refused(client: httpx.Client, path: str, body: dict[str, Any], param: str, part: str) -> None:
    response = post(client, path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert part in error["message"]
    check_alive(client)


def check_alive(client: httpx.Client) -> None:
    good = client.post(COMPLETIONS, json={"prompt": "The king", "max_tokens": 1})
    assert good.status_code == 200, good.text


@pytest.mark.parametrize(("change", "param", "part"), BAD_COMPLETIONS, ids=lambda value: repr(value)[:40])
def test_bad_completion(http: httpx.Client, change: dict[str, Any], param: str, part: str):
    check_refused(http, COMPLETIONS, {"prompt": "The king", **change}, param, part)


@pytest.mark.parametrize(("change", "param", "part"), BAD_CHAT, ids=lambda value: repr(value)[:40])
def test_bad_chat(http: httpx.Client, change: dict[str, Any], param: str, part: str):
    check_refused(http, CHAT, {"messages": HELLO, **change}, param, part)


@pytest.mark.parametrize("change", UNSUPPORTED + UNSUPPORTED_COMPLETIONS, ids=repr)
def test_unsupported_in_completions(http: httpx.Client, change: dict[str, Any]):
    [name] = change
    check_refused(http, COMPLETIONS, {"prompt": "The king", **change}, name, f"{name} is not supported yet")


@pytest.mark.parametrize("change", UNSUPPORTED + UNSUPPORTED_CHAT, ids=repr)
def test_unsupported_in_chat(http: httpx.Client, change: dict[str, Any]):
    [name] = change
    check_refused(http, CHAT, {"messages": HELLO, **change}, name, f"{name} is not supported yet")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b"\xff\xfe\xfa", b"[" * 100_000, b'{"prompt": tru}'])
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, body: bytes):
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "body" in response.json()["error"]["message"].lower()
    check_alive(http)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "\xff"}', "not valid UTF-8: invalid start byte at byte 12"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"max_tokens": ' + b"9" * 10_000 + b"}", "an integer of more than 4300 digits"),
        (b'{"prompt": "x", "\\ud800": 1}', r"text that is not valid Unicode: '\ud800'"),
        (b'{"prompt": "x", "stream_options": {"\\udfff": 1}}', r"stream_options holds text that is not valid Unicode"),
    ],
    ids=["utf-8", "nesting", "digits", "field", "nested field"],
)
def test_the_reason_why_a_body_cannot_be_parsed(http: httpx.Client, body: bytes, reason: str):
    response = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    check_alive(http)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large(http: httpx.Client, path: str, announced: bool):
    """Refused by its announced size before it is sent, or else once that much of it is read."""
    content = b" " * (MAX_BODY_BYTES + 1) if announced else iter([b" " * MAX_BODY_BYTES, b" "])
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_large")
    assert f"larger than {MAX_BODY_BYTES} bytes" in error["message"]
    check_alive(http)


def test_a_body_that_is_just_small_enough(http: httpx.Client):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    content = body + b" " * (MAX_BODY_BYTES - len(body))
    assert http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"}).status_code == 200


def test_not_a_number_in_json(http: httpx.Client):
    body = b'{"prompt": "The king", "temperature": NaN}'
    response = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_a_form_instead_of_json(http: httpx.Client):
    response = http.post(COMPLETIONS, data={"prompt": "The king"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "rest"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})])
@pytest.mark.parametrize("name", ["gpt-4", "", "\ud800"])
def test_unknown_model(http: httpx.Client, path: str, rest: dict[str, Any], name: str):
    response = post(http, path, {"model": name, **rest})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "demo" in response.json()["error"]["message"]


def test_unknown_model_card(http: httpx.Client):
    response = http.get("/v1/models/gpt-4")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_unknown_path_and_method(http: httpx.Client):
    nowhere = http.post("/v1/embeddings", json={})
    assert nowhere.status_code == 404
    assert "/v1/embeddings" in nowhere.json()["error"]["message"]
    wrong = http.get(COMPLETIONS)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "GET" in wrong.json()["error"]["message"]


def test_bad_request_id_header(http: httpx.Client):
    response = http.get("/health", headers={"X-Request-Id": "x" * 129})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "request_id"
    assert response.headers["x-request-id"] != "x" * 129
