"""The page pool: every page is free, cached or used, whatever happens; keys; order of eviction."""

from hypothesis import given
from hypothesis import strategies as st

from dsjax.cache.pages import PagePool, page_keys


def test_keys_stand_for_all_tokens_from_the_beginning():
    tokens = list(range(200))
    keys = page_keys(tokens, 64)
    assert len(keys) == 3, "only full pages have keys"
    assert page_keys(tokens[:64], 64) == keys[:1]
    assert page_keys(tokens[128:], 64, after=keys[1]) == keys[2:]
    changed = [7, *tokens[1:]]
    assert not set(page_keys(changed, 64)) & set(keys), "another first token changes every key"
    assert page_keys([*tokens[:64], 0, *tokens[65:]], 64)[0] == keys[0]


PROMPTS = st.lists(st.sampled_from("ab"), max_size=4).map(tuple)  # pages named by their contents


@given(st.lists(st.tuples(PROMPTS, st.booleans()), max_size=60))
def test_pages_are_conserved_and_found_only_with_their_contents(history: list[tuple[tuple[str, ...], bool]]):
    """Requests of 0 to 4 pages come, share what is cached, and leave in any order, in a pool of 6 pages."""
    pool, contents = PagePool(6), {}
    held: list[list[int]] = []
    for prompt, leaves in history:
        keys = ["".join(prompt[: i + 1]).encode() for i in range(len(prompt))]
        shared = pool.find(keys)
        assert [contents[page] for page in shared] == keys[: len(shared)]
        if len(keys) - len(shared) + pool.unused(shared) <= pool.available:
            pool.share(shared)
            new = pool.take(len(keys) - len(shared))
            assert not set(new) & {page for pages in held for page in pages}, "a held page is given to nobody"
            contents |= dict(zip(new, keys[len(shared) :], strict=True))
            held.append(shared + new)
            for page, key in zip(held[-1], keys, strict=True):
                pool.remember(page, key)
        if leaves and held:
            pool.release(held.pop(0))
        pool.check()
        assert pool.used == len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    pool.check()
    assert (pool.used, pool.available) == (0, 6)
    pool.forget()
    assert (pool.free, pool.cached) == (6, 0)


def test_the_longest_unused_goes_first_and_ends_before_beginnings():
    pool = PagePool(4)
    for keys in ([b"a", b"ab"], [b"c", b"cd"]):
        pages = pool.take(2)
        for page, key in zip(pages, keys, strict=True):
            pool.remember(page, key)
        pool.release(pages)
    pool.take(1)
    assert [len(pool.find(keys)) for keys in ([b"a", b"ab"], [b"c", b"cd"])] == [1, 2], "the end of the older one"
    pool.share(pool.find([b"a"]))
    pool.release(pool.find([b"a"]))
    pool.take(1)
    assert [len(pool.find(keys)) for keys in ([b"a", b"ab"], [b"c", b"cd"])] == [1, 1], "use makes young again"


def test_two_pages_of_the_same_contents():
    """Computed twice before either was known: one is found, the other is free once it is released."""
    pool = PagePool(2)
    first, second = pool.take(2)
    pool.remember(first, b"a")
    pool.remember(second, b"a")
    pool.release([second])
    pool.release([first])
    assert (pool.free, pool.cached, pool.find([b"a"])) == (1, 1, [first])
