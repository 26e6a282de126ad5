"""The page allocator: conservation and reservations, over random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.cache.pages import PagePool


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=40))
def test_pages_are_conserved(history: list[tuple[int, int, bool]]):
    """Requests reserve some pages, take part of them, and leave in any order; nothing is lost or given twice."""
    pool, held = PagePool(20), []
    for reserve, take, leaves in history:
        if reserve <= pool.unreserved:
            pool.reserve(reserve)
            take = min(take, reserve)
            held.append((pool.take(take), reserve - take))
        if leaves and held:
            pool.release(*held.pop(0))
        taken = [page for pages, _ in held for page in pages]
        assert len(set(taken)) == len(taken)
        assert pool.free + len(taken) == 20
        assert pool.reserved == sum(reserved for _, reserved in held)
    for entry in held:
        pool.release(*entry)
    assert (pool.free, pool.reserved, pool.unreserved) == (20, 0, 20)


def test_more_than_there_is_cannot_be_reserved():
    pool = PagePool(2)
    pool.reserve(2)
    with pytest.raises(AssertionError):
        pool.reserve(1)
