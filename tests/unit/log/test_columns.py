# SPDX-License-Identifier: Apache-2.0
"""Batches of messages cut and joined: what is around messages goes with them, where there is any."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cremant.log.api import NO_TIMESTAMP, Message, MessageBatch, RowMetadata, TimestampType
from cremant.log.columns import batch_of, joined, part


def bare(first: int, count: int) -> MessageBatch:
    """Of a log that tells nothing but messages."""
    values = pa.array([b"v%d" % number for number in range(count)], pa.binary())
    return MessageBatch(offsets=np.arange(first, first + count), values=values, next_offset=first + count)


def stamped(first: int, kind: TimestampType) -> MessageBatch:
    messages = [Message(b"a", b"k", (("h", b"1"),)), Message(b"b")]
    return batch_of([first, first + 1], [500, 400], messages, first + 2, kind)


def test_what_a_log_does_not_tell_is_none_for_each_message() -> None:
    batch = part(bare(5, 3), 1, 3)
    assert batch.offsets.tolist() == [6, 7]
    assert batch.timestamps_ms.tolist() == [NO_TIMESTAMP] * 2
    assert batch.keys.to_pylist() == [None, None]
    assert batch.headers is None
    assert batch.metadata == RowMetadata()


def test_a_part_has_its_own_times_keys_and_headers() -> None:
    batch = part(stamped(5, TimestampType.CREATE), 1, 2)
    assert (batch.offsets.tolist(), batch.timestamps_ms.tolist(), batch.next_offset) == ([6], [400], 7)
    assert batch.keys.to_pylist() == [None]
    assert batch.headers == ((),)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ((TimestampType.LOG_APPEND, TimestampType.LOG_APPEND), TimestampType.LOG_APPEND),
        ((TimestampType.LOG_APPEND, TimestampType.CREATE), TimestampType.CREATE),
        ((TimestampType.CREATE, TimestampType.LOG_APPEND), TimestampType.CREATE),
    ],
)
def test_joined_batches_are_of_the_weakest_type(
    kinds: tuple[TimestampType, TimestampType], found: TimestampType
) -> None:
    batch = joined([stamped(0, kinds[0]), stamped(2, kinds[1])], 9)
    assert batch.timestamp_type is found
    assert batch.next_offset == 9
    assert batch.headers == ((("h", b"1"),), ()) * 2


def test_messages_with_and_without_times_are_joined() -> None:
    batch = joined([stamped(0, TimestampType.LOG_APPEND), bare(2, 1)], 3)
    assert batch.timestamps_ms.tolist() == [500, 400, NO_TIMESTAMP]
    assert batch.timestamp_type is TimestampType.CREATE, "not all are proven"
    assert batch.keys.to_pylist() == [b"k", None, None]
    assert joined([bare(0, 1), bare(1, 1)], 2).metadata == RowMetadata()
