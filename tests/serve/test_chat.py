"""/v1/chat/completions on a real server."""

from typing import Any

import httpx
import openai
import pytest

from dsjax.demo import CHECKPOINT
from dsjax.tokenizer import Tokenizer
from tests.serve.conftest import CONTEXT
from tests.serve.sse import DONE, stream

PATH = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def prompt_ids(messages: list[dict]) -> list[int]:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def chat(client: httpx.Client, **body) -> dict:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_openai_client(api: openai.OpenAI):
    answer = api.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_completion_tokens=100)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids(HELLO))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_streaming(api: openai.OpenAI):
    whole = api.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    first, *rest = api.chat.completions.create(model="demo", messages=HELLO, temperature=0, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in rest] == [None] * (len(rest) - 1) + ["stop"]


def test_stream_shape(http: httpx.Client):
    whole = chat(http, messages=HELLO, **GREEDY)
    first, *chunks, last, done = stream(http, PATH, messages=HELLO, **GREEDY, stream_options={"include_usage": True})
    assert done == DONE
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in (first, *chunks))

    *chunks, done = stream(http, PATH, messages=HELLO, **GREEDY)
    assert done == DONE
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_the_template_makes_the_prompt(http: httpx.Client):
    """The same tokens, sent as ids to the other endpoint, give the same answer: no second begin token is added."""
    messages = [
        {"role": "system", "content": "Speak plainly."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A poor player."},
        {"role": "user", "content": "And then?"},
    ]
    raw = http.post("/v1/completions", json={"prompt": prompt_ids(messages), **GREEDY}).json()
    answer = chat(http, messages=messages, **GREEDY)
    assert answer["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
    assert answer["usage"] == raw["usage"]


def test_the_default_fills_the_context(http: httpx.Client):
    messages = [{"role": "user", "content": "thou art " * 900}]
    answer = chat(http, messages=messages, ignore_eos=True)
    assert len(prompt_ids(messages)) > 64
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_for_the_limit(http: httpx.Client, name: str):
    assert chat(http, messages=HELLO, ignore_eos=True, **{name: 3})["usage"]["completion_tokens"] == 3
    error = http.post(PATH, json={"messages": HELLO, name: CONTEXT}).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is {CONTEXT}")


def test_content_in_parts_and_developer_messages(http: httpx.Client):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who\nare you?"}]
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "are you?"}]
    newer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert chat(http, messages=newer, **GREEDY)["choices"] == chat(http, messages=plain, **GREEDY)["choices"]


def test_neutral_values_of_unsupported_fields(http: httpx.Client):
    neutral = {
        "n": 1,
        "stop": None,
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
    }
    assert chat(http, messages=HELLO, **GREEDY, **neutral)["usage"]["completion_tokens"] == 24
