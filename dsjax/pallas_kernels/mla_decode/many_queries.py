"""MLA decode of more than 16 queries a row, in blocks of 64: queries are the tall operand.

The output of 64 queries fills the registers of two warpgroups, 256 value channels each; a third one copies pages. The
pages of a row are computed in turn: the first warpgroup computes scores and softmax of the even ones, the second of the
odd ones, and each adds every page's values to its half of the output. What the other one needs of a page is handed over
in shared memory: the running maximum, and the weights P in the place of the page's rope keys, which nobody reads any
more. So one warpgroup's softmax runs while the other one multiplies. The order of pages is the order of the additions.

Cost, per row, block and page: 64 * 64 * (576 + 512) multiply-adds, and 72 KiB from memory per row and page. Floor:
bytes / 4.3 TB/s, or operations / 790 TFLOP/s.

What limits it: shared memory holds two pages beside the queries, so copy, scores, softmax and values of a page come one
after the other before the next one can be copied to its place. On an H200, with 64 rows of 4096 keys and 128 heads, ncu
finds memory busy for 52% of the time, L2 for 74%, shared memory for 54%, and an instruction issued in 27% of the
cycles; timestamps in the kernel give 0.7 us for scores, 0.6 for softmax, 0.7 for values, 2.4 until a copy has arrived,
and 4.4 for a pair of pages. Sending pages to both blocks of a row as a cluster, or smaller copies, made it no faster.
"""

from functools import partial as bind

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

BLOCK = 64  # queries
COPIER_REGISTERS, COMPUTER_REGISTERS = 24, 240


