"""Text to token ids and back, and chat messages to prompts, from the tokenizer files of a checkpoint. No JAX here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from dsjax.errors import CheckpointError, RequestError


class TextStream:
    """Turns output tokens into text as they come, never splitting a character."""

    def __init__(self, tokenizer: FastTokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self._ids += ids
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in ids)
        self._sent += text
        return text

    def finish(self) -> str:
        """The text still held back: the bytes of an unfinished character come as U+FFFD."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole.removeprefix(self._sent)


class Tokenizer:
    """tokenizer.json, with the chat template and special tokens of tokenizer_config.json."""

    def __init__(self, fast: FastTokenizer, config: dict[str, Any]):
        self._fast = fast
        self._tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        template = config.get("chat_template")
        self._template = _environment().from_string(template) if isinstance(template, str) else None

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint folder, None if it has none. Raises CheckpointError if it is damaged."""
        path, config_path, template_path = (
            folder / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        )
        if not path.exists():
            return None
        try:
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            if template_path.exists():
                config["chat_template"] = template_path.read_text(encoding="utf-8")
            return cls(FastTokenizer.from_str(path.read_text(encoding="utf-8")), config)
        except Exception as error:  # noqa: BLE001 (tokenizers raises bare Exception for a damaged file)
            raise CheckpointError(f"The tokenizer in {folder} cannot be read: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, after the begin-of-text token that the tokenizer adds with `add_special_tokens`.

        Raises RequestError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is not valid Unicode: {error}.", param="prompt") from None
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens."""
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for the tokens of one answer."""
        return TextStream(self._fast)

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation by the checkpoint's chat template (run in a sandbox), special tokens included.

        Raises RequestError if there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "This checkpoint has no chat template (tokenizer_config.json or chat_template.jinja); use completions.",
                param="messages",
            )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise RequestError(f"The chat template refused these messages: {error}", param="messages") from None


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_template_error
    return environment


def _raise_template_error(message: str):
    raise jinja2.TemplateError(message)


def _token_text(token: Any) -> str:
    """tokenizer_config.json holds special tokens as text or as an object with "content"."""
    return token.get("content", "") if isinstance(token, dict) else token or ""
