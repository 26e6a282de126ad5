"""MLA decode on Hopper GPUs: splits the work on the device, then attends and merges in two kernels.

Up to 16 queries a row (tokens times local heads) run in few_queries.py, more in many_queries.py.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from dsjax.pallas_kernels.mla_decode import few_queries, reference
from dsjax.pallas_kernels.mla_decode.combine import combine
from dsjax.pallas_kernels.mla_decode.few_queries import attend_few
from dsjax.pallas_kernels.mla_decode.many_queries import BLOCK, attend_many
from dsjax.pallas_kernels.mla_decode.reference import DecodeRows
from dsjax.pallas_kernels.mla_decode.work import PAGE, DecodePlan, split_work
from dsjax.telemetry import count, warn_once

NUM_SMS = 132
MAX_FEW = 16  # queries a row that the few-queries form takes


@dataclass(frozen=True)
class TuningConfig:
    """`split_cost_pages`: how much larger parts may be if rows then need no merging. `chunk`: see attend_many.

    `pair`: blocks of a row that share its pages. `combine_blocks`: blocks per SM of the merging kernel.
    """

    split_cost_pages: int
    chunk: int = 256
    pair: int = 2
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
    padded = (jnp.pad(q.reshape(batch, queries, -1), padding) for q in (q_latent, q_rope))
    arguments = *padded, pool, layer.reshape(1), tables, decode.plan
    if queries <= MAX_FEW:
        results = attend_few(*arguments, tokens=tokens, heads=heads, scale=scale)
    else:
        pair = config.pair if _blocks(queries) % config.pair == 0 else 1
        results = attend_many(*arguments, tokens=tokens, heads=heads, scale=scale, chunk=config.chunk, pair=pair)
    unroll = min(max(2 * len(decode.plan.parts) // batch, 2), 8)  # about the splits of a row when all are alike
    out = combine(*results, decode.plan, blocks=num_sms * config.combine_blocks, unroll=unroll)
    return out[:, :queries].reshape(batch, tokens, heads, rank)


def _blocks(queries: int) -> int:
    return 1 if queries <= MAX_FEW else -(-queries // BLOCK)


def _multiple(queries: int) -> int:
    """What the number of queries is padded to a multiple of."""
    return 8 if queries <= MAX_FEW else BLOCK


def _supported(q_latent: jax.Array, q_rope: jax.Array, pool: jax.Array) -> bool:
    sizes = q_latent.shape[-1], q_rope.shape[-1], pool.shape[2]
    return sizes == (few_queries.RANK, few_queries.ROPE, PAGE) and q_latent.dtype == pool.dtype == jnp.bfloat16
