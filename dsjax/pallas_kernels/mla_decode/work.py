"""How MLA decode is split over the GPU: all pages of all rows in one line, cut into equal parts.

The line is cut on the device, from the lengths, so one executable serves all lengths and costs what the pages cost. A
row that lies in several parts leaves one partial result in each of them, which are merged afterwards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

PAGE = 64  # tokens
WHOLE = -(1 << 30)  # negative, whatever number of parts is added


class Row(NamedTuple):
    """What a kernel must know of an entry: its pages [begin, end) on the line, its keys, and where its results go.

    `table`: its row of the page tables. `slot`: where its first partial result goes; WHOLE if it lies in one part.
    """

    begin: Any
    end: Any
    length: Any
    table: Any
    slot: Any


class Part(NamedTuple):
    """A part of the line: pages [begin, end) of entries [first_row, end_row). `page`: its first page in the cache."""

    begin: Any
    end: Any
    first_row: Any
    end_row: Any
    page: Any


class DecodePlan(NamedTuple):
    """The work of all parts; int32.

    `parts` [parts, Part and Row]: each part and its first row (with the slot that the part fills, if any), so that one
    read is enough to begin. `rows` [B, Row].
    `merges` [B, 3]: entry, splits and first slot of rows that do not lie in just one part, of which there are
    `num_merges` [1].
    """

    parts: jax.Array
    rows: jax.Array
    merges: jax.Array
    num_merges: jax.Array


def split_work(
    tables: jax.Array, rows: jax.Array, lengths: jax.Array, *, parts: int, split_cost_pages: int
) -> DecodePlan:
    """The plan for entries of `lengths` [B] tokens, whose pages are `rows` [B] of `tables` [R, N].

    Parts are as small as possible, or large enough for as many of the longest row as must share one, where that makes
    them no more than `split_cost_pages` larger: rows of one length then need no merging.
    """
    pages = (lengths + PAGE - 1) // PAGE
    end = jnp.cumsum(pages, dtype=jnp.int32)
    total, used = end[-1], jnp.sum(pages > 0)
    even = (total + parts - 1) // parts
    whole = (used + parts - 1) // parts * jnp.max(pages)
    size = jnp.maximum(jnp.where(whole <= even + split_cost_pages, whole, even), 1)

    begin = end - pages
    first_part = begin // size
    splits = jnp.where(pages > 0, (end - 1) // size - first_part + 1, 0)
    partials = jnp.where(splits > 1, splits, 0)
    slot = jnp.cumsum(partials, dtype=jnp.int32) - partials
    entries = Row(begin, end, lengths, rows, jnp.where(splits > 1, slot, WHOLE))

    part_begin = jnp.arange(parts) * size
    part_end = jnp.minimum(part_begin + size, total)
    first_row = jnp.sum(end <= part_begin[:, None], axis=1)
    end_row = jnp.sum(begin < part_end[:, None], axis=1)
    first_entry = jnp.minimum(first_row, len(lengths) - 1)
    first = Row(*(field[first_entry] for field in entries))
    first_slot = first.slot + jnp.arange(parts) - first_part[first_entry]
    first_page = tables[first.table, jnp.clip(part_begin - first.begin, 0, tables.shape[1] - 1)]
    part = Part(part_begin, part_end, first_row, end_row, first_page)

    merged = splits != 1
    place = jnp.where(merged, jnp.cumsum(merged) - 1, len(lengths))
    merge = jnp.stack([jnp.arange(len(lengths)), splits, slot], axis=1)
    merges = jnp.zeros_like(merge).at[place].set(merge, mode="drop")
    parts_and_rows = jnp.stack([*part, *first._replace(slot=first_slot)], axis=1)
    plan = DecodePlan(parts_and_rows, jnp.stack(entries, axis=1), merges, jnp.sum(merged)[None])
    return jax.tree.map(lambda array: array.astype(jnp.int32), plan)


def max_partials(parts: int) -> int:
    """Most partial results of a plan: rows that lie in several parts are the first or the last row of each of them."""
    return 2 * parts


class Segment(NamedTuple):
    """The pages [first, end) of entry `entry` that lie in one part; `before`: pages of the part before them.

    `page`: the first one's place in the cache, if `before` is 0. `table`, `length`: see Row. `slot`: of its partial
    result, negative if the entry lies in one part.
    """

    entry: Any
    first: Any
    end: Any
    before: Any
    page: Any
    table: Any
    length: Any
    slot: Any


def for_each_segment(parts, rows, index, body: Callable[[Segment], None]) -> None:
    """In a kernel: call `body` for each segment of part `index`. `parts` and `rows` are refs of a DecodePlan."""
    part = Part(*(parts[index, i] for i in range(len(Part._fields))))
    first = Row(*(parts[index, len(part) + i] for i in range(len(Row._fields))))

    def per_row(entry, row: Row) -> Row:
        begin, end = jnp.maximum(part.begin, row.begin), jnp.minimum(part.end, row.end)
        segment = Segment(
            entry=entry,
            first=begin - row.begin,
            end=end - row.begin,
            before=begin - part.begin,
            page=part.page,
            table=row.table,
            length=row.length,
            slot=row.slot,
        )
        pl.when(end > begin)(lambda: body(segment))
        following = jnp.minimum(entry + 1, rows.shape[0] - 1)
        return Row(*(rows[following, i] for i in range(len(row))))

    lax.fori_loop(part.first_row, part.end_row, per_row, first)


def for_each_page(tables, segment: Segment, body: Callable[[Any, Any, Any], None]) -> None:
    """In a kernel: call body(j, page, following) for the pages of a segment. `tables` is a ref.

    j counts pages of the row; `page` is the place in the cache, and `following` that of the next page, or of the last.
    """

    def step(j, page):
        following = tables[segment.table, jnp.minimum(j + 1, segment.end - 1)]
        body(j, page, following)
        return following

    first = lax.cond(segment.before == 0, lambda: segment.page, lambda: tables[segment.table, segment.first])
    lax.fori_loop(segment.first, segment.end, step, first)
