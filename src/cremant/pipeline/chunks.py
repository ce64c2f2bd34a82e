# SPDX-License-Identifier: Apache-2.0
"""Cuts an offset range of a stream partition into chunks that are decoded and appended as one block each.

Rule: where chunks end is a function of the range and of the messages in it alone, never of how the log happened to
hand them out, so that a retried task writes the same blocks again (E-2). A chunk ends after `rows_max` offsets, or with
the message that takes it to `bytes_max`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from cremant.log.api import LogReader, MessageBatch
from cremant.log.columns import joined, part
from cremant.model.errors import InvariantViolation, Unavailable
from cremant.model.limits import BLOCK_ROWS_MAX, MIB
from cremant.model.offsets import OffsetRange

#: Message bytes of one chunk: a block of 16 MiB of JSON is at most about 32 MiB decoded, half of a record's limit.
CHUNK_BYTES_MAX = 16 * MIB


#: Reads in a row that give nothing where there is something.
EMPTY_READS_MAX = 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """Messages of `range`; `batch` is None if the range holds none (offsets may have holes)."""

    range: OffsetRange
    batch: MessageBatch | None


def chunks(
    reader: LogReader,
    wanted: OffsetRange,
    latest: Callable[[], int],
    *,
    rows_max: int = BLOCK_ROWS_MAX,
    bytes_max: int = CHUNK_BYTES_MAX,
) -> Iterator[Chunk]:
    """Chunks that cover `wanted` exactly. The reader stands at `wanted.first`; `latest` asks the log where it ends,
    again if that is too little to be true (`pipeline/ends.py`). Raises what `reader.read` raises, InvariantViolation if
    the log ends before `wanted` does (it was planned from the log's own end), and Unavailable if it does not but its
    reader gives nothing."""
    first = wanted.first
    while first < wanted.next:
        chunk = _chunk(reader, OffsetRange(first, min(wanted.next, first + rows_max)), latest, bytes_max)
        yield chunk
        first = chunk.range.next


def _chunk(reader: LogReader, limit: OffsetRange, latest: Callable[[], int], bytes_max: int) -> Chunk:
    parts: list[MessageBatch] = []
    size = empty = 0
    while reader.position < limit.next:
        batch = reader.read(max_messages=limit.next - reader.position, max_bytes=bytes_max)
        if batch is None:
            if reader.position >= limit.next:
                break  # what is left is invisible: markers of transactions, messages of aborted ones
            # The planner, another process, has seen more; a reader that has been told waits for it.
            end, empty = latest(), empty + 1
            if end < limit.next:
                raise InvariantViolation("E-2", f"the stream ends at {end}, an epoch was planned up to {limit.next}")
            if empty > EMPTY_READS_MAX:
                raise Unavailable(f"the stream ends at {end}, but gives nothing from {reader.position} on")
            continue
        empty = 0
        batch = _below(batch, limit.next)
        if not len(batch):
            continue
        sizes = np.cumsum(_lengths(batch)) + size
        full = int(np.searchsorted(sizes, bytes_max))
        if full < len(batch) - 1:
            cut = int(batch.offsets[full]) + 1
            parts.append(_below(batch, cut))
            reader.seek(cut)
            return Chunk(OffsetRange(limit.first, cut), _join(parts))
        size = int(sizes[-1])
        parts.append(batch)
        if size >= bytes_max:
            cut = int(batch.offsets[-1]) + 1
            reader.seek(cut)
            return Chunk(OffsetRange(limit.first, cut), _join(parts))
    if reader.position != limit.next:
        reader.seek(limit.next)
    return Chunk(limit, _join(parts))


def _lengths(batch: MessageBatch) -> np.ndarray:
    lengths = pc.fill_null(pc.binary_length(batch.values), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, dtype=np.int64)


def _below(batch: MessageBatch, next_offset: int) -> MessageBatch:
    """The messages below `next_offset`."""
    return part(batch, 0, int(np.searchsorted(batch.offsets, next_offset)))


def _join(parts: list[MessageBatch]) -> MessageBatch | None:
    return joined(parts, parts[-1].next_offset) if parts else None
