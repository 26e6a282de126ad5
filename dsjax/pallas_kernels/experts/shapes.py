"""Shapes that published models give the routed experts, per number of devices that share them."""

from typing import NamedTuple

from dsjax.published import published


class ExpertsShape(NamedTuple):
    """Local experts, experts per token, hidden width and expert width."""

    experts: int
    chosen: int
    hidden: int
    width: int


SHAPES = {
    f"{model}_ep{ep}": ExpertsShape(
        config.moe.router.num_experts // ep,
        config.moe.router.experts_per_token,
        config.hidden_size,
        config.moe.expert_width,
    )
    for model in ("v2_lite", "v3")
    for config in [published(model)]
    for ep in (1, 2, 4, 8)
}
