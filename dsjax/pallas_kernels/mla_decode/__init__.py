"""MLA decode: absorbed attention of single query tokens over the paged latent cache."""

from dsjax.pallas_kernels.mla_decode.reference import mla_decode, mla_decode_in_tiles

IMPLEMENTATIONS = {"reference": mla_decode, "deterministic": mla_decode_in_tiles}
