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
        self._sent = 0

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that `ids` complete; with the `last` ones also the bytes of an unfinished character, as U+FFFD."""
        self._ids += ids
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in ids)
        self._sent += len(text)
        return text + self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._sent :] if last else text


class Tokenizer:
    """tokenizer.json, with the chat template and special tokens of tokenizer_config.json."""

    def __init__(self, fast: FastTokenizer, config: dict[str, Any]):
        self._fast = fast
        self._tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        self._bos_id = fast.token_to_id(self._tokens["bos_token"]) if config.get("add_bos_token") else None
        template = _chat_template(config.get("chat_template"))
        self._template = None if template is None else _environment().from_string(template)

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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, after the begin-of-text token if the checkpoint has one and `add_special_tokens` is set.

        Raises RequestError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is not valid Unicode: {error}.", param="prompt") from None
        ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

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


def encode_prompt(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a text prompt. Raises RequestError if it is empty, or there is no tokenizer."""
    if tokenizer is None:
        raise RequestError("This model has no tokenizer.json, so it takes no text; give token ids.", param="prompt")
    if not text:
        raise RequestError("The prompt is empty; give at least one token.", param="prompt")
    return tokenizer.encode(text)


def _environment() -> jinja2.Environment:
    """What chat templates are written for: transformers' environment, whose tojson does not escape for HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str):
    raise jinja2.TemplateError(message)


def _chat_template(entry: Any) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(entry, list):
        entry = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}.get("default")
    return entry if isinstance(entry, str) else None


def _token_text(token: Any) -> str:
    """tokenizer_config.json holds special tokens as text or as an object with "content"."""
    return token.get("content", "") if isinstance(token, dict) else token or ""
