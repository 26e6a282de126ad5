"""A random paged latent cache and float64 attention over it, shared by the attention tests."""

from typing import NamedTuple

import numpy as np

from dsjax.pallas_kernels.mla_decode.work import PAGE

RANK, ROPE, NOPE, VALUE = 32, 16, 24, 20


class Cache(NamedTuple):
    """pool [L, P, S, C + R] with NaN wherever no row has a token; tables [B, N]; lengths: tokens per row."""

    pool: np.ndarray
    tables: np.ndarray
    lengths: list[int]

    def row(self, row: int, layer: int) -> np.ndarray:
        """The latents of one row in order: float64 [length, C + R]."""
        pages = self.pool[layer, self.tables[row]].reshape(-1, self.pool.shape[-1])
        return pages[: self.lengths[row]].astype(np.float64)


def random_cache(rng: np.random.Generator, lengths: list[int], width: int = RANK + ROPE, layers: int = 2) -> Cache:
    per_row = max(-(-length // PAGE) for length in lengths) + 1
    pool = np.full((layers, len(lengths) * per_row, PAGE, width), np.nan, np.float32)
    tables = rng.permutation(pool.shape[1]).reshape(len(lengths), per_row).astype(np.int32)
    for row, length in enumerate(lengths):
        for position in range(length):
            page = tables[row, position // PAGE]
            pool[:, page, position % PAGE] = rng.normal(size=(layers, width))
    return Cache(pool, tables, lengths)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(scores [H, keys]) values [H, keys, V] in float64."""
    return np.einsum("hk,hkv->hv", softmax(scores), values)


def attend_latents(q: np.ndarray, latents: np.ndarray, rank: int, scale: float) -> np.ndarray:
    """Absorbed attention of one query token q [H, C + R] over latents [keys, C + R] in float64: [H, C]."""
    return softmax(q.astype(np.float64) @ latents.T * scale) @ latents[:, :rank]
