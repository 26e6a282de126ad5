"""`dsjax generate`: answers to prompts, with the engine in this process."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dsjax.engine.options import EngineOptions
from dsjax.engine.sampling_params import SamplingParams
from dsjax.serve.commands.flags import Model, with_flags
from dsjax.serve.commands.prompts import PromptFile, TokenIds, read_prompts

if TYPE_CHECKING:
    from dsjax.engine.llm import LLM


@with_flags
def generate(
    model: Model,
    options: EngineOptions,
    params: SamplingParams,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; by default the lines of stdin.")] = None,
    file: PromptFile = None,
    token_ids: TokenIds = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per prompt, with token ids.")] = False,
) -> None:
    """Continue prompts, without a server."""
    asked = read_prompts(prompts or [], file, token_ids)
    from dsjax.engine.llm import LLM

    with LLM(model, **asdict(options)) as llm:
        if as_json:
            _print_json(llm, asked, params)
        elif len(asked) == 1:
            _stream(llm, asked[0], params)
        else:
            _print_all(llm, asked, params)


def _stream(llm: "LLM", prompt: str | list[int], params: SamplingParams) -> None:
    for delta in llm.stream(prompt, params):
        typer.echo(_shown(delta.text, delta.token_ids), nl=False)
    typer.echo()


def _print_all(llm: "LLM", prompts: list[str] | list[list[int]], params: SamplingParams) -> None:
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        typer.echo(f"> {prompt}\n{_shown(answer.text, answer.token_ids)}\n")


def _print_json(llm: "LLM", prompts: list[str] | list[list[int]], params: SamplingParams) -> None:
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        typer.echo(json.dumps({"prompt": prompt} | asdict(answer), ensure_ascii=False))


def _shown(text: str | None, token_ids: list[int]) -> str:
    """The text, or the ids of a model without tokenizer."""
    return "".join(f"{token} " for token in token_ids) if text is None else text
