"""Routed experts against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.pallas_kernels.experts import IMPLEMENTATIONS, hopper
from dsjax.pallas_kernels.experts.shapes import SHAPES
from dsjax.quantization import BlockScaled, dense
from dsjax.telemetry import counters
from tests.pallas_kernels.interpreting import interpreted

EXPERTS, HIDDEN, WIDTH = 6, 24, 16
experts = IMPLEMENTATIONS["reference"]


def random_case(rng: np.random.Generator, tokens: int, chosen: int):
    x = rng.normal(size=(tokens, HIDDEN))
    gate_up = rng.normal(size=(EXPERTS, 2, WIDTH, HIDDEN)) / HIDDEN**0.5
    down = rng.normal(size=(EXPERTS, HIDDEN, WIDTH)) / WIDTH**0.5
    ids = np.stack([rng.permutation(EXPERTS)[:chosen] for _ in range(tokens)])
    return x, gate_up, down, ids, rng.uniform(0.1, 1, size=(tokens, chosen))


def block_scaled(rng: np.random.Generator, shape: tuple[int, ...]) -> BlockScaled:
    """A random weight of which every block of 32 x 16 has another scale."""
    scales = (*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 16))
    values = jnp.asarray(rng.normal(size=shape) * 60, jnp.float8_e4m3fn)
    return BlockScaled(values, jnp.asarray(rng.uniform(0.2, 1.8, size=scales) / 400, jnp.float32), (32, 16))


def run(x, gate_up, down, ids, weights) -> np.ndarray:
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, gate_up, down)]
    return np.asarray(experts(*arrays, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)))


def expected(x, gate_up, down, ids, weights) -> np.ndarray:
    """The sums in float64, expert by expert; the experts themselves may have any type."""
    y = np.zeros(x.shape)
    for expert in np.unique(ids[ids >= 0]):
        tokens, places = np.nonzero(ids == expert)
        gate, up = np.asarray(gate_up[expert], np.float64) @ x[tokens].T
        out = np.asarray(down[expert], np.float64) @ (gate / (1 + np.exp(-gate)) * up)
        np.add.at(y, tokens, weights[tokens, places, None] * out.T)
    return y


@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (1, 3), (5, 2), (64, 3), (400, 6)])
def test_against_float64(tokens: int, chosen: int):
    """From one pair to tiles of the largest size, several per expert."""
    case = random_case(np.random.default_rng(tokens), tokens, chosen)
    np.testing.assert_allclose(run(*case), expected(*case), atol=5e-6)


def test_the_shape_of_v2_lite_on_eight_devices():
    shape = SHAPES["v2_lite_ep8"]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, shape.hidden))
    gate_up = rng.normal(size=(shape.experts, 2, shape.width, shape.hidden)).astype(np.float32) / shape.hidden**0.5
    down = rng.normal(size=(shape.experts, shape.hidden, shape.width)).astype(np.float32) / shape.width**0.5
    ids = np.stack([rng.permutation(shape.experts)[: shape.chosen] for _ in range(3)])
    weights = rng.uniform(0.1, 1, size=ids.shape)
    wanted = expected(x, gate_up, down, ids, weights)
    error = np.linalg.norm(run(x, gate_up, down, ids, weights) - wanted) / np.linalg.norm(wanted)
    assert error < 1e-6


def test_all_tokens_on_one_expert():
    x, gate_up, down, ids, weights = random_case(np.random.default_rng(7), 50, 1)
    ids[:] = 4
    np.testing.assert_allclose(run(x, gate_up, down, ids, weights), expected(x, gate_up, down, ids, weights), atol=5e-6)


def test_pairs_without_an_expert_do_nothing_whatever_they_hold():
    x, gate_up, down, ids, weights = random_case(np.random.default_rng(8), 12, 2)
    ids[3], ids[5, 0], ids[11] = -1, -1, -1
    clean = run(x, gate_up, down, ids, weights)
    np.testing.assert_allclose(clean, expected(x, gate_up, down, ids, weights), atol=5e-6)
    assert not clean[[3, 11]].any()
    x[[3, 11]], weights[3] = np.nan, np.nan
    np.testing.assert_array_equal(run(x, gate_up, down, ids, weights), clean)


def test_experts_that_nobody_chose_are_not_read():
    x, gate_up, down, ids, weights = random_case(np.random.default_rng(9), 8, 2)
    ids = ids % 3
    clean = run(x, gate_up, down, ids, weights)
    gate_up[3:], down[3:] = np.nan, np.nan
    np.testing.assert_array_equal(run(x, gate_up, down, ids, weights), clean)


def test_no_pair_at_all():
    x, gate_up, down, ids, weights = random_case(np.random.default_rng(10), 4, 2)
    assert not run(x, gate_up, down, np.full_like(ids, -1), weights).any()


def test_block_scaled_experts():
    rng = np.random.default_rng(11)
    x, _, _, ids, weights = random_case(rng, 20, 2)
    gate_up, down = block_scaled(rng, (EXPERTS, 2, 80, HIDDEN)), block_scaled(rng, (EXPERTS, HIDDEN, 80))
    y = experts(jnp.asarray(x, jnp.float32), gate_up, down, jnp.asarray(ids), jnp.asarray(weights, jnp.float32))
    gate_up, down = (np.asarray(dense(weight, jnp.float32), np.float64) for weight in (gate_up, down))
    np.testing.assert_allclose(y, expected(x, gate_up, down, ids, weights), atol=5e-6)


def test_block_scaled_experts_are_multiplied_out_one_at_a_time():
    """Scratch memory does not grow with the number of experts as an array of all of them would."""

    def scratch_bytes(num_experts: int) -> int:
        shapes = (num_experts, 2, 192, 256), (num_experts, 256, 192)
        weights = [BlockScaled.abstract(shape, (128, 128)) for shape in shapes]
        x, ids = jax.ShapeDtypeStruct((20, 256), jnp.float32), jax.ShapeDtypeStruct((20, 2), jnp.int32)
        arguments = (x, *weights, ids, jax.ShapeDtypeStruct((20, 2), jnp.float32))
        analysis = jax.jit(experts).lower(*arguments).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert scratch_bytes(32) - scratch_bytes(16) < 192 * 256


@pytest.mark.parametrize(("tokens", "chosen"), [(3, 1), (40, 2), (70, 6)])
def test_hopper_against_float64(tokens: int, chosen: int):
    """Few pairs, small tiles, large tiles; with NaN in pads, and in weights of an expert that nobody chose."""
    rng = np.random.default_rng(tokens)
    x, gate_up, down = (
        (rng.normal(size=shape) / scale).astype(jnp.bfloat16)
        for shape, scale in (((tokens, 128), 1), ((7, 2, 64, 128), 11), ((7, 128, 64), 8))
    )
    ids = np.stack([rng.permutation(6)[:chosen] for _ in range(tokens)])
    ids[1], ids[2, 0] = -1, -1
    weights = rng.uniform(0.1, 1, size=ids.shape)
    wanted = expected(x.astype(np.float64), gate_up, down, ids, weights)
    x[1], gate_up[6], down[6], weights[ids < 0] = (np.nan,) * 4
    arrays = [jnp.asarray(array) for array in (x, gate_up, down)]
    with interpreted():
        y = hopper.experts(*arrays, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32))
    assert not y[1].any()
    assert np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < 5e-3


@pytest.mark.parametrize(("pairs", "num_experts"), [(1, 4), (128, 6), (1000, 64)])
def test_hopper_counts_pairs_into_the_order_of_a_stable_sort(pairs: int, num_experts: int):
    ids = np.random.default_rng(pairs).integers(-1, num_experts, pairs)
    places, counts = hopper._places(jnp.asarray(ids), num_experts)
    order = [pair for pair in np.argsort(ids, stable=True) if ids[pair] >= 0]
    np.testing.assert_array_equal(places[np.array(order)], np.arange(len(order)))
    assert (places[ids < 0] >= pairs).all()
    np.testing.assert_array_equal(counts, np.bincount(ids[ids >= 0], minlength=num_experts))


def test_hopper_says_when_it_runs_the_reference():
    """FP8 weights, one array in float32 (x, gate_up, down), and a width that its tiles do not divide."""

    def said(x_type, gate_up, down) -> int:
        x, ids, weights = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (((9, 128), x_type), ((9, 2), jnp.int32), ((9, 2), jnp.float32))
        )
        before = counters["reference_op.experts"]
        jax.eval_shape(hopper.experts, x, gate_up, down, ids, weights)
        return counters["reference_op.experts"] - before

    def plain(gate_up_type, down_type, width: int = 128):
        gate_up = jax.ShapeDtypeStruct((4, 2, width, 128), gate_up_type)
        return gate_up, jax.ShapeDtypeStruct((4, 128, width), down_type)

    half, full = jnp.bfloat16, jnp.float32
    assert said(half, *plain(half, half)) == 0
    assert said(full, *plain(half, half)) == 1
    assert said(half, *plain(full, half)) == 1
    assert said(half, *plain(half, full)) == 1
    assert said(half, *plain(half, half, width=24)) == 1
    assert said(half, *(BlockScaled.abstract(shape, (128, 128)) for shape in ((4, 2, 128, 128), (4, 128, 128)))) == 1
