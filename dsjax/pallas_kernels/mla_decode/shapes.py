"""Shapes that published models give MLA decode, per number of devices that share the heads."""

from typing import NamedTuple

from dsjax.published import published


class DecodeShape(NamedTuple):
    """Local heads, latent rank and rope width."""

    heads: int
    rank: int
    rope: int


SHAPES = {
    f"{model}_tp{tp}": DecodeShape(mla.num_heads // tp, mla.kv_lora_rank, mla.qk_rope_head_dim)
    for model in ("v2_lite", "v3")
    for mla in [published(model).attention]
    for tp in (1, 2, 4, 8)
}
