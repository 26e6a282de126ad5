"""From the name of a model, as a user gives it, to a checkpoint folder. Nothing is ever downloaded.

Names of models on the Hugging Face Hub are looked up in its local cache, which holds a folder per model:
models--<owner>--<name>, with the commit of branch main in refs/main and each commit's files in snapshots/<commit>.
"""

import os
import re
from pathlib import Path

from dsjax.demo import CHECKPOINT
from dsjax.errors import CheckpointError

CONVERTED = "orbax"  # the folder of the weights in what `dsjax convert` writes
ANY_OF = (
    "the path of a checkpoint folder (config.json, *.safetensors, tokenizer.json), the name of a model in the Hugging "
    "Face cache, or 'demo' for the small model that comes with dsjax"
)


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """The checkpoint folder of `name`. Raises CheckpointError that says where it was looked for.

    `name`: "demo", the path of a folder with config.json, the path of a model's folder in a Hugging Face cache, or a
    name such as "deepseek-ai/DeepSeek-V2-Lite" of a model in that cache. A path goes before a name.
    """
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"The model is {name!r}, expected {ANY_OF}.")
    if str(name) == "demo":
        return CHECKPOINT
    try:
        folder = Path(name).expanduser()
        return _checkpoint(folder) if folder.exists() else _cached(str(name))
    except (OSError, RuntimeError) as error:  # a path that is too long, not allowed, or in nobody's home folder
        raise CheckpointError(f"The model's path cannot be followed: {error}") from None


def model_name(folder: Path) -> str:
    """What to call the model of a checkpoint folder: its name on the Hub, or else that of the folder."""
    if folder == CHECKPOINT:
        return "demo"
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and (repository := folder.parent.parent.name).startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def hub_cache() -> Path:
    """The cache of the Hugging Face Hub: $HF_HUB_CACHE, else $HF_HOME/hub, else in the user's cache folder."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser() / "hub"


def _checkpoint(folder: Path) -> Path:
    """`folder` if it holds config.json, its current snapshot if it is a model's folder in a cache."""
    if (folder / "config.json").exists():
        return folder
    if (folder / "snapshots").is_dir():
        return _snapshot(folder)
    if (folder / CONVERTED).is_dir():
        raise CheckpointError(
            f"{folder} is what a `dsjax convert` that was interrupted left; delete it, convert again."
        )
    raise CheckpointError(f"{folder} has no config.json, so it is not a checkpoint folder.")


def _cached(name: str) -> Path:
    problem = f"There is no model at {name}"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        folder = hub_cache() / f"models--{name.replace('/', '--')}"
        if folder.is_dir():
            return _snapshot(folder)
        problem += f", nor in the Hugging Face cache at {folder}"
    raise CheckpointError(f"{problem}. Give {ANY_OF}. dsjax downloads nothing.")


def _snapshot(folder: Path) -> Path:
    """The files of branch main in a model's folder of a cache."""
    main = folder / "refs" / "main"
    if not main.exists():
        raise CheckpointError(
            f"{main} does not exist, so the model's main branch was not downloaded; give the path of one of its "
            f"snapshots: {', '.join(sorted(map(str, folder.glob('snapshots/*')))) or 'none is there'}."
        )
    snapshot = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    if not (snapshot / "config.json").exists():
        raise CheckpointError(f"{snapshot} has no config.json: download the model again, it is not complete.")
    return snapshot
