"""MLA decode in plain JAX against float64 attention row by row."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.pallas_kernels.mla_decode import IMPLEMENTATIONS, DecodeRows
from dsjax.pallas_kernels.mla_decode.shapes import SHAPES
from tests.pallas_kernels.latents import RANK, ROPE, Cache, attend_latents, random_cache

SCALE = 0.31
Decode = Callable[..., np.ndarray]


@pytest.fixture(params=["reference", "deterministic"])
def decode(request: pytest.FixtureRequest) -> Decode:
    """decode(q [B, Q, H, C + R], cache, layer, lengths, rows, rank, scale) -> [B, Q, H, C]."""
    plan, attend_rows = IMPLEMENTATIONS[request.param]

    def run(q, cache: Cache, layer: int, lengths: Sequence[int], rows: Sequence[int], rank=RANK, scale=SCALE):
        entries, of_entries = jnp.asarray(rows, jnp.int32), jnp.asarray(lengths, jnp.int32)
        pool, tables = jnp.asarray(cache.pool, q.dtype), jnp.asarray(cache.tables)
        made = plan(tables, entries, of_entries, queries=q.shape[1] * q.shape[2], num_sms=0)
        latent, rope = jnp.split(jnp.asarray(q), [rank], axis=-1)
        decode_rows = DecodeRows(entries, of_entries, made)
        return np.asarray(attend_rows(latent, rope, pool, jnp.int32(layer), tables, decode_rows, scale=scale))

    return run


def random_queries(rng: np.random.Generator, entries: int, tokens: int, heads: int = 2) -> np.ndarray:
    return rng.normal(size=(entries, tokens, heads, RANK + ROPE)).astype(np.float32)


def assert_attends(out: np.ndarray, q: np.ndarray, cache: Cache, layer: int, rows: Sequence[int]) -> None:
    """Each token of each entry sees its row up to its own place: the last one all of it, those before one less each."""
    for entry, row in enumerate(rows):
        latents, tokens = cache.row(row, layer), q.shape[1]
        for token in range(tokens):
            seen = len(latents) - tokens + 1 + token
            if seen <= 0:
                assert not out[entry, token].any()
            else:
                np.testing.assert_allclose(
                    out[entry, token], attend_latents(q[entry, token], latents[:seen], RANK, SCALE), atol=2e-6
                )


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("layer", [0, 1])
def test_lengths_below_the_tokens_and_at_page_and_block_edges(decode: Decode, layer: int, tokens: int):
    """Pages that belong to nobody, and what stands behind a row's end in its last page, are NaN."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 4, 63, 64, 65, 66, 127, 128, 129, 130, 300]
    cache = random_cache(rng, lengths)
    q = random_queries(rng, len(lengths), tokens)
    rows = range(len(lengths))
    assert_attends(decode(q, cache, layer, lengths, rows), q, cache, layer, rows)


def test_entries_in_another_order_than_their_rows(decode: Decode):
    rng = np.random.default_rng(1)
    cache = random_cache(rng, [70, 9, 131, 64])
    q, rows = random_queries(rng, 3, 2), [2, 0, 3]
    assert_attends(decode(q, cache, 0, [131, 70, 64], rows), q, cache, 0, rows)


def test_several_query_tokens_of_one_row_see_their_own_past(decode: Decode):
    """As tokens of one entry, and as entries of their own."""
    rng = np.random.default_rng(2)
    cache = random_cache(rng, [70])
    q = random_queries(rng, 1, 4)
    together = decode(q, cache, 0, [70], [0])
    apart = decode(q.swapaxes(0, 1), cache, 0, [67, 68, 69, 70], [0] * 4)
    assert_attends(together, q, cache, 0, [0])
    np.testing.assert_allclose(apart, together.swapaxes(0, 1), atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 3])
def test_pads_are_zero_and_change_nothing(decode: Decode, tokens: int):
    """Entries without a query hold NaN, and stand beside long rows."""
    rng = np.random.default_rng(3)
    cache = random_cache(rng, [100, 5])
    q = random_queries(rng, 2, tokens)
    alone = decode(q, cache, 0, [0, 5], [0, 1])
    beside_long = decode(q, cache, 0, [100, 5], [0, 1])
    q[0] = np.nan
    beside_nan = decode(q, cache, 0, [0, 5], [0, 1])
    assert not beside_nan[0].any()
    np.testing.assert_array_equal(alone[1], beside_nan[1])
    np.testing.assert_array_equal(alone[1], beside_long[1])


def test_no_query_at_all(decode: Decode):
    rng = np.random.default_rng(4)
    cache = random_cache(rng, [5, 6])
    assert not decode(random_queries(rng, 2, 2), cache, 0, [0, 0], [0, 0]).any()


def test_the_shape_of_v3_on_eight_devices(decode: Decode):
    """bf16 inputs, so that 16 heads of 576 channels are compared at the format's own precision."""
    shape = SHAPES["v3_tp8"]
    rng = np.random.default_rng(5)
    lengths = [70, 1, 64]
    cache = random_cache(rng, lengths, width=shape.rank + shape.rope)
    q = rng.normal(size=(3, 1, shape.heads, shape.rank + shape.rope)).astype(jnp.bfloat16)
    scale = (128 + shape.rope) ** -0.5 / 4
    out = decode(q, cache, 0, lengths, range(3), shape.rank, scale)
    rounded = cache._replace(pool=cache.pool.astype(jnp.bfloat16).astype(np.float64))
    for row in range(3):
        wanted = attend_latents(q[row, 0], rounded.row(row, 0), shape.rank, scale)
        error = np.linalg.norm(out[row, 0].astype(np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < 5e-3
