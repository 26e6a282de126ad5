"""Sizes, layouts and numbers that both forms of MLA decode on Hopper have in common."""

import math

from jax.experimental import pallas as pl  # noqa: F401  plgpu needs it imported first
from jax.experimental.pallas import mosaic_gpu as plgpu

RANK, ROPE = 512, 64  # channels of a latent: those that are values too, and rotated ones
HALF = RANK // 2  # a copy to shared memory has at most 256 columns
LOWEST = -1e30  # of scores; finite, so that queries that see no key stay free of NaN
LOG2_E = math.log2(math.e)
ACC = plgpu.WGMMAAccumulatorRef
WGMMA = plgpu.Layout.WGMMA
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
