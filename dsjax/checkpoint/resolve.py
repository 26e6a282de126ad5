"""From the name of a model, as a user gives it, to a checkpoint folder."""

import os
from pathlib import Path

from dsjax.demo import CHECKPOINT
from dsjax.errors import CheckpointError


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """The folder of `name`: "demo", or the path of a folder with config.json. Raises CheckpointError."""
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"The model is {name!r}, expected the path of a checkpoint folder, or 'demo'.")
    if str(name) == "demo":
        return CHECKPOINT
    try:
        folder = Path(name).expanduser()
        exists, has_config = folder.exists(), (folder / "config.json").exists()
    except (OSError, RuntimeError) as error:  # a path that is too long, not allowed, or in nobody's home folder
        raise CheckpointError(f"The model's path cannot be followed: {error}") from None
    if not exists:
        raise CheckpointError(
            f"There is no model at {folder}. Give the path of a checkpoint folder (config.json, *.safetensors, "
            "tokenizer.json), or 'demo' for the small model that comes with dsjax."
        )
    if not has_config:
        raise CheckpointError(f"{folder} has no config.json, so it is not a checkpoint folder.")
    return folder
