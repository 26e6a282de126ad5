"""MLA decode: absorbed attention of single query tokens over the paged latent cache."""

from dsjax.pallas_kernels.mla_decode.reference import mla_decode

IMPLEMENTATIONS = {"reference": mla_decode}
