"""The experts on Hopper on a real GPU: shapes of published models on random inputs against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.pallas_kernels.experts.hopper import experts
from dsjax.pallas_kernels.experts.shapes import SHAPES
from dsjax.telemetry import counters
from tests.pallas_kernels.test_experts import expected

pytestmark = pytest.mark.gpu
TOLERANCE = 5e-3  # relative, by Frobenius norm: GEMMs, SwiGLU and each expert's output are rounded to bf16


@pytest.mark.parametrize(
    ("name", "tokens"), [("v2_lite_ep1", 3), ("v2_lite_ep1", 64), ("v2_lite_ep1", 1000), ("v3_ep8", 64)]
)
def test_against_float64(name: str, tokens: int):
    """Few pairs, which are gathered, tiles of 64 rows and of 128; the last expert is NaN, and chosen by nobody.

    Token 1 is a pad: it has no experts, and NaN.
    """
    shape = SHAPES[name]
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, shape.hidden)).astype(jnp.bfloat16)
    ids = np.stack([rng.permutation(shape.experts - 1)[: shape.chosen] for _ in range(tokens)])
    ids[1], ids[2, 0] = -1, -1
    weights = rng.uniform(0.1, 1, size=ids.shape)
    gate_up, down = (
        jax.random.normal(jax.random.key(i), size, jnp.bfloat16).at[-1].set(jnp.nan) * size[-1] ** -0.5
        for i, size in enumerate(
            [(shape.experts, 2, shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)]
        )
    )
    wanted = expected(x.astype(np.float64), gate_up, down, ids, weights)
    x[1], weights[ids < 0] = np.nan, np.nan
    references = counters["reference_op.experts"]
    y = np.asarray(experts(x, gate_up, down, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)))
    assert counters["reference_op.experts"] == references
    assert not y[1].any()
    assert np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < TOLERANCE
