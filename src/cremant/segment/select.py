# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sealed segment satisfy the terms of a filter: by index where there is one, else by a pass over one
column, without the query engine.

Rules:

- A selection never loses a row that satisfies all terms. `exact` says that it has no other rows either; then the
  filter need not be evaluated again.
- Cheapest first: codes and orders may rule out the whole segment, then ranges rule out batches, then rows are compared
  in the batches that are left.
- Compared here are integers with integers and texts with texts, whose meaning has no corners. Everything else
  (floating point: NaN, zeros, rounding) is left to the engine; ranges still rule out what they can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.segment.bloom import may_contain
from cremant.segment.codes import Codes, Interval, Mask, intersect, matches, sorted_interval
from cremant.segment.index import SegmentIndex
from cremant.segment.order import Ordered
from cremant.segment.prune import may_match
from cremant.segment.rows import RowMask, take_column, view_words
from cremant.wire.messages import PruneTerm

#: An order is used for up to this share of a segment's rows: beyond it comparing all of them in a pass is cheaper.
_ORDER_SHARE = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """`batches`: numbers of those with matches; `masks`: their rows that match (None: all that exist)."""

    batches: tuple[int, ...]
    masks: tuple[RowMask | None, ...]
    exact: bool


_NOTHING = Selection((), (), True)


@dataclass(slots=True)
class _Work:
    """What is known so far. `alive`: batches that may have matches; `masks` by batch."""

    index: SegmentIndex
    batches: Sequence[pa.RecordBatch]
    single: frozenset[str]
    alive: list[int] = field(default_factory=list)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)

    def keep(self, batch: int, mask: np.ndarray) -> None:
        known = self.masks.get(batch)
        self.masks[batch] = mask if known is None else known & mask


def select(
    batches: Sequence[pa.RecordBatch], index: SegmentIndex, terms: Sequence[PruneTerm], single: frozenset[str],
    validity: Sequence[RowMask | None] | None = None,
) -> Selection:  # fmt: skip
    """`batches`: of the whole segment, in scan form. `single`: columns of type FLOAT. `validity`: rows that exist."""
    by_column: dict[str, list[PruneTerm]] = {}
    for term in terms:
        by_column.setdefault(term.column, []).append(term)
    ends = np.cumsum([batch.num_rows for batch in batches]).tolist()
    work = _Work(index, batches, single, list(range(len(batches))), firsts=[0, *ends])
    later: list[tuple[str, list[PruneTerm]]] = []
    coded: list[tuple[str, list[Interval]]] = []
    for column, own in by_column.items():
        codes = index.codes(column) if _is_known(batches, column) else None
        intervals = _code_intervals(codes, own) if codes is not None else None
        if codes is None or intervals is None:
            later.append((column, own))
        elif not intervals:
            return _NOTHING
        elif intervals != [(0, len(codes.values))]:
            coded.append((column, intervals))
    for number in range(len(batches)):
        zone = functools.partial(index.zone, number)
        if not all(may_match(own, zone, single) for _, own in later):
            work.alive.remove(number)
    for column, own in list(later):
        if not work.alive or not _may_contain(index, column, own):
            return _NOTHING
        if _by_order(work, column, own):
            later.remove((column, own))
    for column, intervals in coded:
        _by_codes(work, column, intervals)
    exact = all([_by_values(work, column, own) for column, own in later])
    return _done(work, exact, validity)


def _is_known(batches: Sequence[pa.RecordBatch], column: str) -> bool:
    return bool(batches) and column in batches[0].schema.names


def _code_intervals(codes: Codes, terms: Sequence[PruneTerm]) -> list[Interval] | None:
    """Codes that satisfy all terms of one column, as disjoint ascending intervals; None if they cannot tell."""
    is_text = pa.types.is_string(codes.values.type)
    found: list[Interval] = [(0, len(codes.values))]
    for term in terms:
        if not _comparable(term, is_text):
            return None
        own = sorted({codes.interval(term.op, value) for value in term.values})
        found = intersect(found, own)
    return found


_OPS = frozenset({"=", "in", "<", "<=", ">", ">="})


def _comparable(term: PruneTerm, is_text: bool) -> bool:
    if term.op not in _OPS or not term.values:
        return False
    if is_text:
        return all(isinstance(value, str) for value in term.values)
    return all(isinstance(value, int) and not isinstance(value, bool) for value in term.values)


def _may_contain(index: SegmentIndex, column: str, terms: Sequence[PruneTerm]) -> bool:
    bloom = index.bloom(column)
    if bloom is None:
        return True
    for term in terms:
        known = term.op in ("=", "in") and all(type(value) in (int, str) for value in term.values)
        if known and not any(may_contain(bloom, value) for value in term.values if isinstance(value, int | str)):
            return False
    return True


