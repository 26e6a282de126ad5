"""Models at their real widths with few layers: what a GPU needs to show what it does, and compiles soon."""

import json
from pathlib import Path
from typing import Any

from dsjax.published import FOLDER, MODELS


def write_v2_lite(folder: Path, layers: int, **changes: Any) -> Path:
    """`folder`, with the config.json of a DeepSeek-V2-Lite of so many layers (the first one is dense)."""
    config = json.loads((FOLDER / MODELS["v2_lite"]).read_text()) | {"num_hidden_layers": layers} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
