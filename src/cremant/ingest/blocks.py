# SPDX-License-Identifier: Apache-2.0
"""Cuts what a message batch became into parts of bounded size that cover an offset range exactly (rule E-2)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cremant.ingest.causes import Cause
from cremant.ingest.plan import Ingested
from cremant.log.api import NO_TIMESTAMP
from cremant.model import names
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import OffsetRange


@dataclass(frozen=True, slots=True)
class BlockPart:
    """What a RowBlock says of its messages; the parts of a range follow each other without a hole.

    `max_ingestion_ms`: of the newest message, whatever became of it; `rejected_from_ms`: of the oldest one that an
    error kept from becoming a row. None: the stream gives no time, or there is no such message."""

    range: OffsetRange
    batch: pa.RecordBatch
    rejected: int
    filtered: int
    max_ingestion_ms: int | None
    rejected_from_ms: int | None


def to_blocks(ingested: Ingested, range: OffsetRange, max_rows: int, max_bytes: int = 2**62) -> list[BlockPart]:
    """The parts of `range`, each of at most `max_rows` rows and about `max_bytes` bytes (more only if one stream record
    became more: records are not split); one, maybe empty, part at least unless the range is empty. A part ends where
    the next one's first row begins, so records without rows belong to the part before. A function of its arguments
    alone. Raises InvariantViolation if something of `ingested` lies outside `range`."""
    offsets = ingested.batch.column(names.OFFSET).to_numpy()
    rejected = [record.offset for record in ingested.rejected]
    filtered = ingested.filtered_offsets
    _check_inside(range, offsets, rejected, filtered)
    if range.length == 0:
        return []
    cuts = _cuts_by_bytes(ingested.batch, offsets, _cuts(offsets, max_rows), max_bytes)
    firsts = [range.first, *(int(offsets[cut]) for cut in cuts)]
    nexts = [*firsts[1:], range.next]
    parts = []
    for first, next_offset, start, end in zip(firsts, nexts, [0, *cuts], [*cuts, len(offsets)], strict=True):
        part = OffsetRange(first, next_offset)
        parts.append(
            BlockPart(
                range=part,
                batch=ingested.batch.slice(start, end - start),
                rejected=bisect_left(rejected, next_offset) - bisect_left(rejected, first),
                filtered=bisect_left(filtered, next_offset) - bisect_left(filtered, first),
                max_ingestion_ms=newest_ms(ingested, part),
                rejected_from_ms=rejected_from_ms(ingested, part),
            )
        )
    return parts


def newest_ms(ingested: Ingested, range: OffsetRange) -> int | None:
    """Ingestion time of the newest message of `range`; with producers' clocks that need not be the last one."""
    first, end = np.searchsorted(ingested.offsets, (range.first, range.next))
    newest = int(ingested.timestamps_ms[first:end].max(initial=NO_TIMESTAMP))
    return None if newest <= NO_TIMESTAMP else newest


def rejected_from_ms(ingested: Ingested, range: OffsetRange) -> int | None:
    """Ingestion time of the oldest message of `range` that an error kept from becoming a row. A message with nothing in
    it (a tombstone) is rejected, too, but is no row that is missing."""
    errors = [bad.offset for bad in ingested.rejected if bad.cause != Cause.EMPTY_MESSAGE]
    inside = [offset for offset in errors if range.first <= offset < range.next]
    times = ingested.timestamps_ms[np.searchsorted(ingested.offsets, np.asarray(inside, dtype=np.int64))]
    known = times[times > NO_TIMESTAMP]
    return int(known.min()) if len(known) else None


def _cuts(offsets: np.ndarray, max_rows: int) -> list[int]:
    """Row indexes at which a new part begins, always the first row of a record."""
    cuts = []
    start = 0
    while len(offsets) - start > max_rows:
        cut = int(np.searchsorted(offsets, offsets[start + max_rows], side="left"))
        if cut <= start:
            cut = int(np.searchsorted(offsets, offsets[start], side="right"))
            if cut == len(offsets):
                break
        cuts.append(cut)
        start = cut
    return cuts


def _cuts_by_bytes(batch: pa.RecordBatch, offsets: np.ndarray, cuts: list[int], max_bytes: int) -> list[int]:
    """`cuts` and more: parts that are too large are halved, again and again."""
    waiting = list(zip([0, *cuts], [*cuts, len(offsets)], strict=True))[::-1]
    more = []
    while waiting:
        start, end = waiting.pop()
        if batch.slice(start, end - start).nbytes > max_bytes:
            middle = int(np.searchsorted(offsets, offsets[(start + end) // 2], side="left"))
            if middle <= start:
                middle = int(np.searchsorted(offsets, offsets[start], side="right"))
            if start < middle < end:
                waiting += [(middle, end), (start, middle)]
                continue
        more.append(end)
    return more[:-1]


def _check_inside(range: OffsetRange, offsets: np.ndarray, rejected: list[int], filtered: tuple[int, ...]) -> None:
    for what, found in (("rows", offsets), ("rejected records", rejected), ("filtered records", filtered)):
        if len(found) and not (range.first <= found[0] and found[-1] < range.next):
            raise InvariantViolation(
                "E-2", f"{what} at offsets {found[0]} to {found[-1]} are not all inside [{range.first}, {range.next})"
            )
