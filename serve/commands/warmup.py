"""`dsjax warmup`: compile what `dsjax serve` will need, ahead of its start."""

import sys
import time

import typer

from dsjax.engine.options import EngineOptions, executables_folder
from dsjax.serve.commands.flags import Model, with_flags


@with_flags
def warmup(model: Model, options: EngineOptions) -> None:
    """Compile and keep what `dsjax serve` with the same flags needs, so that it starts without compiling."""
    from dsjax.aot.compile import kept_executables
    from dsjax.checkpoint.resolve import resolve_model
    from dsjax.engine.warmup import warm_up

    report = warm_up(resolve_model(model), options, ProgressLines())
    folder = executables_folder(options)
    entries, size_bytes = kept_executables(folder)
    typer.echo(
        f"{report.executables} executables are ready, {report.from_cache} of them from the cache: "
        f"traced in {report.lower_s:.1f} s, compiled in {report.compile_s:.1f} s."
    )
    typer.echo(f"{folder} holds {entries} executables, {size_bytes / 1e6:.1f} MB.")


class ProgressLines:
    """Tells on stderr how far a stage has come: on a terminal in one line that changes, else in about ten lines."""

    def __init__(self):
        self._begin = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` programs or executables are traced or compiled."""
        if done == 0:
            self._begin = time.monotonic()
            return
        seconds = time.monotonic() - self._begin
        line = f"{stage} {done} of {total}, {seconds:.0f} s"
        if done < total:
            line += f", about {seconds / done * (total - done):.0f} s left"
        if sys.stderr.isatty():
            print(f"\r{line}\x1b[K", end="" if done < total else "\n", file=sys.stderr, flush=True)
        elif done * 10 // total > (done - 1) * 10 // total:
            print(line, file=sys.stderr, flush=True)
