"""The piece between attention and feed-forward block, the same for every kind of attention."""

from collections.abc import Callable

import jax
from flax import nnx

from dsjax.layers.moe import Router
from dsjax.layers.residual import PreNorm
from dsjax.sharding import TensorParallel
from dsjax.step.inputs import StepInputs


class AttentionOutput(nnx.Module):
    """Puts the projected attention output into the residual stream; gives the FFN's input h [T, D] and its experts.

    `o_proj` maps (o, inputs) to y [T, D]; `residual` (of any kind, see dsjax.layers.residual) leaves the
    attention's sublayer and enters the FFN's. A dense layer has no `router`.
    """

    def __init__(
        self,
        o_proj: Callable[[jax.Array, StepInputs], jax.Array],
        residual: PreNorm,
        router: Router | None,
        tp: TensorParallel,
    ):
        self.o_proj, self.residual, self.router, self.tp = o_proj, residual, router, tp
        self.gives = ("x", "h", "mix") if router is None else ("x", "h", "mix", "expert_ids", "expert_weights")

    def __call__(self, x: jax.Array, o: jax.Array, mix, inputs: StepInputs):
        x = self.residual.leave(x, self.tp.sum(self.o_proj(o, inputs)), mix)
        h, mix = self.residual.enter(x)
        return (x, h, mix) if self.router is None else (x, h, mix, *self.router(h, inputs.valid))
