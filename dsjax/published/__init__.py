"""Published model configurations: real shapes for tests, tuning, benchmarks and dummy-weight runs."""

from functools import cache
from pathlib import Path

from dsjax.config import ModelConfig, read_json

FOLDER = Path(__file__).parent
MODELS = {
    "v2_lite": "DeepSeek-V2-Lite.json",
    "v2_5": "DeepSeek-V2.5.json",
    "v3": "DeepSeek-R1.json",  # R1 has V3's shapes
    "moonlight": "Moonlight-16B-A3B-Instruct.json",
}


@cache
def published(name: str) -> ModelConfig:
    """The configuration of the published model `name` (a key of MODELS)."""
    return ModelConfig.from_fields(read_json(FOLDER / MODELS[name]), where=MODELS[name])
