"""The Hopper kernel of MLA decode, simulated on CPUs with race detection, against float64 attention row by row."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.pallas_kernels.mla_decode import DecodeRows
from dsjax.pallas_kernels.mla_decode.hopper import mla_decode, plan
from dsjax.published import published
from tests.pallas_kernels.interpreting import interpreted, late
from tests.pallas_kernels.latents import Cache, attend_latents, random_cache

RANK, ROPE = 512, 64
SCALE = 0.08
TOLERANCE = 5e-3  # relative, by Frobenius norm: weights and results are rounded to bf16
RAGGED = [1, 63, 64, 0, 65, 127, 128, 129, 300]
FEW_SMS, MANY_SMS = 3, 12


def random_queries(rng: np.random.Generator, entries: int, tokens: int, heads: int) -> np.ndarray:
    return rng.normal(size=(entries, tokens, heads, RANK + ROPE)).astype(jnp.bfloat16)


def bf16_cache(rng: np.random.Generator, lengths: Sequence[int]) -> Cache:
    """NaN in pages that belong to nobody and behind the end of each row."""
    cache = random_cache(rng, list(lengths), width=RANK + ROPE)
    return cache._replace(pool=cache.pool.astype(jnp.bfloat16))


def decode(
    q: np.ndarray,
    cache: Cache,
    lengths: Sequence[int],
    rows: Sequence[int],
    num_sms: int,
    scale: float = SCALE,
    **settings,
) -> np.ndarray:
    """Layer 1 of the cache, in float64. `settings`: of the plan."""
    tables, of_rows = jnp.asarray(cache.tables), jnp.asarray(lengths, jnp.int32)
    entries = jnp.asarray(rows, jnp.int32)
    made = plan(tables, entries, of_rows, queries=q.shape[1] * q.shape[2], num_sms=num_sms, **settings)
    decode_rows = DecodeRows(entries, of_rows, made)
    latent, rope = jnp.split(jnp.asarray(q), [RANK], axis=-1)
    with interpreted():
        out = mla_decode(latent, rope, jnp.asarray(cache.pool), jnp.int32(1), tables, decode_rows, scale=scale)
        return np.asarray(jax.block_until_ready(out), np.float64)


def assert_attends(
    out: np.ndarray, q: np.ndarray, cache: Cache, lengths: Sequence[int], rows: Sequence[int], scale: float = SCALE
) -> None:
    """Each query token sees its row up to its own place, and a token before the first key sees nothing."""
    for entry, row in enumerate(rows):
        latents, tokens = cache.row(row, layer=1)[: lengths[entry]], q.shape[1]
        for token in range(tokens):
            seen = lengths[entry] - tokens + 1 + token
            if seen <= 0:
                assert not out[entry, token].any()
                continue
            wanted = attend_latents(q[entry, token], latents[:seen], RANK, scale)
            error = np.linalg.norm(out[entry, token] - wanted) / np.linalg.norm(wanted)
            assert error < TOLERANCE, f"entry {entry}, token {token}"


def check(lengths: Sequence[int], tokens: int, heads: int, num_sms: int) -> None:
    """Entries in another order than their rows."""
    rng = np.random.default_rng(len(lengths) + 100 * tokens + heads)
    cache = bf16_cache(rng, lengths)
    q = random_queries(rng, len(lengths), tokens, heads)
    rows = rng.permutation(len(lengths)).tolist()
    in_order = [lengths[row] for row in rows]
    assert_attends(decode(q, cache, in_order, rows, num_sms), q, cache, in_order, rows)


@pytest.mark.parametrize("num_sms", [FEW_SMS, MANY_SMS])
def test_ragged_rows_of_few_heads(num_sms: int):
    """Few SMs walk several rows each; of many, several share a row and some have nothing to do."""
    check(RAGGED, tokens=1, heads=16, num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [FEW_SMS, pytest.param(MANY_SMS, marks=pytest.mark.kernels)])
def test_ragged_rows_of_many_heads(num_sms: int):
    check(RAGGED, tokens=1, heads=64, num_sms=num_sms)


@pytest.mark.parametrize(("tokens", "heads"), [(4, 2), (2, 16), (1, 128)])
def test_heads_and_query_tokens(tokens: int, heads: int):
    check([130, 2, 65], tokens, heads, num_sms=4)


@pytest.mark.parametrize(
    "warpgroup", [pytest.param(0, marks=pytest.mark.kernels), 1, pytest.param(2, marks=pytest.mark.kernels)]
)
def test_a_warpgroup_may_be_late(warpgroup: int):
    """Odd and even numbers of pages, several rows in a part."""
    with late(warpgroup):
        check([130, 64], tokens=1, heads=64, num_sms=1)


@pytest.mark.kernels
@pytest.mark.parametrize("warpgroup", [0, 1])
def test_a_warpgroup_of_few_heads_may_be_late(warpgroup: int):
    with late(warpgroup):
        check([130, 64], tokens=1, heads=16, num_sms=1)


@pytest.mark.parametrize("scale", [published("v3").attention.softmax_scale, 192**-0.5])
def test_tokens_that_see_no_key_of_a_part(scale: float):
    """Row 0 is shorter than its tokens; of row 1, only the last token sees the key in the second part."""
    lengths, rows = [1, 65], range(2)
    rng = np.random.default_rng(3)
    cache = bf16_cache(rng, lengths)
    q = random_queries(rng, 2, 2, 16)
    out = decode(q, cache, lengths, rows, 3, scale, split_cost_pages=0)
    assert_attends(out, q, cache, lengths, rows, scale)


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32, 64, 128])
def test_all_heads_and_query_tokens(tokens: int, heads: int):
    check([130, 2, 65, 0, 64], tokens, heads, num_sms=5)


@pytest.mark.kernels
@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
@pytest.mark.parametrize("lengths", [[1], [64], [300], [0, 0, 500, 0]])
def test_one_row(lengths: list[int], num_sms: int):
    check(lengths, tokens=1, heads=16, num_sms=num_sms)


@pytest.mark.parametrize("heads", [16, pytest.param(64, marks=pytest.mark.kernels)])
def test_pads_change_nothing(heads: int):
    """Entries without a query hold numbers, then NaN: the others' bits stay the same. At last there are only such."""
    rng = np.random.default_rng(0)
    lengths = [0, 70, 0, 5]
    cache = bf16_cache(rng, lengths)
    q = random_queries(rng, 4, 1, heads)
    beside_numbers = decode(q, cache, lengths, range(4), FEW_SMS)
    q[[0, 2]] = np.nan
    beside_nan = decode(q, cache, lengths, range(4), FEW_SMS)
    assert_attends(beside_nan, q, cache, lengths, range(4))
    np.testing.assert_array_equal(beside_nan, beside_numbers)
    assert not decode(q, cache, [0] * 4, range(4), FEW_SMS).any()
