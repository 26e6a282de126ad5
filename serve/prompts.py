"""Prompts as clients send them."""

from typing import Any

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


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
