"""How the Hopper kernel of MLA decode splits its work, against a walk over all parts page by page."""

from collections import Counter
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.pallas_kernels.mla_decode.work import PAGE, WHOLE, DecodePlan, Part, Row, max_partials, split_work

SPLIT_COST_PAGES = 3
MAX_PAGES = -(-100_000 // PAGE)
EDGES = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1])
LENGTHS = EDGES | st.integers(0, 2000) | st.integers(0, 100_000)


class Piece(NamedTuple):
    """Pages [first, end) of `entry` in part `part`; `slot`: of its partial result."""

    part: int
    entry: int
    first: int
    end: int
    slot: int


@partial(jax.jit, static_argnames="parts")
def split(tables: jax.Array, rows: jax.Array, lengths: jax.Array, parts: int) -> DecodePlan:
    return split_work(tables, rows, lengths, parts=parts, split_cost_pages=SPLIT_COST_PAGES)


def pieces(plan: DecodePlan) -> list[Piece]:
    """What the kernel's blocks find to do, each reading its part and then one row after the other."""
    found = []
    for index, cells in enumerate(plan.parts.tolist()):
        part, row = Part(*cells[: len(Part._fields)]), Row(*cells[len(Part._fields) :])
        for entry in range(part.first_row, part.end_row):
            if entry > part.first_row:
                row = Row(*plan.rows[entry].tolist())
            begin, end = max(part.begin, row.begin), min(part.end, row.end)
            if end > begin:
                found.append(Piece(index, entry, begin - row.begin, end - row.begin, row.slot))
    return found


@pytest.mark.parametrize("parts", [1, 7, 132])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_the_split_of_any_lengths(batch: int, parts: int):
    @settings(max_examples=40, deadline=None)
    @given(st.lists(LENGTHS, min_size=batch, max_size=batch), st.integers(0, 1 << 32))
    def check(lengths: list[int], seed: int):
        """Table entries behind a row's end hold anything; entries without keys may name the row of another one."""
        rng = np.random.default_rng(seed)
        pages = [-(-length // PAGE) for length in lengths]
        rows = np.where(np.equal(lengths, 0), rng.integers(batch, size=batch), rng.permutation(batch)).astype(np.int32)
        tables = rng.integers(-(1 << 31), 1 << 31, size=(batch, MAX_PAGES), dtype=np.int32)
        for entry in range(batch):
            tables[rows[entry], : pages[entry]] = np.arange(pages[entry]) + entry * MAX_PAGES
        plan = jax.device_get(split(tables, rows, jnp.asarray(lengths, jnp.int32), parts))
        found = pieces(plan)

        covered = Counter((piece.entry, page) for piece in found for page in range(piece.first, piece.end))
        assert covered == Counter((entry, page) for entry in range(batch) for page in range(pages[entry]))

        work = Counter()
        for piece in found:
            work[piece.part] += piece.end - piece.first
        assert max(work.values(), default=0) <= -(-sum(pages) // parts) + SPLIT_COST_PAGES

        splits = Counter(piece.entry for piece in found)
        slots = [piece.slot for piece in found if splits[piece.entry] > 1]
        assert sorted(slots) == list(range(len(slots))), "each partial result has a place of its own"
        assert len(slots) <= max_partials(parts)

        described = [Row(*cells) for cells in plan.rows.tolist()]
        assert [row.length for row in described] == lengths
        assert [row.table for row in described] == rows.tolist()
        assert all((row.slot == WHOLE) == (splits[entry] < 2) for entry, row in enumerate(described))
        merges = {entry: (count, slot) for entry, count, slot in plan.merges[: plan.num_merges[0]].tolist()}
        assert {entry: count for entry, (count, _) in merges.items()} == {
            entry: splits[entry] for entry in range(batch) if splits[entry] != 1
        }
        for entry, (count, slot) in merges.items():
            if count > 1:
                assert [piece.slot for piece in found if piece.entry == entry] == list(range(slot, slot + count))

        firsts = {}
        for piece in found:
            firsts.setdefault(piece.part, tables[rows[piece.entry], piece.first])
        assert {part: plan.parts[part, Part._fields.index("page")] for part in firsts} == firsts

    check()


def test_rows_of_one_length_are_left_whole_where_that_costs_little():
    """128 rows of 64 pages on 132 parts: 63 pages each would be even."""
    rows = jnp.arange(128)
    plan = split(jnp.zeros((128, 64), jnp.int32), rows, jnp.full(128, 64 * PAGE, jnp.int32), parts=132)
    assert plan.num_merges[0] == 0
    np.testing.assert_array_equal(plan.rows[:, Row._fields.index("slot")], WHOLE)
