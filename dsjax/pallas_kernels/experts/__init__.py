"""Experts: each token through its routed experts' SwiGLU MLPs, weighted and added up."""

from dsjax.pallas_kernels.experts import hopper, reference

IMPLEMENTATIONS = {"reference": reference.experts, "hopper": hopper.experts}
SERVES = {"hopper": hopper.SERVES}
