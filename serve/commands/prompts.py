"""Prompts from the command line, a file or stdin."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsjax.errors import OptionError

PromptFile = Annotated[Path | None, typer.Option("--file", help="A file with one prompt per line.")]
TokenIds = Annotated[bool, typer.Option("--token-ids", help="Prompts are token ids such as 5,6,7.")]


def read_prompts(given: list[str], file: Path | None, as_token_ids: bool) -> list[str] | list[list[int]]:
    """The prompts that were `given`, else the lines of `file` or of stdin that are not empty. Raises OptionError."""
    if given and file is not None:
        raise OptionError("There are prompts on the command line and in --file; give one of them.")
    prompts = given or [line for line in _lines(file) if line.strip()]
    if not prompts:
        raise OptionError("There is no prompt; give prompts as arguments, in --file or on stdin, one per line.")
    return [_token_ids(prompt) for prompt in prompts] if as_token_ids else prompts


def _lines(file: Path | None) -> list[str]:
    try:
        return (sys.stdin.read() if file is None else file.read_text(encoding="utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"The prompts in {file or 'stdin'} cannot be read: {error}.") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"The prompt {text!r} is no list of token ids such as 5,6,7.") from None
