"""MLA prefill: causal attention of ragged chunks of query tokens over the paged latent cache, in per-head form."""

from dsjax.pallas_kernels.mla_prefill.reference import PrefillChunks, mla_prefill

__all__ = ["IMPLEMENTATIONS", "PrefillChunks"]

IMPLEMENTATIONS = {"reference": mla_prefill}
