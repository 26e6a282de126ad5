"""The host's side of the paged cache: who holds which pages, and whose contents may be used again."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

Key = bytes  # stands for the tokens of a page and of all pages before it


def page_keys(tokens: Sequence[int], page_tokens: int, after: Key = b"") -> list[Key]:
    """A key for every full page of `tokens`, which follow the page with key `after`.

    Equal keys mean equal tokens from the beginning on (128-bit BLAKE2b over the key before and the page's tokens).
    """
    keys = []
    for begin in range(0, len(tokens) - page_tokens + 1, page_tokens):
        content = np.asarray(tokens[begin : begin + page_tokens], np.int32).tobytes()
        after = hashlib.blake2b(after + content, digest_size=16).digest()
        keys.append(after)
    return keys


class PagePool:
    """Page ids 0..num_pages-1 of one page kind. Each page is in one of three states:

    used: held by one or several requests. cached: held by nobody, but its contents are remembered under a key and may
    be shared again, until the page is needed (the least recently used goes first). free: neither.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.evicted = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything: all pages are free."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._holders: Counter[int] = Counter()  # used pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._keys: dict[int, Key] = {}  # of used and cached pages whose contents are remembered
        self._pages: dict[Key, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return len(self._holders)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self.free + self.cached

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The pages of the longest remembered prefix of `keys`."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def unused(self, pages: Sequence[int]) -> int:
        """How many of `pages` are held by nobody."""
        return sum(page in self._cached for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Hold `pages`, which `find` gave, once more."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` pages of undefined contents. The caller has checked `available`."""
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(pages)
        return pages

    def remember(self, page: int, key: Key) -> None:
        """The held `page` has the contents that `key` stands for. Does nothing if another page has them already."""
        if key not in self._pages:
            self._pages[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Hold `pages` once less. Of a request's pages, the last are evicted first: a prefix needs those before it."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self._keys:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Free all cached pages, and forget the contents of used ones."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._keys.clear()
        self._pages.clear()

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one state."""
        assert self.free + self.cached + self.used == self.num_pages, self._counts()
        assert len({*self._free, *self._cached, *self._holders}) == self.num_pages, self._counts()
        assert min(self._holders.values(), default=1) > 0, "a used page has no holder"
        assert {page: key for key, page in self._pages.items()} == self._keys, "keys and pages do not match"
        assert self._cached.keys() <= self._keys.keys(), "a cached page has no key"

    def _counts(self) -> str:
        return f"{self.free} free + {self.cached} cached + {self.used} used pages of {self.num_pages}"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        self.evicted += 1
        return page
