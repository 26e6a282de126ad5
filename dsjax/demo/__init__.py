"""The demo model: a tiny DeepSeek-V3, trained on Shakespeare, that comes with dsjax. `training` made it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
