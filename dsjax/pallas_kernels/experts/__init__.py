"""Experts: each token through its routed experts' SwiGLU MLPs, weighted and added up."""

from dsjax.pallas_kernels.experts.reference import experts

IMPLEMENTATIONS = {"reference": experts}
