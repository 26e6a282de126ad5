"""MLA prefill against float64 attention token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.pallas_kernels.mla_prefill import IMPLEMENTATIONS, PrefillChunks
from dsjax.pallas_kernels.mla_prefill.shapes import SHAPES
from tests.pallas_kernels.latents import NOPE, RANK, ROPE, VALUE, attend, random_cache

SCALE = 0.17
HEADS = 3
mla_prefill = IMPLEMENTATIONS["reference"]


def weights(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    w_uk, w_uv = rng.normal(size=(HEADS, NOPE, RANK)), rng.normal(size=(HEADS, VALUE, RANK))
    return (w_uk / RANK**0.5).astype(np.float32), (w_uv / RANK**0.5).astype(np.float32)


def expected(q: np.ndarray, latents: np.ndarray, w_uk: np.ndarray, w_uv: np.ndarray) -> np.ndarray:
    """One query token [H, N + R] over all `latents` [keys, C + R]."""
    keys, values = (np.einsum("kc,hnc->hkn", latents[:, :RANK], w.astype(np.float64)) for w in (w_uk, w_uv))
    scores = np.einsum("hn,hkn->hk", q[:, :NOPE], keys) + np.einsum("hr,kr->hk", q[:, NOPE:], latents[:, RANK:])
    return attend(scores * SCALE, values)


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        pytest.param(16, [(0, 0, 16, 0)], id="cold, fills the bucket"),
        pytest.param(16, [(0, 0, 2, 0), (1, 2, 9, 0)], id="two rows and padding"),
        pytest.param(16, [(1, 3, 5, 60), (0, 8, 3, 127)], id="behind decode tokens, over page and block edges"),
        pytest.param(300, [(0, 0, 129, 7), (1, 129, 2, 200), (2, 131, 150, 0)], id="tiles of 128, ragged"),
        pytest.param(150, [(0, 10, 128, 0)], id="exactly one tile"),
        pytest.param(8, [], id="no chunk at all"),
    ],
)
def test_against_float64(tokens: int, chunks: list[tuple[int, int, int, int]]):
    """chunks: (row, first token, length, cached tokens before it)."""
    rng = np.random.default_rng(tokens)
    ends = {row: position + length for row, _, length, position in chunks}
    cache = random_cache(rng, [ends.get(row, 1) for row in range(3)])
    w_uk, w_uv = weights(rng)
    q = rng.normal(size=(tokens, HEADS, NOPE + ROPE)).astype(np.float32)
    table = np.zeros((3, 4), np.int32)
    table[: len(chunks)] = np.reshape(chunks, (-1, 4))
    args = (q, w_uk, w_uv, cache.pool, np.int32(1), cache.tables)
    out = np.asarray(mla_prefill(*map(jnp.asarray, args), PrefillChunks(*jnp.asarray(table.T)), scale=SCALE))
    in_a_chunk = np.zeros(tokens, bool)
    for row, start, length, position in chunks:
        in_a_chunk[start : start + length] = True
        for i in range(length):
            latents = cache.row(row, layer=1)[: position + i + 1]
            np.testing.assert_allclose(out[start + i], expected(q[start + i], latents, w_uk, w_uv), atol=2e-6)
    assert not out[~in_a_chunk].any()


def test_the_shape_of_v2_lite_on_eight_devices():
    """One chunk of 5 tokens over 60 cached ones, at the real widths."""
    shape = SHAPES["v2_lite_tp8"]
    rng = np.random.default_rng(5)
    cache = random_cache(rng, [65], width=shape.rank + shape.rope)
    w_uk = (rng.normal(size=(shape.heads, shape.nope, shape.rank)) / shape.rank**0.5).astype(np.float32)
    w_uv = (rng.normal(size=(shape.heads, shape.value, shape.rank)) / shape.rank**0.5).astype(np.float32)
    q = rng.normal(size=(8, shape.heads, shape.nope + shape.rope)).astype(np.float32)
    scale = (shape.nope + shape.rope) ** -0.5
    chunks = PrefillChunks(*(jnp.array([value]) for value in (0, 0, 5, 60)))
    args = map(jnp.asarray, (q, w_uk, w_uv, cache.pool, np.int32(0), cache.tables))
    out = np.asarray(mla_prefill(*args, chunks, scale=scale))
    for token in range(5):
        latents = cache.row(0, 0)[: 61 + token]
        compressed, rope = latents[:, : shape.rank], latents[:, shape.rank :]
        keys, values = (np.einsum("kc,hnc->hkn", compressed, w.astype(np.float64)) for w in (w_uk, w_uv))
        scores = np.einsum("hn,hkn->hk", q[token, :, : shape.nope], keys)
        scores += np.einsum("hr,kr->hk", q[token, :, shape.nope :], rope)
        np.testing.assert_allclose(out[token], attend(scores * scale, values), atol=5e-6)
