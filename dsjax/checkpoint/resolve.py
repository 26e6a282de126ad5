"""From the name of a model, as a user gives it, to a checkpoint folder."""

from pathlib import Path

from dsjax.demo import CHECKPOINT
from dsjax.errors import CheckpointError


def resolve_model(name: str | Path) -> Path:
    """The folder of `name`: "demo", or the path of a folder with config.json. Raises CheckpointError."""
    if str(name) == "demo":
        return CHECKPOINT
    folder = Path(name).expanduser()
    if not folder.exists():
        raise CheckpointError(
            f"There is no model at {folder}. Give the path of a checkpoint folder (config.json, *.safetensors, "
            "tokenizer.json), or 'demo' for the small model that comes with dsjax."
        )
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json, so it is not a checkpoint folder.")
    return folder
