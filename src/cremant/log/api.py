# SPDX-License-Identifier: Apache-2.0
"""The log: topics of partitions of messages, ordered by offset, replayable, appended to by many processes.

Streams (what producers write) and epoch logs (what the pipeline writes) are both topics of a log. Implementations:
`memory` (tests, simulator), `embedded` (files on one machine), `kafka`. All pass `tests/contract/log`.

Guarantees every implementation gives:

- offsets of a partition grow; they may have holes (transactions, compaction), so a reader goes on at `next_offset`;
- an append of one message is all or nothing, also under kill -9 of the writer, and is acknowledged only when readers
  can see it (on Kafka: as soon as no transaction of somebody else's before it is open);
- an append whose fate is not known raises OutcomeUnknown; any other error says what was written, usually nothing;
- the messages of one append keep their order;
- a topic that is deleted and created again has another `incarnation`.

Logs with `atomic_appends` (memory, embedded) also give: an append of several messages is all or nothing, at
consecutive offsets; appends of several processes interleave only at append boundaries. On others (Kafka) messages of
other producers may come between, and a failed append may have written its first messages.

Timestamps are the log's (LOG_APPEND) in topics that we create. Embedded and memory logs never let them decrease within
a partition; on Kafka each leader's clock counts. Topics made by others may carry their producers' time (CREATE), or
none: whatever a log says around its messages is optional (`RowMetadata`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from cremant.model.errors import PeerError, WorldError

Headers = tuple[tuple[str, bytes], ...]


class TimestampType(StrEnum):
    """Whose clock stamped the message: the log's at append, or the producer's at creation."""

    LOG_APPEND = "logAppend"
    CREATE = "create"


class Message(NamedTuple):
    """What a producer appends."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()


#: The timestamp of a message that has none.
NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetadata:
    """What a log says around its messages instead of in them: a column per kind of thing, an entry per message.

    `timestamps_ms` int64, NO_TIMESTAMP where a message has none; `timestamp_type` of all of them; `keys` a nullable
    binary array; `headers`. None: the log, or every message of the batch, is without. A column that is added later is
    optional, too, so that neither logs nor those who read them have to know it.
    """

    timestamps_ms: np.ndarray | None = None
    timestamp_type: TimestampType = TimestampType.CREATE
    keys: pa.BinaryArray | None = None
    headers: tuple[Headers, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBatch:
    """Consecutive messages of one partition, as columns of equal length.

    `offsets` int64 ascending; `values` a nullable binary array. `next_offset` is where to read on: past the last
    message and past anything invisible behind it.
    """

    offsets: np.ndarray
    values: pa.BinaryArray
    next_offset: int
    metadata: RowMetadata = RowMetadata()

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def timestamps_ms(self) -> np.ndarray:
        """int64; NO_TIMESTAMP where there is none."""
        given = self.metadata.timestamps_ms
        return given if given is not None else np.full(len(self), NO_TIMESTAMP, dtype=np.int64)

    @property
    def timestamp_type(self) -> TimestampType:
        return self.metadata.timestamp_type

    @property
    def keys(self) -> pa.BinaryArray:
        """Null where there is none."""
        return self.metadata.keys if self.metadata.keys is not None else pa.nulls(len(self), pa.binary())

    @property
    def headers(self) -> tuple[Headers, ...] | None:
        return self.metadata.headers


class TopicInfo(NamedTuple):
    name: str
    partitions: int
    incarnation: str


class Appended(NamedTuple):
    """Acknowledgement: offset of the first message of the append, the log's timestamp of it, and the offset after its
    last message. With `atomic_appends` that is the first plus their number."""

    first_offset: int
    timestamp_ms: int
    next_offset: int


class OutcomeUnknown(PeerError):
    """An append may or may not have happened. Whoever writes reads back, or stops and starts again."""


class Bounds(NamedTuple):
    """What a partition holds: offsets from `earliest` up to, not including, `latest`. `settled`: every later message
    has a timestamp of the log that is not before the moment of asking; not so while somebody else's append, stamped
    already, is under way. Of Kafka it holds for messages that its replicas have; see docs/freshness.md."""

    earliest: int
    latest: int
    settled: bool = True


class OffsetExpired(WorldError):
    """The log no longer has `offset`; `earliest` is the first one left."""

    def __init__(self, topic: str, partition: int, offset: int, earliest: int) -> None:
        super().__init__(
            f"topic {topic} partition {partition}: offset {offset} is gone, the earliest is {earliest}",
            hint="retention dropped it",
        )
        self.earliest = earliest


class LogReader(Protocol):
    """Reads one partition forward. Not thread-safe; cheap to keep open."""

    @property
    def position(self) -> int:
        """Offset that the next read starts at."""

    def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
        """What is there now, at least one message if any is (even if larger than `max_bytes`); None at the end, and
        then the position may still have moved, past what nobody can see. Raises OffsetExpired, NotFound (topic deleted
        or re-created), Corrupt.

        Never waits for messages that are not there. Kafka: waits for those that are, up to a deadline (PeerError); what
        this process has appended, or was told of by `latest`, is there, and what others append is there some ms
        later."""

    @property
    def answered_s(self) -> float:
        """When the log last answered, as to this partition or its topic: one that hangs is seen by what this does not
        do. Of the monotonic clock."""

    def seek(self, offset: int) -> None: ...

    def close(self) -> None: ...


class Log(Protocol):
    """A set of topics. Thread-safe; safe to use from several processes but in memory. Kafka: every call may raise
    PeerError, within its deadline."""

    @property
    def atomic_appends(self) -> bool:
        """Whether an append of several messages is one."""

    @property
    def stamped_ahead_ms(self) -> int:
        """How long before readers can see it a message may have got its timestamp, where `bounds` cannot tell; who
        says how far the stream went at a time takes that much off it."""

    def create_topic(self, topic: str, partitions: int) -> TopicInfo:
        """Raises AlreadyExists."""

    def delete_topic(self, topic: str) -> None:
        """Raises NotFound."""

    def grow_topic(self, topic: str, partitions: int) -> TopicInfo:
        """More partitions (never fewer: Conflict)."""

    def topics(self) -> list[TopicInfo]: ...

    def topic(self, topic: str) -> TopicInfo:
        """Raises NotFound."""

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        """All of `messages`, in order; with `atomic_appends` at consecutive offsets, or none. Raises NotFound,
        NoResource (disk full), UserError (too large), OutcomeUnknown."""

    def earliest(self, topic: str, partition: int) -> int: ...

    def latest(self, topic: str, partition: int) -> int:
        """Offset that the next append will get; on Kafka the end of what can be read (last stable offset), which holes
        may precede."""

    def bounds(self, topic: str, partitions: Sequence[int]) -> list[Bounds]:
        """`earliest` and `latest` of each of these partitions, without a request for each. Waits some ms for appends
        under way."""

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """First offset whose message is not older than `timestamp_ms`; `latest` if there is none."""

    def reader(self, topic: str, partition: int, offset: int) -> LogReader: ...

    def wait(self, positions: dict[tuple[str, int], int], timeout_s: float) -> bool:
        """Blocks until one of the partitions has a message at or past its position (True), or the timeout (False).
        Latency of a few ms without burning a core. Raises NotFound. Brokers that are away are no news."""

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        """Messages below `before_offset` may go (retention by consumer position); embedded: whole files at a time."""

    def close(self) -> None: ...
