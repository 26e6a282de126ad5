"""`dsjax diff`: where two settings begin to differ."""

import json
import re
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from dsjax.checkpoint.resolve import resolve_model
from dsjax.engine.options import EngineOptions
from dsjax.errors import OptionError
from dsjax.serve.commands.flags import Model, option_from_text, with_flags
from dsjax.serve.commands.prompts import PromptFile, TokenIds, read_prompts

FEW_EXECUTABLES = EngineOptions(max_num_seqs=16, token_buckets=(32,), max_model_len=512)
SETTING = "Changes to the flags, such as plan=step,dtype=bfloat16 or model=/other/checkpoint."
DEFAULT_PROMPT = "To be, or not to be, that is the question."


@with_flags
def diff(
    model: Model,
    options: EngineOptions = FEW_EXECUTABLES,
    a: Annotated[str, typer.Option(metavar="NAME=VALUE,...", help=f"Setting A. {SETTING}")] = "",
    b: Annotated[str, typer.Option(metavar="NAME=VALUE,...", help="Setting B, likewise.")] = "",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    file: PromptFile = None,
    token_ids: TokenIds = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that A adds to each prompt; both compute them.")] = 8,
    tolerance: Annotated[float, typer.Option(min=0, help="Relative difference that counts as none; 0: equal.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two settings on the same tokens and name the first segment that differs. Exits with 1 if one does."""
    settings = [_setting(text, model, options) for text in (a, b)]
    given = prompt or ([] if file or token_ids else [DEFAULT_PROMPT])
    prompts = read_prompts(given, file, token_ids)
    from dsjax.diff import compare, continue_prompts, report, trace
    from dsjax.engine.llm import LLM

    traces, sequences = [], None
    for folder, changed in settings:  # one after the other: both may not fit into memory
        with LLM(folder, **changed) as llm:
            sequences = sequences or continue_prompts(llm, prompts, max_tokens)
            traces.append(trace(llm, sequences))
    comparison = compare(*traces, tolerance=tolerance)
    assert sequences is not None, "there are two settings"
    if as_json:
        (folder_a, options_a), (folder_b, options_b) = settings
        named = {"a": {"model": folder_a} | options_a, "b": {"model": folder_b} | options_b}
        typer.echo(json.dumps(named | report.as_json(comparison), indent=2, allow_nan=False))
    else:
        typer.echo(f"A:        {model} {a}\nB:        {model} {b}\n{report.as_text(comparison, sequences)}")
    raise typer.Exit(0 if comparison.agree else 1)


def _setting(text: str, model: str, options: EngineOptions) -> tuple[str, dict[str, Any]]:
    """The folder of `model`, and `options`, with the changes of `text`. Raises CheckpointError or OptionError."""
    changes = {}
    for part in filter(None, re.split(r",(?=[\w-]+=)", text)):
        name, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"{part!r} in a setting is no NAME=VALUE, such as plan=step.")
        if name == "model":
            model = value
        else:
            changes |= option_from_text(name, value)
    return str(resolve_model(model)), asdict(replace(options, **changes))