def attend_many(
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
    """Attention of q_latent [B, N, C] and q_rope [B, N, R], bf16, N a multiple of 64.

    tokens * heads of the N queries are real, tokens outermost.

    Returns out [B, N, C] for rows in one part of the plan, and for others partial results [slots, 1, N, C] with log2 of
    their weights [slots, N], float32. What belongs to neither is left unwritten.
    """
    batch, queries, _ = q_latent.shape
    dtype = q_latent.dtype
    num_parts, blocks = plan.parts.shape[0], queries // BLOCK

    def kernel(layer, q_latent, q_rope, pool, tables, parts, rows, out, partial, weight, *scratch):
        k_value, k_rope, q_latent_smem, q_rope_smem, tops, totals, *barriers = scratch
        full, full_rope, free, free_rope, q_full, q_free, weights_ready, totals_ready = barriers
        warpgroup = lax.axis_index("warpgroup")
        part, block = lax.axis_index("part"), lax.axis_index("block")
        block_queries = pl.ds(block * BLOCK, BLOCK)

        def copy():
            plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
            layer_index = layer[0]

            def segment(segment: Segment) -> None:
                plgpu.barrier_wait(q_free)
                for half in range(2):
                    source = q_latent.at[segment.entry, block_queries, pl.ds(half * HALF, HALF)]
                    plgpu.copy_gmem_to_smem(source, q_latent_smem.at[half], q_full)
                source = q_rope.at[segment.entry, block_queries]
                plgpu.copy_gmem_to_smem(source, q_rope_smem.at[0], q_full)

                def page(j, page) -> None:
                    slot = lax.rem(j - segment.first, 2)
                    for half in range(2):
                        plgpu.barrier_wait(free.at[2 * slot + half])
                        source = pool.at[layer_index, page, :, pl.ds(half * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(source, k_value.at[slot, half], full.at[2 * slot + half])
                    plgpu.barrier_wait(free_rope.at[slot])
                    source = pool.at[layer_index, page, :, pl.ds(RANK, ROPE)]
                    plgpu.copy_gmem_to_smem(source, k_rope.at[slot], full_rope.at[slot])

                for_each_page(tables, segment, page)

            for_each_segment(parts, rows, part, segment)
            for place in range(4):
                plgpu.barrier_wait(free.at[place])
            for slot in range(2):
                plgpu.barrier_wait(free_rope.at[slot])
            plgpu.barrier_wait(q_free)

        def compute(mine: int):
            """What warpgroup `mine` does: pages in slot `mine` are its own, it adds values of its half of all pages."""
            plgpu.set_max_registers(COMPUTER_REGISTERS, action="increase")
            theirs = 1 - mine

            def release(slot: int) -> None:
                plgpu.barrier_arrive(free.at[2 * slot + mine])
                plgpu.barrier_arrive(free_rope.at[slot])

            def column(value):
                return plgpu.layout_cast(jnp.full((BLOCK,), value, jnp.float32), WGMMA.reduce(1))

            def across(vector, shape):
                return lax.broadcast_in_dim(vector, shape, [0])

            def start_scores(s, zero) -> None:
                for half in range(2):
                    plgpu.barrier_wait(full.at[2 * mine + half])
                    plgpu.wgmma(s, q_latent_smem.at[half + zero], k_value.at[mine + zero, half].transpose((1, 0)))
                plgpu.barrier_wait(full_rope.at[mine])
                plgpu.wgmma(s, q_rope_smem.at[zero], k_rope.at[mine + zero].transpose((1, 0)))

            def masked(s, visible):
                """The last token sees keys below `visible` of the page, the one before it one key less."""
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
                if tokens > 1:
                    query = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA)
                    key = key + (tokens - 1 - query // heads)
                return jnp.where(key < visible, s, LOWEST / (scale * LOG2_E))

            def softmax(s, visible, state, zero, before_handing_over=lambda: None):
                """Hands weights and maximum of my page over; returns the new maximum and total, and the decay."""
                top, total = state
                s = lax.cond(visible < PAGE + tokens - 1, lambda s: masked(s, visible), lambda s: s, s)
                new_top = jnp.maximum(top, s.max(axis=1) * (scale * LOG2_E))
                decay = jnp.exp2(top - new_top)
                weights = jnp.exp2(s * (scale * LOG2_E) - across(new_top, s.shape))
                total = total * decay + weights.sum(axis=1)
                before_handing_over()
                k_rope[mine + zero] = weights.astype(dtype)
                tops[mine] = new_top
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_ready.at[mine])
                return new_top, total, decay

            def take_over(state):
                """Maximum, total and decay after the other warpgroup's page."""
                top, total = state
                plgpu.barrier_wait(weights_ready.at[theirs])
                new_top = plgpu.load(tops.at[theirs], layout=WGMMA.reduce(1))
                decay = jnp.exp2(top - new_top)
                return new_top, total * decay, decay

            def clear_behind(slot: int, visible, zero) -> None:
                """Values behind the row's end get weight 0, which NaN would survive."""
                key = plgpu.broadcasted_iota(jnp.int32, (PAGE, 64), 0, layout=WGMMA)

                def tile(i, _) -> None:  # a loop keeps its registers few
                    values = k_value.at[slot + zero, mine, :, pl.ds(pl.multiple_of(i * 64, 64), 64)]
                    kept = plgpu.load(values, layout=WGMMA)
                    values[...] = jnp.where(key < visible, kept, jnp.zeros_like(kept))

                lax.fori_loop(0, HALF // 64, tile, None)
                plgpu.commit_smem()

            def start_values(o, slot: int, visible, decay, zero) -> None:
                pl.when(visible < PAGE)(lambda: clear_behind(slot, visible, zero))
                o[...] = plgpu.wgmma_accumulator_load(o, wait_n=None) * across(decay, o.shape)
                plgpu.wgmma(o, k_rope.at[slot + zero], k_value.at[slot + zero, mine])

            def finish_values(slot: int) -> None:
                plgpu.wgmma_wait(0)
                release(slot)

            def even_page(segment: Segment, o, i, state):
                """The first warpgroup's part in pages 2 i and 2 i + 1 of a segment."""
                zero = _always_zero(i)
                visible = segment.length - (segment.first + 2 * i) * PAGE

                def scores(s):
                    start_scores(s, zero)
                    return s[...]

                s = pl.run_scoped(scores, ACC((BLOCK, PAGE), jnp.float32))
                top, total, decay = softmax(s, visible, state, zero)
                start_values(o, 0, visible, decay, zero)
                finish_values(0)

                def odd(state):
                    top, total, decay = take_over(state)
                    plgpu.barrier_wait(full.at[2 + mine])
                    start_values(o, 1, visible - PAGE, decay, zero)
                    finish_values(1)
                    return top, total

                return lax.cond(segment.first + 2 * i + 1 < segment.end, odd, lambda state: state, (top, total))

            def odd_page(segment: Segment, o, i, state):
                """The second warpgroup's part in pages 2 i and 2 i + 1 of a segment."""
                zero = _always_zero(i)
                visible = segment.length - (segment.first + 2 * i) * PAGE

                def even(state):
                    top, total, decay = take_over(state)
                    plgpu.barrier_wait(full.at[mine])
                    start_values(o, 0, visible, decay, zero)
                    return top, total

                def both(state):
                    def scores(s):
                        start_scores(s, zero)
                        after_even = even(state)
                        return plgpu.wgmma_accumulator_load(s, wait_n=1), after_even

                    s, after_even = pl.run_scoped(scores, ACC((BLOCK, PAGE), jnp.float32))
                    top, total, decay = softmax(s, visible - PAGE, after_even, zero, lambda: finish_values(0))
                    start_values(o, 1, visible - PAGE, decay, zero)
                    finish_values(1)
                    return top, total

                def even_only(state):
                    after_even = even(state)
                    finish_values(0)
                    return after_even

                return lax.cond(segment.first + 2 * i + 1 < segment.end, both, even_only, state)

            def attend(segment: Segment, o) -> None:
                plgpu.barrier_wait(q_full)
                pages = bind(even_page if mine == 0 else odd_page, segment, o)
                state = column(LOWEST), column(0.0)
                top, total = lax.fori_loop(0, (segment.end - segment.first + 1) // 2, pages, state)
                totals[mine] = total
                plgpu.commit_smem()
                plgpu.barrier_arrive(totals_ready)
                plgpu.barrier_wait(totals_ready)
                write(segment, o, top, total + plgpu.load(totals.at[theirs], layout=WGMMA.reduce(1)))
                plgpu.barrier_arrive(q_free)

            def write(segment: Segment, o, top, total) -> None:
                result = o[...] * across(jnp.where(top > LOWEST / 2, 1 / total, 0.0), o.shape)
                columns = pl.ds(mine * HALF, HALF)

                @pl.when(segment.slot < 0)
                def _whole():
                    q_latent_smem[mine] = result.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(q_latent_smem.at[mine], out.at[segment.entry, block_queries, columns])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(segment.slot >= 0)
                def _partial():
                    partial.at[segment.slot, 0, block_queries, columns][...] = result
                    if mine == 0:
                        weight.at[segment.slot, block_queries][...] = top + jnp.log2(total)

            def segment(segment: Segment) -> None:
                pl.run_scoped(lambda o: attend(segment, o), ACC((BLOCK, HALF), jnp.float32))

            for slot in range(2):
                release(slot)
            plgpu.barrier_arrive(q_free)
            for_each_segment(parts, rows, part, segment)

        pl.when(warpgroup == 0)(bind(compute, 0))
        pl.when(warpgroup == 1)(bind(compute, 1))
        pl.when(warpgroup == 2)(copy)

    slots = max_partials(num_parts)
    smem = lambda *shape: plgpu.SMEM(shape, dtype, transforms=TILED)  # noqa: E731
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, queries, RANK), dtype),
            jax.ShapeDtypeStruct((slots, 1, queries, RANK), jnp.float32),
            jax.ShapeDtypeStruct((slots, queries), jnp.float32),
        ),
        grid=(num_parts, blocks),
        grid_names=("part", "block"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            smem(2, 2, PAGE, HALF),
            smem(2, PAGE, ROPE),
            smem(2, BLOCK, HALF),
            smem(1, BLOCK, ROPE),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.Barrier(num_barriers=4),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=4),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_many",
    )(layer, q_latent, q_rope, pool, tables, plan.parts, plan.rows)


def _always_zero(i):
    """0 for every count of pages that exists, which the compiler does not know.

    Added to an index, it keeps the 100 descriptors of matrix operands out of registers: they are computed again for
    each page instead of being kept over the loop.
    """
    return i >> 24
