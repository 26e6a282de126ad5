"""`dsjax generate` and `dsjax chat`, on the demo model."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsjax import LLM, SamplingParams
from dsjax.errors import OptionError, RequestError
from dsjax.serve.commands.chat import Conversation, converse
from tests.serve.commands import run_command

FLAGS = ("--max-num-seqs", "2", "--token-buckets", "32", "--max-model-len", "512")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
PROMPTS = ["To be, or", "My kingdom"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=2, token_buckets=[32], max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [answer.text or "" for answer in llm.generate(PROMPTS, params)]


def test_one_prompt_is_streamed(answers: list[str]):
    assert run_command("generate", "demo", PROMPTS[0], *FLAGS, *GREEDY) == answers[0] + "\n"


def test_prompts_from_a_file_as_json(llm: LLM, answers: list[str], tmp_path: Path):
    (tmp_path / "prompts").write_text("\n\n".join(PROMPTS))
    lines = run_command("generate", "demo", "--file", str(tmp_path / "prompts"), "--json", *FLAGS, *GREEDY)
    records = [json.loads(line) for line in lines.splitlines()]
    assert [(record["prompt"], record["text"]) for record in records] == list(zip(PROMPTS, answers, strict=True))
    assert llm.tokenizer is not None
    for record in records:
        assert record["prompt_token_ids"] == llm.tokenizer.encode(record["prompt"])
        assert llm.tokenizer.decode(record["token_ids"]) == record["text"]


def test_token_ids_on_stdin(llm: LLM, answers: list[str]):
    assert llm.tokenizer is not None
    stdin = "\n".join(",".join(map(str, llm.tokenizer.encode(prompt))) for prompt in PROMPTS)
    printed = run_command("generate", "demo", "--token-ids", *FLAGS, *GREEDY, stdin=stdin)
    for answer in answers:
        assert f"\n{answer}\n" in printed


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], OptionError, "There is no prompt"),
        (["x", "--file", "y"], OptionError, "give one of them"),
        (["--file", "/nowhere"], OptionError, "/nowhere cannot be read"),
        (["x", "--token-ids"], OptionError, "'x' is no list of token ids"),
        (["x", "--temperature", "-1"], RequestError, "temperature is -1"),
    ],
)
def test_bad_input_is_told_before_the_model_is_loaded(arguments: list[str], error: type, message: str):
    with pytest.raises(error, match=message):
        run_command("generate", "/no/model", *arguments)


def test_chat_with_piped_stdin(llm: LLM):
    """Two questions, a reset, the first question again: with temperature 0 it gets the first answer again."""
    stdin = "What is love?\nAnd hate?\n\n/reset\nWhat is love?\n/exit\nnever read\n"
    printed = run_command("chat", "demo", *FLAGS, "--temperature", "0", "--max-tokens", "12", stdin=stdin)
    params = SamplingParams(temperature=0, max_tokens=12)
    expected, conversation = [], Conversation(llm, params)
    for text in ("What is love?", "And hate?"):
        conversation.reply(text, lambda piece: None)
        expected.append(conversation.messages[-1]["content"])
    assert printed == "".join(f"{answer}\n" for answer in [*expected, expected[0]])


def test_the_conversation_goes_through_the_chat_template(llm: LLM):
    """The answer is that to the rendered messages, system message and earlier answers included."""
    params, tokenizer = SamplingParams(temperature=0, max_tokens=6), llm.tokenizer
    assert tokenizer is not None
    conversation = Conversation(llm, params, system="Speak of war.")
    for text in ("Who art thou?", "And then?"):
        messages = [*conversation.messages, {"role": "user", "content": text}]
        ids = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        conversation.reply(text, lambda piece: None)
        assert conversation.messages[-1]["content"] == llm.generate([ids], params)[0].text
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Speak of war."}]


def test_ctrl_c_stops_the_answer_and_not_the_program(llm: LLM):
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    conversation.reply("What is love?", write)
    assert len(pieces) == 3
    assert conversation.messages[-1]["content"] == "".join(pieces)
    assert not llm.engine.scheduler.has_work
    pieces.clear()
    conversation.reply("And now?", pieces.append)
    assert len(pieces) > 3


def test_ctrl_c_at_the_prompt_gives_up_the_line(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys):
    lines = iter([KeyboardInterrupt(), "/exit"])

    def read(_: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    converse(Conversation(llm, SamplingParams()), "> ")
    assert "Ctrl-D ends" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_goes_on_after_a_reset(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys):
    lines = iter(["long " * 600, "/reset", "Who?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=4))
    converse(conversation, "")
    captured = capsys.readouterr()
    assert "/reset starts anew" in captured.err
    assert captured.out == conversation.messages[-1]["content"] + "\n"
    assert len(conversation.messages) == 2
