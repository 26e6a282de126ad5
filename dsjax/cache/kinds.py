"""Page kinds: what the cache stores per token, and the device pools that hold it.

A page kind is one page table per row. Its pools share that table: a page id means the same tokens in each of them.
A model declares its kinds; pools, page tables and the allocator are made from them.
"""

from dataclasses import dataclass
from typing import Any

PAGE_TOKENS = 64


@dataclass(frozen=True)
class PoolSpec:
    """One device array [layers, pages, PAGE_TOKENS, width]: a cached vector of `width` per token and layer."""

    name: str
    layers: int
    width: int
    dtype: Any

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layers * PAGE_TOKENS * self.width * self.dtype.itemsize

    def shape(self, num_pages: int) -> tuple[int, int, int, int]:
        return (self.layers, num_pages, PAGE_TOKENS, self.width)


@dataclass(frozen=True)
class PageKind:
    """Pages of `page_tokens` tokens each, with the pools that they index."""

    name: str
    pools: tuple[PoolSpec, ...]
    page_tokens: int = PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        return sum(pool.page_bytes for pool in self.pools)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one row."""
        return -(-tokens // self.page_tokens)
