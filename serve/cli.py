"""The `dsjax` command. Each subcommand imports what it needs when it runs, so that --help and errors come at once."""

import sys
from typing import Annotated

import typer

import dsjax
from dsjax.errors import DsjaxError
from dsjax.serve.commands.chat import chat
from dsjax.serve.commands.convert import convert
from dsjax.serve.commands.diff import diff
from dsjax.serve.commands.env import env
from dsjax.serve.commands.generate import generate
from dsjax.serve.commands.serve import serve
from dsjax.serve.commands.warmup import warmup

COMMANDS = (serve, generate, chat, warmup, env, diff, convert)

app = typer.Typer(
    help="DeepSeek inference in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Entry point of the `dsjax` command."""
    try:
        app()
    except DsjaxError as error:
        print(f"dsjax: error: {error}", file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsjax {dsjax.__version__}")
        raise typer.Exit


@app.callback()
def _dsjax(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
