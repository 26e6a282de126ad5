"""The `dsjax` command. Each subcommand imports what it needs when it runs, so that --help and errors come at once."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

import dsjax
from dsjax.engine.options import DTYPES, LOAD_FORMATS, PLANS, EngineOptions
from dsjax.errors import DsjaxError, OptionError

DEFAULTS = EngineOptions()

app = typer.Typer(
    help="DeepSeek inference in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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


def _parse_buckets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of integers such as 16,64,256.") from None


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or 'demo'.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in the API; may be given several times.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", "--context-length", help="Context in tokens.")
    ] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one step.")] = None,
    token_buckets: Annotated[
        tuple | None, typer.Option(parser=_parse_buckets, metavar="N,N,...", help="Token buckets, smallest first.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests that run at once.")] = None,
    plan: Annotated[
        str, typer.Option(metavar="|".join(PLANS), help="How much goes into one executable; auto: step.")
    ] = DEFAULTS.plan,
    load_format: Annotated[
        str, typer.Option(metavar="|".join(LOAD_FORMATS), help="dummy: random weights.")
    ] = DEFAULTS.load_format,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Number format of the model.")] = DEFAULTS.dtype,
    tp: Annotated[int, typer.Option(help="Devices to split the model over.")] = DEFAULTS.tp,
    kv_tokens: Annotated[int | None, typer.Option(help="Size of the cache in tokens.")] = None,
    gpu_memory_fraction: Annotated[
        float, typer.Option(help="Share of the GPU's memory to use.")
    ] = DEFAULTS.gpu_memory_fraction,
    cache_dir: Annotated[str | None, typer.Option(help="Folder for compiled executables.")] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that open requests have to finish after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API."""
    options = EngineOptions(
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        token_buckets=token_buckets,
        max_num_seqs=max_num_seqs,
        plan=plan,
        load_format=load_format,
        dtype=dtype,
        tp=tp,
        kv_tokens=kv_tokens,
        gpu_memory_fraction=gpu_memory_fraction,
        cache_dir=cache_dir,
    )
    raise typer.Exit(_run_server(model, options, host, port, served_model_name, drain_timeout))


def _run_server(
    model: str, options: EngineOptions, host: str, port: int, names: list[str] | None, drain_timeout_s: float
) -> int:
    import asyncio

    from dsjax.checkpoint.resolve import resolve_model
    from dsjax.serve.logs import set_up_logging
    from dsjax.serve.server import Server, ServerOptions

    if not math.isfinite(drain_timeout_s):
        raise OptionError(f"--drain-timeout is {drain_timeout_s}, expected a number of seconds.")
    folder = resolve_model(model)
    default = "demo" if model == "demo" else Path(folder).resolve().name
    set_up_logging("http")
    server = Server(folder, options, ServerOptions(host, port, tuple(names or [default]), drain_timeout_s))
    return asyncio.run(server.run())


if __name__ == "__main__":
    main()
