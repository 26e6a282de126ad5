"""How many pages the cache gets, from memory to page counts."""

import jax.numpy as jnp
import pytest

from dsjax.cache.kinds import PAGE_TOKENS, PageKind, PoolSpec
from dsjax.cache.sizing import _rounded, cache_pages
from dsjax.errors import OptionError

KIND = PageKind("latent", (PoolSpec("latent", layers=3, width=576, dtype=jnp.dtype("bfloat16")),))
PAGE_BYTES = 3 * PAGE_TOKENS * 576 * 2


def pages(kv_tokens: int | None = None, available: int = 10**9, rows: int = 4, length: int = 100) -> int:
    return cache_pages([KIND], rows, length, kv_tokens, available)["latent"]


def test_bytes_of_a_page():
    assert KIND.page_bytes == PAGE_BYTES


def test_every_row_gets_whole_pages():
    """100 tokens need two pages in each row, not 400 tokens in all."""
    assert pages() == 4 * 2


def test_as_asked_for():
    assert pages(kv_tokens=1000) == 16
    with pytest.raises(OptionError, match=r"kv_tokens=10000000 needs 34.6 GB on each device, but only 1.0 GB"):
        pages(kv_tokens=10**7)


def test_what_memory_allows():
    assert pages(available=5 * PAGE_BYTES) == 5
    assert pages(available=5 * PAGE_BYTES - 1) == 4
    with pytest.raises(OptionError, match="too little for one page"):
        pages(available=PAGE_BYTES - 1)


def test_kinds_share_memory_in_proportion():
    other = PageKind("other", (PoolSpec("other", layers=1, width=576, dtype=jnp.dtype("bfloat16")),), page_tokens=32)
    total = 8 * PAGE_BYTES + 16 * PAGE_BYTES // 3
    counts = cache_pages([KIND, other], 4, 100, None, total // 2 + 1)
    assert counts == {"latent": 4, "other": 8}


@pytest.mark.parametrize("count", [1, 127, 128, 12345, 10**6])
def test_rounding_keeps_almost_all(count: int):
    """Free memory that differs a little gives the same number, so the same executables."""
    rounded = _rounded(count)
    assert count * 127 / 128 - 1 < rounded <= count
    assert _rounded(rounded) == rounded
