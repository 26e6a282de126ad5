"""Filling the folder of compiled executables before an engine starts."""

from pathlib import Path

from dsjax.aot.compile import CompileReport, Progress, count_compiles, keep_executables, silent
from dsjax.checkpoint.load import random_weights
from dsjax.config import ModelConfig
from dsjax.engine.blueprint import Blueprint
from dsjax.engine.options import EngineOptions, executables_folder
from dsjax.errors import OptionError
from dsjax.segments import allocator


def warm_up(folder: Path, options: EngineOptions, progress: Progress = silent) -> CompileReport:
    """Compile and keep whatever an engine with these options compiles at its start. Reads no weights.

    Raises ConfigError, or OptionError if the options cannot work or nothing could be kept.
    """
    count_compiles()
    if options.plan == "off":
        raise OptionError("plan 'off' compiles nothing ahead of time, so there is nothing to warm up.")
    if not keep_executables(executables_folder(options)):
        raise OptionError(f"{executables_folder(options)} cannot be written to; choose another cache_dir.")
    blueprint = Blueprint.draw(ModelConfig.load(folder), options)
    _, report = blueprint.compile(progress)
    assert report is not None, "only plan 'off' has no report"
    allocator(blueprint.state, blueprint.mesh).lower().compile()
    if options.load_format == "dummy":
        random_weights(blueprint.model, blueprint.mesh)  # for what it compiles to draw them
    return report
