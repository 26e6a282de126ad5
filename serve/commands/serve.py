"""`dsjax serve`: an OpenAI-compatible HTTP server."""

import math
from typing import Annotated

import typer

from dsjax.engine.options import EngineOptions
from dsjax.errors import OptionError
from dsjax.serve.commands.flags import Model, with_flags


@with_flags
def serve(
    model: Model,
    options: EngineOptions,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in the API; may be given several times.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that open requests have to finish after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API."""
    raise typer.Exit(run_server(model, options, host, port, served_model_name, drain_timeout))


def run_server(
    model: str, options: EngineOptions, host: str, port: int, names: list[str] | None, drain_timeout_s: float
) -> int:
    """Serve until a signal ends it; returns the exit code. Raises DsjaxError if the server cannot start."""
    import asyncio

    from dsjax.checkpoint.resolve import model_name, resolve_model
    from dsjax.serve.logs import set_up_logging
    from dsjax.serve.server import Server, ServerOptions

    if not math.isfinite(drain_timeout_s):
        raise OptionError(f"--drain-timeout is {drain_timeout_s}, expected a number of seconds.")
    if names and not all(name.strip() for name in names):
        raise OptionError('--served-model-name is empty; give the name that clients put into "model".')
    folder = resolve_model(model)
    set_up_logging("http")
    server = Server(folder, options, ServerOptions(host, port, tuple(names or [model_name(folder)]), drain_timeout_s))
    return asyncio.run(server.run())
