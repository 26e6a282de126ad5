"""MLA decode on Hopper GPUs: splits the work on the device, then attends and merges in two kernels.

Up to 16 queries a row (tokens times local heads) run in few_queries.py, more in many_queries.py.
"""

from functools import partial

import jax
import jax.numpy as jnp

from dsjax.pallas_kernels.mla_decode import reference
from dsjax.pallas_kernels.mla_decode.combine import combine
from dsjax.pallas_kernels.mla_decode.few_queries import attend_few
from dsjax.pallas_kernels.mla_decode.many_queries import BLOCK, attend_many
from dsjax.pallas_kernels.mla_decode.reference import DecodeRows
from dsjax.pallas_kernels.mla_decode.tiles import RANK, ROPE
from dsjax.pallas_kernels.mla_decode.work import PAGE, DecodePlan, split_work
from dsjax.telemetry import count, warn_once

SERVES = f"bf16 with rank {RANK}, rope {ROPE} and pages of {PAGE} tokens"
MAX_FEW = 16  # queries a row that the few-queries form takes
COMBINE_BLOCKS = 16  # of the merging kernel for each block of the attending one, as tuned on an H200
# By queries a row, for the largest number that is not above it; tuned on an H200 with bench/kernels.py --tune.
SPLIT_COST_PAGES = {1: 2, MAX_FEW + 1: 4}


def tuned_split_cost_pages(queries: int) -> int:
    """How many pages larger parts may be if rows of `queries` = Q * H queries then need no merging."""
    return SPLIT_COST_PAGES[max(least for least in SPLIT_COST_PAGES if least <= queries)]


def plan(
    tables: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    *,
    queries: int,
    num_sms: int,
    split_cost_pages: int | None = None,
) -> DecodePlan:
    """The work of each part of the grid, for entries (see DecodeRows) with `queries` = Q * H queries each.

    A part has a block of the grid for each 64 queries. Each block fills an SM; there are as many parts as fill
    `num_sms`, so that all blocks run at once.
    """
    if split_cost_pages is None:
        split_cost_pages = tuned_split_cost_pages(queries)
    parts = max(num_sms // _blocks(queries), 1)
    return split_work(tables, rows, lengths, parts=parts, split_cost_pages=split_cost_pages)


@partial(jax.jit, static_argnames="scale")
def mla_decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    decode: DecodeRows,
    *,
    scale: float,
) -> jax.Array:
    """See reference.mla_decode. Models that the kernels do not serve (see SERVES) run the reference.

    Q and H may be any numbers: Q * H queries are padded to 8, 16 or a multiple of 64. `decode.plan` is that of `plan`
    for the same Q * H; that of another number is as right, but does not fill the GPU evenly.

    Cost: 72 KiB from memory per row and page, and 64 * (576 + 512) multiply-adds per page and padded query; one short
    row takes 9 us. Floor on an H200: bytes / 4.3 TB/s, or operations / 790 TFLOP/s.
    """
    if not _supported(q_latent, q_rope, pool):
        count("reference_op.mla_decode")
        warn_once(
            f"The Hopper kernel of MLA decode serves {SERVES}. This model has {q_latent.dtype}, rank "
            f"{q_latent.shape[-1]}, rope {q_rope.shape[-1]} and pages of {pool.shape[2]} tokens: the plain JAX "
            "reference runs, which gives the same results more slowly."
        )
        return reference.mla_decode(q_latent, q_rope, pool, layer, tables, decode, scale=scale)
    batch, tokens, heads, rank = q_latent.shape
    queries = tokens * heads
    padding = (0, 0), (0, -queries % _multiple(queries)), (0, 0)
    latent, rope = (jnp.pad(q.reshape(batch, queries, -1), padding) for q in (q_latent, q_rope))
    attend = attend_few if queries <= MAX_FEW else attend_many
    results = attend(latent, rope, pool, layer.reshape(1), tables, decode.plan, tokens=tokens, heads=heads, scale=scale)
    unroll = min(max(2 * len(decode.plan.parts) // batch, 2), 8)  # about the splits of a row when all are alike
    blocks = len(decode.plan.parts) * _blocks(queries) * COMBINE_BLOCKS
    out = combine(*results, plan=decode.plan, blocks=blocks, unroll=unroll)
    return out[:, :queries].reshape(batch, tokens, heads, rank)


def _blocks(queries: int) -> int:
    return 1 if queries <= MAX_FEW else -(-queries // BLOCK)


def _multiple(queries: int) -> int:
    """What the number of queries is padded to a multiple of."""
    return 8 if queries <= MAX_FEW else BLOCK


def _supported(q_latent: jax.Array, q_rope: jax.Array, pool: jax.Array) -> bool:
    sizes = q_latent.shape[-1], q_rope.shape[-1], pool.shape[2]
    return sizes == (RANK, ROPE, PAGE) and q_latent.dtype == pool.dtype == jnp.bfloat16
