"""Shapes that published models give MLA decode, per number of devices that share the heads, and cases to time."""

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


class DecodeCase(NamedTuple):
    """`batch` rows of `context` keys each, one query token a row."""

    shape: DecodeShape
    batch: int
    context: int


CASES = {
    f"{name} batch {batch} context {context}": DecodeCase(SHAPES[name], batch, context)
    for name in ("v3_tp8", "v3_tp1")  # 16 heads, as V2-Lite has on one device, and 128
    for batch, contexts in ((1, (1024, 4096, 8192, 65536)), *((batch, (1024, 4096, 8192)) for batch in (16, 64, 128)))
    for context in contexts
}
