# SPDX-License-Identifier: Apache-2.0
"""Messages of Kafka's client as columns, and how much of such a batch fits.

The client hands over objects, so one comprehension per column is the least there can be; a batch has one type of
timestamp, since a topic may change it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from cremant.log.api import Headers, MessageBatch, RowMetadata, TimestampType
from cremant.log.columns import binary_array


def batches_of(messages: Sequence[Any]) -> list[MessageBatch]:
    """Of one partition, without errors among them, in order: one batch, or one per run of a timestamp type."""
    stamps: tuple[tuple[int, ...], tuple[int, ...]]
    stamps = tuple(zip(*[m.timestamp() for m in messages], strict=True))  # type: ignore[assignment]
    types = [kind == TIMESTAMP_LOG_APPEND_TIME for kind in stamps[0]]
    if all(types) or not any(types):
        return [_batch(messages, stamps[1], types[0])]
    bounds = [0, *(np.flatnonzero(np.diff(np.asarray(types))) + 1).tolist(), len(types)]
    return [
        _batch(messages[first:end], stamps[1][first:end], types[first]) for first, end in itertools.pairwise(bounds)
    ]


def _batch(messages: Sequence[Any], timestamps_ms: Sequence[int], log_append: bool) -> MessageBatch:
    offsets = np.fromiter([m.offset() for m in messages], dtype=np.int64, count=len(messages))
    keys = [m.key() for m in messages]
    headers = [m.headers() for m in messages]
    return MessageBatch(
        offsets=offsets,
        values=binary_array([m.value() for m in messages]),
        next_offset=int(offsets[-1]) + 1,
        metadata=RowMetadata(
            timestamps_ms=np.fromiter(timestamps_ms, dtype=np.int64, count=len(messages)),
            timestamp_type=TimestampType.LOG_APPEND if log_append else TimestampType.CREATE,
            keys=binary_array(keys) if any(key is not None for key in keys) else None,
            headers=tuple(_headers(of_one) for of_one in headers) if any(headers) else None,
        ),
    )


def _headers(found: Sequence[tuple[str, bytes | None]] | None) -> Headers:
    """Kafka tells a header without value from one with an empty value; we do not."""
    return tuple((name, value or b"") for name, value in found or ())


def size_of(batch: MessageBatch) -> int:
    """Bytes it holds in memory, headers by estimate."""
    return int(batch.values.nbytes + batch.keys.nbytes) + 16 * len(batch) + 200 * len(batch.headers or ())


def fitting(batch: MessageBatch, max_messages: int, max_bytes: int) -> tuple[int, int]:
    """How many of its first messages are within both limits, and their bytes; one at least."""
    ends = _ends(batch.values) + _ends(batch.keys)
    count = max(1, min(len(batch), max_messages, int(np.searchsorted(ends, max_bytes, side="right"))))
    return count, int(ends[count - 1])


def _ends(array: pa.BinaryArray) -> np.ndarray:
    """Bytes up to the end of each value."""
    if array.null_count == len(array):
        return np.zeros(len(array), dtype=np.int64)
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return offsets[1:].astype(np.int64) - int(offsets[0])
