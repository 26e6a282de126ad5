"""`dsjax chat`: a conversation in the terminal, with the engine in this process."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dsjax.engine.options import EngineOptions
from dsjax.engine.sampling_params import SamplingParams
from dsjax.errors import RequestError
from dsjax.serve.commands.flags import Model, with_flags

if TYPE_CHECKING:
    from dsjax.engine.llm import LLM

CHAT_PARAMS = SamplingParams(temperature=0.6, max_tokens=None)
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


@with_flags
def chat(
    model: Model,
    options: EngineOptions,
    params: SamplingParams = CHAT_PARAMS,
    system: Annotated[str | None, typer.Option(help="What the system message says.")] = None,
) -> None:
    """Chat with a model in the terminal, without a server."""
    from dsjax.engine.llm import LLM

    live = sys.stdin.isatty()
    if live:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() then edits lines and remembers them)
        typer.echo(f"Loading {model} ...", err=True)
    with LLM(model, **asdict(options)) as llm:
        if live:
            typer.echo(HELP, err=True)
        converse(Conversation(llm, params, system), "> " if live else "")


class Conversation:
    """Messages so far; `reply` adds a question and its answer."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None = None):
        self._llm, self._params = llm, params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._start)

    def reply(self, text: str, write: Callable[[str], None]) -> None:
        """Answer `text`, piece by piece to `write`. Ctrl-C ends the answer; what was said so far stays.

        Raises RequestError, with the conversation as it was, if it has become too long or there is no chat template.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        with contextlib.closing(self._llm.stream(self._prompt(asked), self._params)) as deltas, _interrupts() as stop:
            for delta in deltas:
                pieces.append(delta.text or "")
                write(pieces[-1])
                if stop.is_set():
                    break
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        from dsjax.serve.chat.prompt import encode_chat
        from dsjax.serve.protocol import ChatMessage

        checked = [ChatMessage.model_validate(message) for message in messages]
        return encode_chat(checked, self._llm.tokenizer, self._llm.engine.limits.max_model_len)


def converse(conversation: Conversation, prompt: str) -> None:
    """Read lines from stdin until it ends, and answer them on stdout."""
    while (line := _read_line(prompt)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.reset()
            case text:
                _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    try:
        conversation.reply(text, lambda piece: typer.echo(piece, nl=False))
        typer.echo()
    except RequestError as error:
        typer.echo(f"{error} (/reset starts anew.)", err=True)


def _read_line(prompt: str) -> str | None:
    """The next line of stdin, None at its end. Ctrl-C gives up the line."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo(f"\n{HELP}", err=True)
        return ""


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, instead of breaking off the step that runs: that would end the engine."""
    stop = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
