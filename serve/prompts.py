"""Prompts as clients send them, and the token ids that they come to."""

from collections.abc import Sequence
from typing import Any

from dsjax.engine.request import Limits
from dsjax.errors import RequestError
from dsjax.tokenizer import Tokenizer

Prompt = str | list[int]


def split_prompts(value: Any) -> list[Prompt]:
    """The prompts in a `prompt` field: one or several, each text or token ids. Raises ValueError for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("give text, token ids, or a list of either")
    if not value:
        raise ValueError("the list is empty; give at least one token")
    if all(_is_token(item) for item in value):
        return [value]
    for place, item in enumerate(value):
        is_ids = isinstance(item, list) and all(_is_token(token) for token in item)
        if not (is_ids or isinstance(item, str)) or isinstance(item, str) != isinstance(value[0], str):
            raise ValueError(f"item {place} does not fit: give only texts, only token ids, or only lists of token ids")
    return value


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
    """Token ids of each prompt, checked against `limits`. Raises RequestError that names the prompt at fault."""
    encoded = []
    for place, prompt in enumerate(prompts):
        try:
            ids = _encode(prompt, tokenizer) if isinstance(prompt, str) else prompt
            limits.check_prompt(ids)
        except RequestError as error:
            which = f"prompt[{place}]: " if len(prompts) > 1 else ""
            raise RequestError(f"{which}{error}", param="prompt") from None
        encoded.append(ids)
    return encoded


def encode_text(text: str, tokenizer: Tokenizer, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of `text`. JSON can hold half a surrogate pair, which is no text: RequestError that names `param`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"The {param} holds half a surrogate pair (\\ud800 to \\udfff).", param=param) from None
    return tokenizer.encode(text, add_special_tokens)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestError("This model has no tokenizer, so it takes no text; give token ids.", param="prompt")
    if not text:
        raise RequestError("The prompt is empty; give at least one token.", param="prompt")
    return encode_text(text, tokenizer, add_special_tokens=True, param="prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