def _by_codes(work: _Work, column: str, intervals: list[Interval]) -> None:
    codes = work.index.codes(column)
    assert codes is not None
    for number in work.alive:
        part = codes.codes[work.firsts[number] : work.firsts[number + 1]]
        work.keep(number, matches(part, intervals, len(codes.values)))


def _by_order(work: _Work, column: str, terms: Sequence[PruneTerm]) -> bool:
    """True if the rows were found through the column's order."""
    order = work.index.order(column)
    if order is None or not _is_known(work.batches, column):
        return False
    kind = work.batches[0].schema.field(column).type
    if pa.types.is_floating(kind) or not all(_comparable(term, pa.types.is_string_view(kind)) for term in terms):
        return False
    values = Ordered([batch.column(column) for batch in work.batches], work.firsts, order)
    found: list[Interval] = [(0, len(order))]
    for term in terms:
        found = intersect(found, sorted({sorted_interval(values, term.op, value) for value in term.values}))
    if sum(high - low for low, high in found) * _ORDER_SHARE > len(order):
        return False
    rows = np.sort(np.concatenate([order[:0], *(order[low:high] for low, high in found)]))
    for number in list(work.alive):
        first, end = work.firsts[number], work.firsts[number + 1]
        inside = rows[np.searchsorted(rows, first) : np.searchsorted(rows, end)]
        if not len(inside):
            work.alive.remove(number)
            continue
        mask = np.zeros(end - first, np.bool_)
        mask[inside - first] = True
        work.keep(number, mask)
    return True


def _by_values(work: _Work, column: str, terms: Sequence[PruneTerm]) -> bool:
    """Compares the values of the batches that are left; False if that is for the engine to do."""
    if not _is_known(work.batches, column):
        return False
    kind = work.batches[0].schema.field(column).type
    if pa.types.is_integer(kind) and all(_comparable(term, False) for term in terms):
        compare = _numbers
    elif pa.types.is_string_view(kind) and all(
        _comparable(term, True) and term.op in ("=", "in") and len(term.values) <= _TEXTS_MAX for term in terms
    ):
        compare = _texts
    else:
        return False
    for number in work.alive:
        values = work.batches[number].column(column)
        for term in terms:
            work.keep(number, compare(values, term))
    return True


#: Longer lists of texts are left to the engine's hash table.
_TEXTS_MAX = 16
_COMPARE: dict[str, Callable[..., Mask]] = {
    "=": np.equal, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip


def _numbers(column: pa.Array, term: PruneTerm) -> Mask:
    values = column.to_numpy()
    if term.op != "in":
        return _COMPARE[term.op](values, term.values[0])
    return np.isin(values, np.array([value for value in term.values if _fits(value, values.dtype)], values.dtype))


def _fits(value: object, kind: np.dtype) -> bool:
    return isinstance(value, int) and np.iinfo(kind).min <= value <= np.iinfo(kind).max


def _texts(column: pa.Array, term: PruneTerm) -> Mask:
    views = view_words(column)
    found = _text(column, views, str(term.values[0]))
    for value in term.values[1:]:
        found |= _text(column, views, str(value))
    return found


def _text(column: pa.Array, views: np.ndarray, value: str) -> Mask:
    """A view holds length and first four bytes, and the other eight if that is all there is of a text."""
    wanted = view_words(pa.array([value]).cast(pa.string_view()))[0]
    found: Mask = views[:, 0] == wanted[0]
    if len(value.encode()) <= 12:
        found &= views[:, 1] == wanted[1]
        return found
    rows = np.flatnonzero(found)
    if len(rows):
        found[rows] = pc.equal(take_column(column, rows).cast(pa.string()), value).to_numpy(zero_copy_only=False)
    return found


def _done(work: _Work, exact: bool, validity: Sequence[RowMask | None] | None) -> Selection:
    batches: list[int] = []
    masks: list[RowMask | None] = []
    for number in work.alive:
        mask, existing = work.masks.get(number), validity[number] if validity is not None else None
        if existing is not None and not existing.count:
            continue
        if mask is not None and existing is not None:
            mask &= existing.flags  # in place: it was made for this query, and new pages cost more than the bits do
        count = int(np.count_nonzero(mask)) if mask is not None else 0
        if mask is None or count:
            batches.append(number)
            masks.append(None if mask is None or count == len(mask) else RowMask(mask, count))
    return Selection(tuple(batches), tuple(masks), exact)
