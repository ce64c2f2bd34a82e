# SPDX-License-Identifier: Apache-2.0
"""Cuts an offset range of a stream partition into chunks that are decoded and appended as one block each.

Rule: where chunks end is a function of the range and of the messages in it alone, never of how the log happened to
hand them out, so that a retried task writes the same blocks again (E-2). A chunk ends after `rows_max` offsets, or with
the message that takes it to `bytes_max`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.log.api import LogReader, MessageBatch
from cremant.model.errors import InvariantViolation
from cremant.model.limits import BLOCK_ROWS_MAX, MIB
from cremant.model.offsets import OffsetRange

#: Message bytes of one chunk: a block of 16 MiB of JSON is at most about 32 MiB decoded, half of a record's limit.
CHUNK_BYTES_MAX = 16 * MIB


@dataclass(frozen=True, slots=True)
class Chunk:
    """Messages of `range`; `batch` is None if the range holds none (offsets may have holes)."""

    range: OffsetRange
    batch: MessageBatch | None


def chunks(
    reader: LogReader, wanted: OffsetRange, *, rows_max: int = BLOCK_ROWS_MAX, bytes_max: int = CHUNK_BYTES_MAX
) -> Iterator[Chunk]:
    """Chunks that cover `wanted` exactly. The reader stands at `wanted.first`. Raises what `reader.read` raises, and
    InvariantViolation if the log ends before `wanted` does (it was planned from the log's own end)."""
    first = wanted.first
    while first < wanted.next:
        chunk = _chunk(reader, OffsetRange(first, min(wanted.next, first + rows_max)), bytes_max)
        yield chunk
        first = chunk.range.next


def _chunk(reader: LogReader, limit: OffsetRange, bytes_max: int) -> Chunk:
    parts: list[MessageBatch] = []
    size = 0
    while reader.position < limit.next:
        batch = reader.read(max_messages=limit.next - reader.position, max_bytes=bytes_max)
        if batch is None:
            raise InvariantViolation("E-2", f"the stream ends at {reader.position}, an epoch was planned up to {limit}")
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
    count = int(np.searchsorted(batch.offsets, next_offset))
    if count == len(batch):
        return batch
    return MessageBatch(
        offsets=batch.offsets[:count],
        timestamps_ms=batch.timestamps_ms[:count],
        timestamp_type=batch.timestamp_type,
        values=batch.values.slice(0, count),
        keys=batch.keys.slice(0, count),
        headers=None if batch.headers is None else batch.headers[:count],
        next_offset=next_offset,
    )


def _join(parts: list[MessageBatch]) -> MessageBatch | None:
    if len(parts) <= 1:
        return parts[0] if parts else None
    has_headers = any(part.headers is not None for part in parts)
    headers = tuple(h for part in parts for h in (part.headers or ((),) * len(part))) if has_headers else None
    return MessageBatch(
        offsets=np.concatenate([part.offsets for part in parts]),
        timestamps_ms=np.concatenate([part.timestamps_ms for part in parts]),
        timestamp_type=parts[0].timestamp_type,
        values=pa.concat_arrays([part.values for part in parts]),
        keys=pa.concat_arrays([part.keys for part in parts]),
        headers=headers,
        next_offset=parts[-1].next_offset,
    )
