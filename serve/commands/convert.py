"""`dsjax convert`: a checkpoint as Orbax files that load without being arranged."""

import time
from pathlib import Path
from typing import Annotated

import typer

from dsjax.serve.commands.flags import Model


def convert(model: Model, out: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")]) -> None:
    """Convert a safetensors checkpoint to Orbax; LLM and the other commands take the new folder as a model."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # GPUs are not needed, and may be in use

    from dsjax.checkpoint import orbax
    from dsjax.checkpoint.resolve import resolve_model

    begin = time.perf_counter()
    orbax.convert(resolve_model(model), out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"{size / 1e9:.3g} GB written to {out} in {time.perf_counter() - begin:.1f} s")
