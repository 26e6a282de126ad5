"""Router: scores every expert for every token and chooses the experts per token."""

from dsjax.pallas_kernels.router.reference import router

IMPLEMENTATIONS = {"reference": router}
