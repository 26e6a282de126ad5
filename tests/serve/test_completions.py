"""/v1/completions on a real server."""

import re

import httpx
import openai
import pytest

from dsjax.demo import CHECKPOINT
from dsjax.serve.protocol import CompletionRequest
from dsjax.serve.unsupported import UNSUPPORTED_COMPLETION
from dsjax.tokenizer import Tokenizer
from tests.serve.server_process import ServerProcess
from tests.serve.sse import DONE, stream

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer


def complete(client: httpx.Client, **body) -> dict:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_openai_client(api: openai.OpenAI, tokenizer: Tokenizer):
    answer = api.completions.create(model="demo", prompt="To be, or", temperature=0, max_tokens=12)
    assert answer.object == "text_completion"
    assert answer.model == "demo"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert choice.text.startswith(" else I'll be")
    assert answer.usage is not None
    prompt_tokens = len(tokenizer.encode("To be, or"))
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == prompt_tokens + 12


def test_openai_client_streaming(api: openai.OpenAI):
    whole = api.completions.create(model="demo", prompt="To be, or", temperature=0, max_tokens=12)
    chunks = list(api.completions.create(model="demo", prompt="To be, or", temperature=0, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("with_usage", [False, True])
def test_stream_shape(http: httpx.Client, with_usage: bool):
    whole = complete(http, prompt="My lord,", **GREEDY)
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    *chunks, done = stream(http, PATH, prompt="My lord,", **GREEDY, **options)
    assert done == DONE
    if with_usage:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len(chunks) > 12, "the text comes in pieces"


def test_text_is_encoded_with_the_begin_token(http: httpx.Client, tokenizer: Tokenizer):
    ids = tokenizer.encode("Good night,")
    assert ids[0] == 0
    as_text = complete(http, prompt="Good night,", **GREEDY)
    as_ids = complete(http, prompt=ids, **GREEDY)
    assert as_text["choices"] == as_ids["choices"]
    assert as_text["usage"] == as_ids["usage"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts(http: httpx.Client, tokenizer: Tokenizer, as_ids: bool):
    texts = ["O Romeo,", "The king", "Sweet"]
    prompts = [tokenizer.encode(text) for text in texts] if as_ids else texts
    alone = [complete(http, prompt=prompt, **GREEDY) for prompt in prompts]
    together = complete(http, prompt=prompts, **GREEDY)
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert [c["text"] for c in together["choices"]] == [one["choices"][0]["text"] for one in alone]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(one["usage"][count] for one in alone)

    *chunks, done = stream(http, PATH, prompt=prompts, **GREEDY)
    assert done == DONE
    for index, choice in enumerate(together["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == ["length"]


def test_more_prompts_than_rows(http: httpx.Client):
    answer = complete(http, prompt=["The king"] * 9, **GREEDY)
    assert len(answer["choices"]) == 9
    assert len({choice["text"] for choice in answer["choices"]}) == 1


def test_defaults(http: httpx.Client):
    answer = complete(http, prompt="The king", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    texts = {complete(http, prompt="The king", ignore_eos=True)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1, "the default temperature is not 0"


def test_null_means_default(http: httpx.Client):
    nulls = dict.fromkeys({*CompletionRequest.model_fields, *UNSUPPORTED_COMPLETION} - {"prompt"})
    answer = complete(http, prompt="The king", **nulls)
    assert 1 <= answer["usage"]["completion_tokens"] <= 16


def test_seed_repeats_an_answer(http: httpx.Client):
    body = {"prompt": "The king", "temperature": 1, "max_tokens": 20, "ignore_eos": True}
    first, again, other = (complete(http, **body, seed=seed)["choices"][0]["text"] for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_top_k_one_is_greedy(http: httpx.Client):
    greedy = complete(http, prompt="The king", **GREEDY)
    top = complete(http, prompt="The king", **(GREEDY | {"temperature": 1, "top_k": 1, "top_p": 1}))
    assert top["choices"] == greedy["choices"]


def test_end_of_text_stops_unless_ignored(http: httpx.Client, tokenizer: Tokenizer):
    prompt = tokenizer.encode("<｜User｜>Hello!<｜Assistant｜>")
    stopped = complete(http, prompt=prompt, temperature=0, max_tokens=200)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert "end▁of" not in stopped["choices"][0]["text"]
    assert stopped["usage"]["completion_tokens"] < 200
    ignored = complete(http, prompt=prompt, temperature=0, max_tokens=200, ignore_eos=True)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 200


def test_chunked_prefill_counts_the_prompt_once(http: httpx.Client, tokenizer: Tokenizer):
    prompt = "thou art " * 300
    answer = complete(http, prompt=prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt)) > 64
    assert answer["usage"]["completion_tokens"] == 1


def test_neutral_values_of_unsupported_fields(http: httpx.Client):
    neutral = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "stop": [],
        "logprobs": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
    }
    assert complete(http, prompt="The king", **GREEDY, **neutral)["usage"]["completion_tokens"] == 24


def test_unknown_fields_are_logged_once(http: httpx.Client, server: ServerProcess):
    for _ in range(2):
        complete(http, prompt="The king", max_tokens=1, zebra={"stripes": 3}, user="someone")
    complete(http, prompt="The king", max_tokens=1, giraffe=1)
    server.search_log("giraffe")
    assert server.log.count("'zebra'") == 1
    assert "'user'" not in server.log


def test_models(http: httpx.Client, api: openai.OpenAI):
    cards = http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [(card["id"], card["max_model_len"]) for card in cards["data"]] == [("demo", 2048), ("org/demo", 2048)]
    assert api.models.retrieve("demo").owned_by == "dsjax"
    assert http.get("/v1/models/org/demo").json() == cards["data"][1]
    assert complete(http, model="org/demo", prompt="The king", max_tokens=1)["model"] == "org/demo"


def test_log_line_per_request(http: httpx.Client, server: ServerProcess):
    response = http.post(PATH, json={"prompt": [3, 4, 5], **GREEDY}, headers={"X-Request-Id": "log-me"})
    assert response.status_code == 200
    server.search_log(r"INFO http: request log-me: 3 prompt tokens, 24 output tokens, length, \d+\.\d\d s$")


def test_engine_log_line(http: httpx.Client, server: ServerProcess):
    complete(http, prompt="The king", **GREEDY)
    line = server.search_log(
        r"INFO engine: 0 running, 0 waiting; generation ([\d.]+) tokens/s, prefill ([\d.]+) tokens/s; "
        r"padding \d+%; programs run: (.*)$"
    )
    assert float(line[1]) > 0
    assert float(line[2]) > 0
    assert re.search(r"mixed\[32\] x\d", line[3])


def test_request_ids(http: httpx.Client):
    body = {"prompt": "The king", "max_tokens": 1}
    given = http.post(PATH, json=body | {"request_id": "body-id"}, headers={"X-Request-Id": "header-id"})
    assert given.headers["x-request-id"] == "header-id"
    assert given.json()["id"] == "cmpl-header-id"
    from_body = http.post(PATH, json=body | {"request_id": "body-id"})
    assert from_body.headers["x-request-id"] == "body-id"
    made_up = {http.post(PATH, json=body).headers["x-request-id"] for _ in range(2)}
    assert len(made_up) == 2
    assert http.get("/nowhere", headers={"X-Request-Id": "lost"}).headers["x-request-id"] == "lost"


def test_the_http_process_has_no_jax(server: ServerProcess):
    def libraries(pid: int) -> str:
        with open(f"/proc/{pid}/maps") as maps:
            return maps.read()

    assert "jaxlib" in libraries(server.engine_pid())
    assert "jaxlib" not in libraries(server.process.pid)
