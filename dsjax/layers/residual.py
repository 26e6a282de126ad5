"""How a sublayer reads the residual stream and writes to it.

A residual kind is a module with `enter`, which gives the sublayer's input and whatever `leave` needs besides it
(`mix`), and a static `leave`, which puts the sublayer's output back. Pieces pass `mix` on without looking at it.
"""

import jax
from flax import nnx

from dsjax.layers.norm import RMSNorm


class PreNorm(nnx.Module):
    """The plain residual stream x [T, D] of V2 to V3.2: the sublayer sees RMSNorm(x), its output is added to x."""

    def __init__(self, hidden_size: int, eps: float):
        self.norm = RMSNorm(hidden_size, eps)

    def enter(self, x: jax.Array) -> tuple[jax.Array, None]:
        """The sublayer's input h [T, D]; nothing to mix."""
        return self.norm(x), None

    @staticmethod
    def leave(x: jax.Array, y: jax.Array, mix: None) -> jax.Array:
        """x with the sublayer's output y [T, D] added."""
        return x + y
