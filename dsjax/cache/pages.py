"""The host's side of the paged cache: which pages are free."""


class PagePool:
    """Hands out page ids 0..num_pages-1 of one page kind.

    Pages are reserved before they are taken: a request reserves its whole footprint when it is admitted, so growing
    can never fail. `free` + taken = num_pages at all times.
    """

    def __init__(self, num_pages: int):
        self.reserved = 0
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds, reserved ones included."""
        return len(self._free)

    @property
    def unreserved(self) -> int:
        """Pages that a new request may still reserve."""
        return len(self._free) - self.reserved

    def reserve(self, count: int) -> None:
        """Promise `count` pages to a request. The caller has checked `unreserved`."""
        assert count <= self.unreserved, f"reserving {count} of {self.unreserved} pages"
        self.reserved += count

    def take(self, count: int) -> list[int]:
        """Turn `count` reserved pages into page ids."""
        assert count <= self.reserved, f"taking {count} of {self.reserved} reserved pages"
        self.reserved -= count
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int], reserved: int = 0) -> None:
        """Give `pages` back, and the promise of `reserved` pages that were never taken."""
        self.reserved -= reserved
        self._free.extend(reversed(pages))
