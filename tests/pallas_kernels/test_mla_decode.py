"""MLA decode against float64 attention row by row."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.pallas_kernels.mla_decode import IMPLEMENTATIONS
from dsjax.pallas_kernels.mla_decode.shapes import SHAPES
from tests.pallas_kernels.latents import RANK, ROPE, attend, random_cache

SCALE = 0.31


@pytest.fixture(params=list(IMPLEMENTATIONS))
def mla_decode(request: pytest.FixtureRequest) -> Callable:
    return IMPLEMENTATIONS[request.param]


def decode(mla_decode: Callable, q: np.ndarray, cache, layer: int, lengths: list[int], rows: list[int]) -> np.ndarray:
    tables = jnp.asarray(cache.tables[rows])
    args = jnp.asarray(q), jnp.asarray(cache.pool), jnp.int32(layer), tables, jnp.asarray(lengths)
    return np.asarray(mla_decode(*args, rank=RANK, scale=SCALE))


def expected(q: np.ndarray, latents: np.ndarray) -> np.ndarray:
    keys = np.broadcast_to(latents, (q.shape[0], *latents.shape))
    return attend(np.einsum("hw,kw->hk", q.astype(np.float64), latents) * SCALE, keys[..., :RANK])


@pytest.mark.parametrize("layer", [0, 1])
def test_ragged_lengths_at_page_and_block_edges(mla_decode: Callable, layer: int):
    rng = np.random.default_rng(0)
    lengths = [1, 63, 64, 65, 127, 128, 129, 300]
    cache = random_cache(rng, lengths)
    q = rng.normal(size=(len(lengths), 4, RANK + ROPE)).astype(np.float32)
    out = decode(mla_decode, q, cache, layer, lengths, list(range(len(lengths))))
    for row in range(len(lengths)):
        np.testing.assert_allclose(out[row], expected(q[row], cache.row(row, layer)), atol=2e-6)


def test_several_query_tokens_of_one_row_see_their_own_past(mla_decode: Callable):
    rng = np.random.default_rng(1)
    cache = random_cache(rng, [70])
    q = rng.normal(size=(4, 2, RANK + ROPE)).astype(np.float32)
    out = decode(mla_decode, q, cache, 0, [67, 68, 69, 70], [0] * 4)
    for token in range(4):
        np.testing.assert_allclose(out[token], expected(q[token], cache.row(0, 0)[: 67 + token]), atol=2e-6)


def test_empty_rows_are_zero_and_change_nothing(mla_decode: Callable):
    rng = np.random.default_rng(2)
    cache = random_cache(rng, [100, 5])
    q = rng.normal(size=(2, 2, RANK + ROPE)).astype(np.float32)
    alone = decode(mla_decode, q, cache, 0, [0, 5], [0, 1])
    q[0] = np.nan
    beside_nan = decode(mla_decode, q, cache, 0, [0, 5], [0, 1])
    beside_long = decode(mla_decode, np.nan_to_num(q), cache, 0, [100, 5], [0, 1])
    assert not alone[0].any()
    np.testing.assert_array_equal(alone[1], beside_nan[1])
    np.testing.assert_array_equal(alone[1], beside_long[1])


def test_the_shape_of_v3_on_eight_devices(mla_decode: Callable):
    """bf16 inputs, so that 16 heads of 576 channels are compared at the format's own precision."""
    shape = SHAPES["v3_tp8"]
    rng = np.random.default_rng(3)
    lengths = [70, 1, 64]
    cache = random_cache(rng, lengths, width=shape.rank + shape.rope)
    q = rng.normal(size=(3, shape.heads, shape.rank + shape.rope)).astype(jnp.bfloat16)
    pool = jnp.asarray(cache.pool, jnp.bfloat16)
    scale = (128 + shape.rope) ** -0.5 / 4
    out = mla_decode(
        jnp.asarray(q),
        pool,
        jnp.int32(0),
        jnp.asarray(cache.tables),
        jnp.asarray(lengths),
        rank=shape.rank,
        scale=scale,
    )
    rounded = cache._replace(pool=np.asarray(pool, np.float64))
    for row in range(3):
        latents = rounded.row(row, 0)
        keys = np.broadcast_to(latents, (shape.heads, *latents.shape))
        wanted = attend(np.einsum("hw,kw->hk", q[row].astype(np.float64), latents) * scale, keys[..., : shape.rank])
        error = np.linalg.norm(np.asarray(out[row], np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < 5e-3
