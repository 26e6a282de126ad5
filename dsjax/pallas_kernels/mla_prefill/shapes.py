"""Shapes that published models give MLA prefill, per number of devices that share the heads."""

from typing import NamedTuple

from dsjax.published import published


class PrefillShape(NamedTuple):
    """Local heads; widths of a head's nope and rope query parts and of its values; latent rank."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


SHAPES = {
    f"{model}_tp{tp}": PrefillShape(
        mla.num_heads // tp, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim, mla.kv_lora_rank
    )
    for model in ("v2_lite", "v3")
    for mla in [published(model).attention]
    for tp in (1, 2, 4, 8)
}
