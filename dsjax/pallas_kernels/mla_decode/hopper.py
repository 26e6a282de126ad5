"""MLA decode on Hopper GPUs: splits the work on the device, then attends and merges in two kernels.

Up to 16 queries a row (tokens times local heads) run in few_queries.py, more in many_queries.py.
"""

from dataclasses import dataclass
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

NUM_SMS = 132
MAX_FEW = 16  # queries a row that the few-queries form takes


@dataclass(frozen=True)
class TuningConfig:
    """`split_cost_pages`: how much larger parts may be if rows then need no merging. `combine_blocks`: per SM."""

    split_cost_pages: int
    combine_blocks: int = 16


# By queries a row, for the largest number that is not above it; tuned on an H200 with bench/kernels.py --tune.
TUNED = {1: TuningConfig(split_cost_pages=2), MAX_FEW + 1: TuningConfig(split_cost_pages=4)}


def tuning(queries: int) -> TuningConfig:
    """The configuration for `queries` = Q * H queries a row."""
    return TUNED[max(least for least in TUNED if least <= queries)]


def plan(
    tables: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    *,
    queries: int,
    num_sms: int = NUM_SMS,
    config: TuningConfig | None = None,
) -> DecodePlan:
    """The work of each part of the grid, for entries (see DecodeRows) with `queries` = Q * H queries each.

    A part has a block of the grid for each 64 queries; there are as many parts as fill `num_sms`.
    """
    config = config or tuning(queries)
    parts = max(num_sms // _blocks(queries), 1)
    return split_work(tables, rows, lengths, parts=parts, split_cost_pages=config.split_cost_pages)


@partial(jax.jit, static_argnames=("scale", "num_sms", "config"))
def mla_decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    decode: DecodeRows,
    *,
    scale: float,
    num_sms: int = NUM_SMS,
    config: TuningConfig | None = None,
) -> jax.Array:
    """See reference.mla_decode. `decode.plan` comes from `plan`, with the same num_sms and config.

    Other shapes than DeepSeek's (rank 512, rope 64, pages of 64 tokens) and other types than bf16 run the reference.
    """
    if not _supported(q_latent, q_rope, pool):
        count("reference_op.mla_decode")
        warn_once(
            f"MLA decode has no Hopper kernel for {q_latent.dtype}, rank {q_latent.shape[-1]}, rope {q_rope.shape[-1]} "
            f"and pages of {pool.shape[2]} tokens: its plain JAX reference runs, which gives the same results more "
            "slowly."
        )
        return reference.mla_decode(q_latent, q_rope, pool, layer, tables, decode, scale=scale)
    batch, tokens, heads, rank = q_latent.shape
    queries = tokens * heads
    config = config or tuning(queries)
    padding = (0, 0), (0, -queries % _multiple(queries)), (0, 0)
    latent, rope = (jnp.pad(q.reshape(batch, queries, -1), padding) for q in (q_latent, q_rope))
    attend = attend_few if queries <= MAX_FEW else attend_many
    results = attend(latent, rope, pool, layer.reshape(1), tables, decode.plan, tokens=tokens, heads=heads, scale=scale)
    unroll = min(max(2 * len(decode.plan.parts) // batch, 2), 8)  # about the splits of a row when all are alike
    blocks = num_sms * config.combine_blocks
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
