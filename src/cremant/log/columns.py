# SPDX-License-Identifier: Apache-2.0
"""What all logs share: limits of an append, names and counts of topics, building, cutting and joining batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from cremant.log.api import Headers, Message, MessageBatch, RowMetadata, TimestampType
from cremant.model.errors import InvalidConfig, NotFound, UserError
from cremant.model.limits import APPEND_BYTES_MAX, APPEND_MESSAGES_MAX, PARTITIONS_MAX, RECORD_BYTES_MAX
from cremant.model.names import check_topic_name


def check_new_topic(topic: str, partitions: int) -> None:
    check_topic_name(topic)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidConfig(f"topic {topic}: expected 1 to {PARTITIONS_MAX} partitions, found {partitions}")


def check_append(topic: str, partition: int, messages: Sequence[Message]) -> None:
    """Raises UserError if `messages` cannot be one append. Sizes count values and keys."""
    where = f"topic {topic} partition {partition}"
    if not messages:
        raise UserError(f"{where}: an append of no messages", hint="an append has at least one")
    if len(messages) > APPEND_MESSAGES_MAX:
        raise UserError(f"{where}: an append of {len(messages)} messages, at most {APPEND_MESSAGES_MAX} are allowed")
    sizes = [len(m.value or b"") + len(m.key or b"") for m in messages]
    if max(sizes) > RECORD_BYTES_MAX:
        raise UserError(f"{where}: a message of {max(sizes)} bytes, at most {RECORD_BYTES_MAX} are allowed")
    if sum(sizes) > APPEND_BYTES_MAX:
        raise UserError(f"{where}: an append of {sum(sizes)} bytes, at most {APPEND_BYTES_MAX} are allowed")


def no_such_topic(topic: str) -> NotFound:
    return NotFound(f"topic {topic!r} does not exist", hint="`cremant topic list` shows the topics there are")


def no_such_partition(topic: str, partition: int, partitions: int) -> NotFound:
    return NotFound(f"topic {topic} has partitions 0 to {partitions - 1}, not {partition}")


def recreated(topic: str, expected: str, found: str) -> NotFound:
    return NotFound(
        f"topic {topic} of incarnation {expected} is gone, there is another one of that name ({found}) now",
        hint="it was deleted and created again; its offsets start anew",
    )


def binary_array(values: Sequence[bytes | None]) -> pa.BinaryArray:
    """As `pa.array(values, pa.binary())`, which would import pandas at its first call: a second of every start."""
    validity = None
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    try:
        present: Sequence[bytes] = values  # type: ignore[assignment]
        data = b"".join(present)
    except TypeError:
        bits = np.fromiter((value is not None for value in values), dtype=bool, count=len(values))
        validity = pa.py_buffer(np.packbits(bits, bitorder="little"))
        present = [value or b"" for value in values]
        data = b"".join(present)
    np.cumsum(np.fromiter(map(len, present), dtype=np.int32, count=len(values)), out=offsets[1:])
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(values), buffers)


def batch_of(
    offsets: Sequence[int],
    timestamps_ms: Sequence[int],
    messages: Sequence[Message],
    next_offset: int,
    timestamp_type: TimestampType = TimestampType.LOG_APPEND,
) -> MessageBatch:
    """Messages as columns."""
    headers: tuple[Headers, ...] | None = None
    if any(message.headers for message in messages):
        headers = tuple(tuple(message.headers) for message in messages)
    return MessageBatch(
        offsets=np.asarray(offsets, dtype=np.int64),
        values=binary_array([message.value for message in messages]),
        next_offset=next_offset,
        metadata=RowMetadata(
            timestamps_ms=np.asarray(timestamps_ms, dtype=np.int64),
            timestamp_type=timestamp_type,
            keys=binary_array([message.key for message in messages]),
            headers=headers,
        ),
    )


def part(batch: MessageBatch, first: int, end: int) -> MessageBatch:
    """Messages [first, end) of the batch, without a copy."""
    around = batch.metadata
    return MessageBatch(
        offsets=batch.offsets[first:end],
        values=batch.values[first:end],
        next_offset=int(batch.offsets[end]) if end < len(batch) else batch.next_offset,
        metadata=replace(
            around,
            timestamps_ms=None if around.timestamps_ms is None else around.timestamps_ms[first:end],
            keys=None if around.keys is None else around.keys[first:end],
            headers=None if around.headers is None else around.headers[first:end],
        ),
    )


def joined(batches: Sequence[MessageBatch], next_offset: int) -> MessageBatch:
    """Consecutive batches as one. Its timestamps are of the weakest type among them: the log's only if all are."""
    if len(batches) == 1:
        return replace(batches[0], next_offset=next_offset)
    around = [batch.metadata for batch in batches]
    proven = all(one.timestamp_type is TimestampType.LOG_APPEND for one in around)
    timed, keyed, headed = (
        any(getattr(one, name) is not None for one in around) for name in ("timestamps_ms", "keys", "headers")
    )
    return MessageBatch(
        offsets=np.concatenate([batch.offsets for batch in batches]),
        values=pa.concat_arrays([batch.values for batch in batches]),
        next_offset=next_offset,
        metadata=RowMetadata(
            timestamps_ms=np.concatenate([batch.timestamps_ms for batch in batches]) if timed else None,
            timestamp_type=TimestampType.LOG_APPEND if proven else TimestampType.CREATE,
            keys=pa.concat_arrays([batch.keys for batch in batches]) if keyed else None,
            headers=tuple(one for batch in batches for one in batch.headers or ((),) * len(batch)) if headed else None,
        ),
    )
