"""Shapes that published models give the router, with its variant."""

from typing import NamedTuple

from dsjax.config import RouterConfig
from dsjax.published import published


class RouterShape(NamedTuple):
    """Width of the hidden rows, and how experts are chosen."""

    hidden: int
    config: RouterConfig


SHAPES = {
    model: RouterShape(config.hidden_size, config.moe.router)
    for model in ("v2_lite", "v2_5", "v3", "moonlight")
    for config in [published(model)]
}
