"""The HTTP application with an engine that is plain Python: what a healthy engine would rarely do."""

from typing import Any

import pytest

from dsjax.demo import CHECKPOINT
from dsjax.errors import DsjaxError, EngineDeadError, RequestError
from dsjax.serve.request_group import RequestGroup
from dsjax.tokenizer import Tokenizer
from tests.serve.fake_app import FakeEngine, call


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer | None:
    return Tokenizer.load(CHECKPOINT)


def test_without_tokenizer():
    """Token ids work, with empty text; text and chat are refused."""
    answer = call(FakeEngine([5, 6], [7]), "/v1/completions", prompt=[1]).json()
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "", "stop")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 3)
    text = call(FakeEngine([5]), "/v1/completions", prompt="x")
    chat = call(FakeEngine([5]), "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    for response in (text, chat):
        assert response.status_code == 400
        assert "no tokenizer" in response.json()["error"]["message"]


def test_characters_are_not_split(tokenizer: Tokenizer):
    """Each event holds whole characters; bytes that never become one are flushed at the end."""
    ids = tokenizer.encode("née 🌶", add_special_tokens=False)
    chopped = FakeEngine(*[[token] for token in ids])
    lines = call(chopped, "/v1/completions", tokenizer, prompt=[1], stream=True).text
    assert "\\ufffd" not in lines
    assert "�" not in lines
    assert call(chopped, "/v1/completions", tokenizer, prompt=[1]).json()["choices"][0]["text"] == "née 🌶"
    cut = FakeEngine(*[[token] for token in ids[:-1]])
    text = call(cut, "/v1/completions", tokenizer, prompt=[1]).json()["choices"][0]["text"]
    assert text.startswith("née ")
    assert text.endswith("�")


def test_error_in_a_stream(tokenizer: Tokenizer):
    engine = FakeEngine([5], EngineDeadError("Gone."))
    text = call(engine, "/v1/completions", tokenizer, prompt=[1], stream=True).text
    first, error = (line for line in text.splitlines() if line)
    assert '"finish_reason":null' in first
    assert error.startswith('data: {"error": {"message": "Gone."')
    assert "[DONE]" not in text
    assert engine.closed == 1


@pytest.mark.parametrize(
    ("error", "status"), [(EngineDeadError("Gone."), 503), (RequestError("No.", param="prompt"), 400)]
)
def test_error_without_stream(error: DsjaxError, status: int):
    engine = FakeEngine([5], error)
    response = call(engine, "/v1/completions", prompt=[1])
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)
    assert engine.closed == 1


def test_dead_engine():
    engine = FakeEngine()
    assert call(engine, "/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    engine.error = EngineDeadError("Gone.")
    for response in (call(engine, "/health"), call(engine, "/v1/completions", prompt=[1], stream=True)):
        assert (response.status_code, response.json()["error"]["message"]) == (503, "Gone.")


def test_bugs_keep_their_text_to_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(FakeEngine, "open", broken)
    response = call(FakeEngine(), "/v1/completions", prompt=[1])
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "ZeroDivisionError: secret" in caplog.text
    assert response.headers["x-request-id"]


def test_a_bug_in_a_stream(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(RequestGroup, "__anext__", broken)
    text = call(FakeEngine([1]), "/v1/completions", prompt=[1], stream=True).text
    assert '"internal_error"' in text
    assert "secret" not in text
    assert "ZeroDivisionError: secret" in caplog.text
