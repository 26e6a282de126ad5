"""Routed experts on Hopper, in bf16: pairs in the order of their experts, found by counting, then two grouped GEMMs.

The grouped GEMM is JAX's sample kernel. It computes a tile of rows for every expert, chosen or not, and so reads nearly
all weights: for DeepSeek-V2-Lite (64 experts of 2048 x 1408) about 0.3 ms a layer up to 256 tokens and 1.3 ms for 4096.
Where few experts can be chosen at all, only those are read, without a kernel: about 0.1 ms for one token.
"""

from functools import partial

import jax
import jax.numpy as jnp

from dsjax.activation import swiglu
from dsjax.pallas_kernels.experts.reference import experts as reference
from dsjax.quantization import BlockScaled, Weight
from dsjax.telemetry import count, warn_once

BLOCK_N, BLOCK_K, STAGES = 128, 64, 4
SERVES = f"bf16 weights with hidden sizes that {BLOCK_N} divides and widths that {BLOCK_K} divides"
FEW = 2  # pairs are few where they are at most one FEWth of the experts
COUNTED = 128  # pairs that are compared with each other


@jax.jit
def experts(x: jax.Array, gate_up: Weight, down: Weight, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """As the reference, except that an expert's output is rounded to bf16 before it is weighted and added.

    A token's experts are added in the order in which they were chosen (k). Experts that the kernel does not serve (see
    SERVES) run the reference.
    """
    if isinstance(gate_up, BlockScaled) or isinstance(down, BlockScaled) or not _fits(x, gate_up, down):
        count("reference_op.experts")
        warn_once(
            f"The Hopper kernel for experts serves {SERVES}. Those of this model are others: their plain JAX "
            "reference runs, which gives the same results more slowly."
        )
        return reference(x, gate_up, down, ids, weights)
    compute = _gathered if ids.size * FEW <= gate_up.shape[0] else _grouped
    y = compute(x, gate_up, down, ids) * weights[..., None]
    return jnp.sum(jnp.where(ids[..., None] >= 0, y, 0), axis=1)


def _fits(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> bool:
    _, hidden, width = down.shape
    in_bf16 = x.dtype == gate_up.dtype == down.dtype == jnp.bfloat16
    return in_bf16 and hidden % BLOCK_N == 0 and width % BLOCK_K == 0


def _gathered(x: jax.Array, gate_up: jax.Array, down: jax.Array, ids: jax.Array) -> jax.Array:
    """Outputs [T, K, D] of all pairs, each from weights of its own; as sums, which XLA fuses with the gather."""
    ids = jnp.maximum(ids, 0)
    both = jnp.sum(gate_up[ids].astype(jnp.float32) * x[:, None, None, None], axis=-1).astype(x.dtype)
    inner = swiglu(both[:, :, 0], both[:, :, 1])
    return jnp.sum(down[ids].astype(jnp.float32) * inner[:, :, None], axis=-1).astype(x.dtype)


def _grouped(x: jax.Array, gate_up: jax.Array, down: jax.Array, ids: jax.Array) -> jax.Array:
    """Outputs [T, K, D] of all pairs. Pairs without an expert are in no group, and have any numbers at all."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # takes 2 s to import

    num_experts, _, width, hidden = gate_up.shape
    block_m = 64 if ids.size < 64 * num_experts else 128
    rows = -(-ids.size // block_m) * block_m
    places, counts = _places(ids.reshape(-1), num_experts)
    tokens = jnp.zeros(rows, jnp.int32).at[places].set(jnp.arange(ids.size) // ids.shape[1], mode="drop")
    multiply = partial(
        ragged_dot,
        group_sizes=counts,
        block_m=block_m,
        block_n=BLOCK_N,
        block_k=BLOCK_K,
        max_concurrent_steps=STAGES,
        grid_block_n=1,
        transpose_rhs=True,
    )
    both = multiply(x[tokens], gate_up.reshape(num_experts, 2 * width, hidden))
    return multiply(swiglu(both[:, :width], both[:, width:]), down)[places].reshape(*ids.shape, hidden)


def _places(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Place int32 [pairs] of each pair in the order of experts, and how many pairs each expert has, int32 [E].

    Pairs without an expert get places behind all rows.
    """
    stretches = jnp.pad(ids, (0, -ids.size % COUNTED), constant_values=-1).reshape(-1, COUNTED)
    counts = jnp.sum(stretches[..., None] == jnp.arange(num_experts), axis=1, dtype=jnp.int32)
    totals = jnp.sum(counts, axis=0)
    before = jnp.cumsum(totals) - totals + jnp.cumsum(counts, axis=0) - counts  # those of other experts and stretches
    alike = stretches[:, :, None] == stretches[:, None, :]
    earlier = jnp.sum(jnp.tril(alike, -1), axis=-1, dtype=jnp.int32)
    places = jnp.take_along_axis(before, jnp.maximum(stretches, 0), axis=1) + earlier
    return jnp.where(ids >= 0, places.reshape(-1)[: ids.size], jnp.iinfo(jnp.int32).max), totals
