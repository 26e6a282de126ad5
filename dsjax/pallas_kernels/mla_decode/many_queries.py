"""MLA decode of more than 16 queries a row, in blocks of 64: queries are the tall operand.

The output of 64 queries fills the registers of two warpgroups, 256 value channels each; a third one copies pages. Pages
are taken in pairs. The first warpgroup computes scores and softmax of a pair's first page, the second one of its second
page, and each adds the values of both to its half of the output. What they need of each other goes through shared
memory: the running maxima, and the weights P in the place of the page's rope keys, which nobody reads any more.

    first   S0  max0 >  P0  P0 V0, and P0 scaled to max1 >   P1 V1
    second  S1  max1 >  P1 >  P0 V0', P1 V1'                   V, V': halves of the values

Cost, per row, block and page: 64 * 64 * (576 + 512) multiply-adds, and 72 KiB from memory per row and page. Floor:
bytes / 4.3 TB/s, or operations / 790 TFLOP/s.

What limits it: shared memory holds one pair of pages beside the queries, so copy, scores, softmax and values of a page
come one after the other before the next page can be copied to its place. Seen once with ncu on an H200 (64 rows of 4096
keys, 128 heads, clock held at 1.27 GHz, no prefetching): of 159 us the warpgroups waited 17 and 30 for pages, 32 and 38
for products, and 9 for the first queries. At full clock the card is at its power limit, and memory is further away.
"""

