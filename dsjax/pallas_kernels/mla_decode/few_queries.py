"""MLA decode of at most 16 queries a row: keys are the tall operand.

S^T = K Q^T has 64 keys as rows and the queries as columns, O^T = V^T P^T the 512 value channels as rows: queries need
not be padded to the 64 rows of a wgmma. One warpgroup computes, another one copies pages, two of them ahead.

Cost: every page is read once, 72 KiB, so the floor is bytes / 4.3 TB/s. A page takes 68 wgmmas of 64 rows whose left
operand comes from shared memory, about 1,100 cycles, a quarter of the time in which an SM's share of the bandwidth
brings it; softmax and the waits between the three stages take about as long.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsjax.pallas_kernels.mla_decode.tiles import ACC, HALF, LOG2_E, LOWEST, RANK, ROPE, TILED, WGMMA
from dsjax.pallas_kernels.mla_decode.work import (
    PAGE,
    DecodePlan,
    Segment,
    for_each_page,
    for_each_segment,
    max_partials,
)

SLOTS = 2  # pages in shared memory


def attend_few(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    plan: DecodePlan,
    *,
    tokens: int,
    heads: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of q_latent [B, N, C] and q_rope [B, N, R], bf16, N = 8 or 16.

    tokens * heads of the N queries are real, tokens outermost.
    Returns out [B, N, C] for rows in one part of the plan, and for others partial results [slots, 2, N, C], the sum of
    two bf16, with log2 of their weights [slots, N], float32. What belongs to neither is left unwritten.
    """
    batch, queries, _ = q_latent.shape
    dtype = q_latent.dtype
    num_parts = plan.parts.shape[0]

    def kernel(layer, q_latent, q_rope, pool, tables, parts, rows, out, partial, weight, *scratch):
        k_value, k_rope, q_latent_smem, q_rope_smem, p, staged, full, free, q_full, q_free = scratch
        warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")

        @pl.when(warpgroup == 1)
        def _copy():
            layer_index = layer[0]

            def segment(segment: Segment) -> None:
                plgpu.barrier_wait(q_free)
                for half in range(2):
                    columns = pl.ds(half * HALF, HALF)
                    plgpu.copy_gmem_to_smem(q_latent.at[segment.entry, :, columns], q_latent_smem.at[half], q_full)
                plgpu.copy_gmem_to_smem(q_rope.at[segment.entry], q_rope_smem, q_full)

                def page(j, page, _following) -> None:
                    slot = lax.rem(segment.before + j - segment.first, SLOTS)
                    plgpu.barrier_wait(free.at[slot])
                    for half in range(2):
                        columns = pl.ds(half * HALF, HALF)
                        source = pool.at[layer_index, page, :, columns]
                        plgpu.copy_gmem_to_smem(source, k_value.at[slot, half], full.at[slot])
                    source = pool.at[layer_index, page, :, pl.ds(RANK, ROPE)]
                    plgpu.copy_gmem_to_smem(source, k_rope.at[slot], full.at[slot])

                for_each_page(tables, segment, page)

            for_each_segment(parts, rows, part, segment)
            for slot in range(SLOTS):
                plgpu.barrier_wait(free.at[slot])
            plgpu.barrier_wait(q_free)

        @pl.when(warpgroup == 0)
        def _compute():
            for slot in range(SLOTS):
                plgpu.barrier_arrive(free.at[slot])
            plgpu.barrier_arrive(q_free)

            def scores(s, slot):
                for half in range(2):
                    plgpu.wgmma(s, k_value.at[slot, half], q_latent_smem.at[half].transpose((1, 0)))
                plgpu.wgmma(s, k_rope.at[slot], q_rope_smem.transpose((1, 0)))
                return s[...]

            def masked(s, visible):
                """The last token sees keys below `visible` of the page, the one before it one key less."""
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA)
                if tokens > 1:
                    query = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
                    key = key + (tokens - 1 - query // heads)
                return jnp.where(key < visible, s * (scale * LOG2_E), LOWEST)

            def clear_behind(slot, visible):
                """Values behind the row's end get weight 0, which NaN would survive."""
                for half in range(2):
                    for column in range(0, HALF, 64):
                        values = k_value.at[slot, half, :, pl.ds(column, 64)]
                        key = plgpu.broadcasted_iota(jnp.int32, (PAGE, 64), 0, layout=WGMMA)
                        kept = plgpu.load(values, layout=WGMMA)
                        values[...] = jnp.where(key < visible, kept, jnp.zeros_like(kept))

            def columns(value):
                return plgpu.layout_cast(jnp.full((queries,), value, jnp.float32), WGMMA.reduce(0))

            def along(vector, shape):
                return lax.broadcast_in_dim(vector, shape, [1])

            def attend(segment: Segment, *sums) -> None:
                plgpu.barrier_wait(q_full)

                def page(j, state):
                    top, total = state
                    slot = lax.rem(segment.before + j - segment.first, SLOTS)
                    visible = segment.length - j * PAGE
                    plgpu.barrier_wait(full.at[slot])
                    s = pl.run_scoped(lambda s: scores(s, slot), ACC((PAGE, queries), jnp.float32))
                    s = masked(s, visible)
                    new_top = jnp.maximum(top, s.max(axis=0))
                    decay = jnp.exp2(top - new_top)
                    weights = jnp.exp2(s - along(new_top, s.shape))
                    p.transpose((1, 0))[...] = weights.astype(dtype)
                    pl.when(visible < PAGE)(lambda: clear_behind(slot, visible))
                    plgpu.commit_smem()
                    for half, o in enumerate(sums):
                        o[...] = o[...] * along(decay, o.shape)
                        plgpu.wgmma(o, k_value.at[slot, half].transpose((1, 0)), p.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])
                    return new_top, total * along(decay, total.shape) + weights

                nothing = plgpu.layout_cast(jnp.full((PAGE, queries), 0.0, jnp.float32), WGMMA)
                top, total = lax.fori_loop(segment.first, segment.end, page, (columns(LOWEST), nothing))
                plgpu.barrier_arrive(q_free)
                write(segment, sums, top, total.sum(axis=0))

            def write(segment: Segment, sums, top, total) -> None:
                sees_any = top > LOWEST / 2
                inverse = jnp.where(sees_any, 1 / total, 0.0)
                results = [o[...] * along(inverse, o.shape) for o in sums]
                rounded = [result.astype(dtype) for result in results]
                stage(staged.at[0], rounded)

                @pl.when(segment.slot < 0)
                def _whole():
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staged.at[0], out.at[segment.entry])

                @pl.when(segment.slot >= 0)
                def _partial():
                    rest = [result - near.astype(jnp.float32) for result, near in zip(results, rounded, strict=True)]
                    stage(staged.at[1], [value.astype(dtype) for value in rest])
                    weight.at[segment.slot][...] = top + jnp.log2(total)
                    plgpu.commit_smem()
                    for i in range(2):
                        plgpu.copy_smem_to_gmem(staged.at[i], partial.at[segment.slot, i])

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def stage(target, halves) -> None:
                for half, value in enumerate(halves):
                    target.at[:, pl.ds(half * HALF, HALF)].transpose((1, 0))[...] = value

            def segment(segment: Segment) -> None:
                sums = ACC((HALF, queries), jnp.float32)
                pl.run_scoped(lambda *sums: attend(segment, *sums), sums, sums)

            for_each_segment(parts, rows, part, segment)

    slots = max_partials(num_parts)
    smem = lambda *shape: plgpu.SMEM(shape, dtype, transforms=TILED)  # noqa: E731
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, queries, RANK), dtype),
            jax.ShapeDtypeStruct((slots, 2, queries, RANK), dtype),
            jax.ShapeDtypeStruct((slots, queries), jnp.float32),
        ),
        grid=(num_parts,),
        grid_names=("part",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            smem(SLOTS, 2, PAGE, HALF),
            smem(SLOTS, PAGE, ROPE),
            smem(2, queries, HALF),
            smem(queries, ROPE),
            smem(queries, PAGE),
            smem(2, queries, RANK),
            plgpu.Barrier(num_arrivals=3, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_few",
    )(layer, q_latent, q_rope, pool, tables, plan.parts, plan.rows)
