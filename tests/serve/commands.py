"""Commands run in this process."""

from typer.testing import CliRunner

from dsjax.serve.cli import app


def run_command(*arguments: str, stdin: str = "", exit_code: int = 0) -> str:
    """What the command prints to stdout. Errors of dsjax are raised as they are."""
    result = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout
