"""Text to token ids and back, and chat messages to prompts, from the tokenizer files of a checkpoint. No JAX here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dsjax.errors import CheckpointError, RequestError


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable characters stand for their own byte, U+0100 and later for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


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
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._added = fast.get_added_tokens_decoder()
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in _parts(fast.decoder))
        self._longest_token_bytes = _longest_token_bytes(fast)
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

    def encode(self, text: str, add_special_tokens: bool = True, max_model_len: int | None = None) -> list[int]:
        """Token ids of `text`, after the begin-of-text token if the checkpoint has one and `add_special_tokens` is set.

        Other threads run meanwhile. Raises RequestError for text that is not valid Unicode (lone surrogates), and at
        once for text that is certainly no prompt of fewer than `max_model_len` tokens.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is not valid Unicode: {error}.", param="prompt") from None
        if max_model_len is not None:
            self._check_size(size, max_model_len)
        # Unlike encode, this gives the GIL away.
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def _check_size(self, size: int, max_model_len: int) -> None:
        longest = self._longest_token_bytes
        if longest is not None and (least := -(-size // longest)) >= max_model_len:
            raise RequestError(
                f"The prompt has {size} bytes of text. That is at least {least} tokens, since none is longer than "
                f"{longest} bytes, and leaves no room for an answer: this model's context is {max_model_len} tokens. "
                "Shorten the prompt.",
                param="prompt",
            )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without special tokens unless those are asked for."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, a special one for its name; none for ids that the tokenizer lacks."""
        if token in self._added:
            return self._added[token].content.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[character] for character in self._fast.id_to_token(token) or "")
        return self._fast.decode([token], skip_special_tokens=False).encode()

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
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            raise RequestError(f"The chat template refused these messages: {error}", param="messages") from None


def encode_prompt(text: str, tokenizer: Tokenizer | None, max_model_len: int) -> list[int]:
    """Token ids of a text prompt. Raises RequestError if it is empty, far too long, or there is no tokenizer."""
    if tokenizer is None:
        raise RequestError("This model has no tokenizer.json, so it takes no text; give token ids.", param="prompt")
    if not text:
        raise RequestError("The prompt is empty; give at least one token.", param="prompt")
    return tokenizer.encode(text, max_model_len=max_model_len)


def _longest_token_bytes(fast: FastTokenizer) -> int | None:
    """The most bytes of text that one token stands for; None if the tokenizer may drop text, so that there is no bound.

    Known for byte-level BPE over all 256 bytes, without normalizer, and with added tokens that swallow no spaces.
    """
    added = fast.get_added_tokens_decoder().values()
    vocabulary = fast.get_vocab(with_added_tokens=False)
    splits = _parts(fast.pre_tokenizer)
    keeps_all_text = (
        isinstance(fast.model, BPE)
        and not (fast.model.continuing_subword_prefix or fast.model.end_of_word_suffix)
        and vocabulary.keys() >= set(ByteLevel.alphabet())
        and not _parts(fast.normalizer)
        and {"ByteLevel"} <= {split["type"] for split in splits} <= {"ByteLevel", "Digits", "Split"}
        and not any(split.get("behavior") == "Removed" for split in splits)
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not keeps_all_text:
        return None
    # A byte-level token is written with one character per byte, an added one as it is.
    return max(*map(len, vocabulary), *(len(token.content.encode()) for token in added))


def _parts(component: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer, pre-tokenizer or decoder, as tokenizer.json describes them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return next((state[key] for key in ("normalizers", "pretokenizers", "decoders") if key in state), [state])


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
