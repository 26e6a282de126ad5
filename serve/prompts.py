"""Prompts as clients send them."""

from typing import Any

Prompt = str | list[int]

MAX_PROMPTS = 2048


def split_prompts(value: Any) -> list[Prompt]:
    """The prompts in a `prompt` field: one or several, each text or token ids. Raises ValueError for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("give text, token ids, or a list of either")
    if not value:
        raise ValueError("the list is empty; give at least one token")
    if _are_tokens(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"the list has {len(value)} prompts; at most {MAX_PROMPTS}")
    for place, item in enumerate(value):
        is_ids = isinstance(item, list) and _are_tokens(item)
        if not (is_ids or isinstance(item, str)) or isinstance(item, str) != isinstance(value[0], str):
            raise ValueError(f"item {place} does not fit: give only texts, only token ids, or only lists of token ids")
    return value


def _are_tokens(values: list[Any]) -> bool:
    """Whether `values`, which may be millions, are integers only; JSON knows no subclasses of int but bool."""
    return set(map(type, values)) <= {int}