from functools import partial
from itertools import product

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
STAGES = 2  # pages in shared memory: the pair
WIDTHS = HALF, HALF, ROPE  # pieces of a latent, copied one by one
CHANNELS = pl.ds(0, HALF), pl.ds(HALF, HALF), pl.ds(RANK, ROPE)
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
    one_token = heads % BLOCK == 0  # in a block

    def kernel(layer, q_latent, q_rope, pool, tables, parts, rows, out, partial_out, weight, *scratch):
        k, q, tops, totals, full, free, q_full, q_free, told, weights_ready = scratch
        warpgroup = lax.axis_index("warpgroup")
        part, block = lax.axis_index("part"), lax.axis_index("block")
        block_queries = pl.ds(block * BLOCK, BLOCK)

        def copy():
            plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
            layer_index = layer[0]

            def prefetch(page) -> None:
                """Values, to L2: memory is too far away to be waited for. Two blocks need the page and share this."""
                if blocks > 1:
                    mine = pl.multiple_of(lax.rem(block, 2) * HALF, HALF)
                    plgpu.async_prefetch(pool.at[layer_index, page, :, pl.ds(mine, HALF)])
                else:
                    plgpu.async_prefetch(pool.at[layer_index, page, :, CHANNELS[0]])
                    plgpu.async_prefetch(pool.at[layer_index, page, :, CHANNELS[1]])

            def copy_queries(entry) -> None:
                for piece in range(3):
                    source = q_rope if piece == 2 else q_latent.at[:, :, CHANNELS[piece]]
                    plgpu.copy_gmem_to_smem(source.at[entry, block_queries], q[piece].at[0], q_full)

            def copy_page(segment: Segment, j, page, following) -> None:
                prefetch(following)
                stage = lax.rem(j - segment.first, STAGES)
                for piece, channels in enumerate(CHANNELS):
                    plgpu.barrier_wait(free.at[stage, piece])
                    source = pool.at[layer_index, page, :, channels]
                    plgpu.copy_gmem_to_smem(source, k[piece].at[stage], full.at[stage, piece])

            def copy_segment(segment: Segment) -> None:
                plgpu.barrier_wait(q_free)
                copy_queries(segment.entry)
                for_each_page(tables, segment, partial(copy_page, segment))

            for_each_segment(parts, rows, part, copy_segment)
            for stage, piece in product(range(STAGES), range(3)):
                plgpu.barrier_wait(free.at[stage, piece])
            plgpu.barrier_wait(q_free)

        def compute(mine: int):
            """What warpgroup `mine` does: pages in stage `mine` are its own, it adds its half of all values."""
            plgpu.set_max_registers(COMPUTER_REGISTERS, action="increase")
            theirs = 1 - mine

            def column(value):
                return plgpu.layout_cast(jnp.full((BLOCK,), value, jnp.float32), WGMMA.reduce(1))

            def across(vector, shape):
                return lax.broadcast_in_dim(vector, shape, [0])

            def masked(s, visible):
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
                if not one_token:
                    query = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=WGMMA.reduce(1))
                    visible = across(visible + query // heads, s.shape)
                return jnp.where(key < visible, s, 2 * LOWEST / (scale * LOG2_E))  # far below the maximum, LOWEST

            def scores(zero, visible, s):
                """Of my page; `s` is an accumulator."""
                for piece in range(3):
                    plgpu.barrier_wait(full.at[mine + zero, piece])
                    plgpu.wgmma(s, q[piece].at[zero], k[piece].at[mine + zero].transpose((1, 0)))
                visible = visible - (tokens - 1)  # the last token sees all keys, the one before it one key less
                if one_token:
                    visible = visible + block // (heads // BLOCK)
                return lax.cond(visible < PAGE, lambda s: masked(s, visible), lambda s: s, s[...])

            def tell(vectors, value) -> None:
                """The other warpgroup, which is told maxima and totals."""
                vectors[mine] = value
                plgpu.barrier_arrive(told.at[mine])

            def ask(vectors):
                """What the other warpgroup tells."""
                plgpu.barrier_wait(told.at[theirs])
                return plgpu.load(vectors.at[theirs], layout=WGMMA.reduce(1))

            def new_top(s, top):
                """The maximum with my page."""
                top = jnp.maximum(top, s.max(axis=1) * (scale * LOG2_E))
                tell(tops, top)
                return top

            def weigh(s, top):
                return jnp.exp2(s * (scale * LOG2_E) - across(top, s.shape))

            def hand_over(weights, zero) -> None:
                k[2][mine + zero] = weights.astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_ready.at[mine])

            def their_weights(zero):
                """Of their page, whose values are there too."""
                plgpu.barrier_wait(weights_ready.at[theirs + zero])
                plgpu.barrier_wait(full.at[theirs + zero, mine])
                return k[2].at[theirs + zero]

            def clear_behind(values, visible) -> None:
                """Values behind the row's end get weight 0, which NaN would survive."""
                key = plgpu.broadcasted_iota(jnp.int32, (PAGE, 64), 0, layout=WGMMA)

                def tile(i, _) -> None:  # a loop keeps its registers few
                    tile = values.at[:, pl.ds(pl.multiple_of(i * 64, 64), 64)]
                    kept = plgpu.load(tile, layout=WGMMA)
                    tile[...] = jnp.where(key < visible, kept, jnp.zeros_like(kept))

                lax.fori_loop(0, HALF // 64, tile, None)
                plgpu.commit_smem()

            def fade(o, decay) -> None:
                o[...] = plgpu.wgmma_accumulator_load(o, wait_n=None) * across(decay, o.shape)

            def start_values(o, weights, stage: int, visible, zero) -> None:
                values = k[mine].at[stage + zero]
                pl.when(visible < PAGE)(lambda: clear_behind(values, visible))
                plgpu.wgmma(o, weights, values)

            def finish_values(stage: int, later: int = 0) -> None:
                """`later`: products that have been started since."""
                plgpu.wgmma_wait(later)
                plgpu.barrier_arrive(free.at[stage, mine])
                if stage == theirs:  # the place of its rope keys had the weights for me
                    plgpu.barrier_arrive(free.at[stage, 2])

            def first_page(segment: Segment, o, i, state):
                """The first warpgroup's part in pages 2 i and 2 i + 1 of a segment."""
                before, total = state
                zero = _always_zero(i)
                visible = segment.length - (segment.first + 2 * i) * PAGE
                s = pl.run_scoped(partial(scores, zero, visible), ACC((BLOCK, PAGE), jnp.float32))
                top = new_top(s, before)
                weights, decay = weigh(s, top), jnp.exp2(before - top)
                total = total * decay + weights.sum(axis=1)
                fade(o, decay)
                start_values(o, weights.astype(dtype), 0, visible, zero)

                both_top = ask(tops)
                decay = jnp.exp2(top - both_top)
                hand_over(weights * across(decay, weights.shape), zero)
                finish_values(0)

                @pl.when(segment.first + 2 * i + 1 < segment.end)
                def _second():
                    fade(o, decay)
                    start_values(o, their_weights(zero), 1, visible - PAGE, zero)
                    finish_values(1)

                return both_top, total * decay

            def second_page(segment: Segment, o, i, state):
                """The second warpgroup's part in pages 2 i and 2 i + 1 of a segment."""
                before, total = state
                zero = _always_zero(i)
                visible = segment.length - (segment.first + 2 * i) * PAGE

                def add_first(top):
                    decay = jnp.exp2(before - top)
                    fade(o, decay)
                    start_values(o, their_weights(zero), 0, visible, zero)
                    return total * decay

                def and_second():
                    s = pl.run_scoped(partial(scores, zero, visible - PAGE), ACC((BLOCK, PAGE), jnp.float32))
                    top = new_top(s, ask(tops))
                    weights = weigh(s, top)
                    hand_over(weights, zero)
                    total = add_first(top) + weights.sum(axis=1)
                    start_values(o, weights.astype(dtype), 1, visible - PAGE, zero)
                    finish_values(0, later=1)
                    finish_values(1)
                    return top, total

                def alone():
                    top = ask(tops)
                    tell(tops, top)  # it was heard: nothing may be told twice before that
                    total = add_first(top)
                    finish_values(0)
                    return top, total

                return lax.cond(segment.first + 2 * i + 1 < segment.end, and_second, alone)

            def attend(segment: Segment, o) -> None:
                plgpu.barrier_wait(q_full)
                pages = partial(first_page if mine == 0 else second_page, segment, o)
                state = column(LOWEST), column(0.0)
                top, total = lax.fori_loop(0, (segment.end - segment.first + 1) // 2, pages, state)
                tell(totals, total)
                write(segment, o, top, total + ask(totals))
                plgpu.barrier_arrive(q_free)

            def write(segment: Segment, o, top, total) -> None:
                result = o[...] * across(jnp.where(top > LOWEST / 2, 1 / total, 0.0), o.shape)

                @pl.when(segment.slot < 0)
                def _whole():
                    staged = q[mine].at[0]
                    staged[...] = result.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staged, out.at[segment.entry, block_queries, CHANNELS[mine]])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(segment.slot >= 0)
                def _partial():
                    partial_out.at[segment.slot, 0, block_queries, CHANNELS[mine]][...] = result
                    if mine == 0:
                        weight.at[segment.slot, block_queries][...] = top + jnp.log2(total)

            def attend_segment(segment: Segment) -> None:
                pl.run_scoped(partial(attend, segment), ACC((BLOCK, HALF), jnp.float32))

            for stage in range(STAGES):
                plgpu.barrier_arrive(free.at[stage, mine])
            plgpu.barrier_arrive(free.at[theirs, 2])
            plgpu.barrier_arrive(q_free)
            for_each_segment(parts, rows, part, attend_segment)

        pl.when(warpgroup == 0)(partial(compute, 0))
        pl.when(warpgroup == 1)(partial(compute, 1))
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
            tuple(smem(STAGES, PAGE, width) for width in WIDTHS),
            tuple(smem(1, BLOCK, width) for width in WIDTHS),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.Barrier(num_barriers=(STAGES, 3)),
            plgpu.Barrier(num_barriers=(STAGES, 3)),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
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
