"""Merges the partial results of rows that MLA decode has split over several parts of its plan."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl  # noqa: F401  plgpu needs it imported first
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsjax.pallas_kernels.mla_decode.tiles import LOWEST
from dsjax.pallas_kernels.mla_decode.work import DecodePlan


def combine(
    out: jax.Array, partial: jax.Array, weight: jax.Array, plan: DecodePlan, *, blocks: int, unroll: int
) -> jax.Array:
    """out [B, N, C], updated in place, in which the plan's merges are written: zeros for empty rows.

    `partial` [slots, n, N, C]: partial results, each the sum of n. `weight` float32 [slots, N]: log2 of their weights.
    `blocks`: of the grid. `unroll`: partial results that are read at once. Cost: bytes of the partial results of split
    rows, which are still in L2, and a launch.
    """
    _, queries, width = out.shape
    strided = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    ref = jax.new_ref(out)

    def kernel(partial, weight, merges, num_merges):
        block = lax.axis_index("block")
        last = merges.shape[0] - 1

        def merge(item):
            at = jnp.minimum(item // queries, last)
            return tuple(merges[at, i] for i in range(3))

        def read(partial, slot, query):
            terms = [plgpu.load(partial.at[slot, i, query], layout=strided) for i in range(partial.shape[1])]
            return sum(term.astype(jnp.float32) for term in terms)

        def one(i, merged):
            item = block + i * blocks
            following = merge(item + blocks)
            entry, splits, slot = merged
            query = lax.rem(item, queries)

            def some(chunk, state):
                total, top, sum = state
                at = [chunk * unroll + u for u in range(unroll)]
                slots = [slot + jnp.minimum(i, splits - 1) for i in at]
                weights = [jnp.where(i < splits, weight[s, query], -jnp.inf) for i, s in zip(at, slots, strict=True)]
                values = [read(partial, s, query) for s in slots]
                new_top = top
                for one in weights:
                    new_top = jnp.maximum(new_top, one)
                decay = jnp.exp2(top - new_top)
                total, sum = total * decay, sum * decay
                for one, value in zip(weights, values, strict=True):
                    share = jnp.exp2(one - new_top)
                    total += share
                    sum += value * share
                return total, new_top, sum

            nothing = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), strided)
            state = jnp.float32(0), jnp.float32(LOWEST), nothing
            total, top, sum = lax.fori_loop(0, (splits + unroll - 1) // unroll, some, state)
            ref[entry, query] = (sum * jnp.where(top > LOWEST / 2, 1 / total, 0.0)).astype(out.dtype)
            return following

        items = num_merges[0] * queries
        lax.fori_loop(0, (items - block + blocks - 1) // blocks, one, merge(block))

    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_combine",
    )(partial, weight, plan.merges, plan.num_merges)
    return jax.freeze(ref)
