# SPDX-License-Identifier: Apache-2.0
"""One consumer for all partitions that a process reads: messages are taken in bulk and sorted into a buffer each.

A consumer costs threads, connections and buffers, so a log has one, whatever the number of its readers. Whoever needs
messages takes what the brokers sent, for everybody, and appends it, as columns, to the *slot* of its partition; the
client's own threads fetch ahead meanwhile. A slot is fetched while somebody reads it or waits for it and its buffer is
not full; otherwise its partition is taken from the consumer, and given back at the offset where the buffer ends. A
consumer that only watches keeps no messages but how far they go.

The client lets one thread at a time call a consumer, also while it waits, so everything here is done by who holds the
Fetcher (`with fetcher:`), and waiting is done in slices between which others have their turn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from cremant.log.api import MessageBatch
from cremant.log.columns import joined, part
from cremant.log.kafka_admin import Where
from cremant.log.kafka_columns import batches_of, fitting, size_of
from cremant.log.kafka_errors import Faults, closed, make_client
from cremant.model.errors import Unavailable
from cremant.model.limits import KAFKA_BUFFER_BYTES, KAFKA_IDLE_MS, MIB

#: How long a thread waits at once: as long as another one may have to wait for its turn.
_SLICE_S = 0.01
_YIELD_S = 0.0005
_TIDY_S = 0.05
#: Who drops a slot may be collecting objects, and wakes nobody.
_REST_S = 1.0
#: Messages taken at once: some milliseconds of work.
_TAKE_MESSAGES = 10_000
#: A watched partition with this many messages past its position is not news any more.
_WATCH_MESSAGES = 2_000
_WATCH_IDLE_S = 2.0
_WATCH_FORGET_S = 60.0


class Slot:
    """One partition of a Fetcher; all but `turn` belongs to who holds the Fetcher.

    Offsets: `position` is where the reader stands, `next` where fetching goes on; messages between them are in
    `chunks`. `heard`: something came since the partition was assigned last. `seen` is past the last message that came,
    `ended` where the brokers said that there is no more. `start`: of a watched one, where watching began.
    """

    def __init__(self, where: Where) -> None:
        self.where = where
        #: Held for a whole read: readers of one partition take turns.
        self.turn = threading.Lock()
        self.readers = 0
        self.position = 0
        self.next = 0
        self.seen = -1
        self.ended = -1
        self.start = 0
        self.chunks: deque[tuple[MessageBatch, float]] = deque()
        self.bytes = 0
        self.assigned = False
        self.heard = False
        self.used_s = 0.0
        self.error: KafkaError | None = None


class _Consumer(Consumer):  # type: ignore[misc]
    """Of which there are weak references."""


class Fetcher:
    """`keep`: messages, not only how far they go. Methods are for who holds it, but `drop`, `find` and `stop`."""

    def __init__(self, config: Mapping[str, Any], brokers: str, faults: Faults, *, keep: bool) -> None:
        self._consumer: Any = make_client(_Consumer, config, brokers, faults)
        self._brokers = brokers
        self._keep = keep
        self._idle_s = KAFKA_IDLE_MS / 1000 if keep else _WATCH_IDLE_S
        self._held = threading.Lock()
        self._count = threading.Lock()
        self._wanted = 0
        self._slots: dict[Where, Slot] = {}
        self._dropped: deque[Slot] = deque()
        self._closed = False
        self._used = threading.Event()
        threading.Thread(target=self._tidy_up, name="kafka-tidy", daemon=True).start()

    def __enter__(self) -> Fetcher:
        with self._count:
            self._wanted += 1
        self._held.acquire()
        with self._count:
            self._wanted -= 1
        if self._closed:
            self._held.release()
            raise closed(self._brokers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.release()
        if self._wanted:
            # A lock is not fair: who comes back at once would have it again.
            time.sleep(_YIELD_S)

    def slot(self, where: Where) -> Slot:
        """The slot of a partition, one reader more."""
        slot = self._slots.get(where)
        if slot is None:
            slot = self._slots[where] = Slot(where)
        slot.readers += 1
        return slot

    def drop(self, slot: Slot) -> None:
        """One reader less. May be called from anywhere, also while objects are collected."""
        self._dropped.append(slot)

    def find(self, where: Where) -> Slot | None:
        return self._slots.get(where)

    def place(self, slot: Slot, position: int) -> None:
        """Makes sure that messages from `position` on are coming, unless there is an error."""
        slot.used_s = time.monotonic()
        if not slot.position <= position <= slot.next:
            slot.chunks.clear()
            slot.bytes = 0
            slot.next = position
            self._assign(slot)
        else:
            self._forget_before(slot, position)
            if not slot.assigned and slot.error is None and slot.bytes <= self._full() // 2:
                self._assign(slot)
        slot.position = position

    def poll(self, timeout_s: float) -> None:
        """Takes what came for any partition; waits a little for something to come."""
        first = self._consumer.poll(max(0.0, min(timeout_s, _SLICE_S)))
        if first is not None:
            self._sort([first, *self._consumer.consume(_TAKE_MESSAGES, 0)])

    def take(self, slot: Slot, max_messages: int, max_bytes: int) -> tuple[MessageBatch, float] | None:
        """What is buffered, at least a message if any is, and when the newest of it came."""
        parts: list[MessageBatch] = []
        came_s = 0.0
        while slot.chunks and (not parts or (max_messages > 0 and max_bytes > 0)):
            chunk, chunk_came_s = slot.chunks[0]
            count, size = fitting(chunk, max_messages, max_bytes)
            if parts and (size > max_bytes or chunk.timestamp_type is not parts[0].timestamp_type):
                break
            parts.append(part(chunk, 0, count))
            self._pop(slot, count)
            max_messages -= count
            max_bytes -= size
            came_s = chunk_came_s
        slot.position = int(slot.chunks[0][0].offsets[0]) if slot.chunks else slot.next
        return (joined(parts, slot.position), came_s) if parts else None

    def retry(self, slot: Slot) -> None:
        """Forgets the error; the next `place` fetches again."""
        slot.error = None

    def watch(self, slot: Slot, position: int) -> None:
        """Fetches from `position`, where nothing is yet."""
        slot.used_s = time.monotonic()
        slot.next = slot.start = position
        slot.seen = -1
        self._assign(slot)

    def high_watermark(self, slot: Slot) -> int:
        """As the last answer of the brokers said; -1 if there was none."""
        if not slot.heard:
            return -1
        known = self._consumer.get_watermark_offsets(TopicPartition(*slot.where), cached=True)
        return -1 if known is None else int(known[1])

    def stop(self) -> None:
        with self._held:
            self._closed = True
            self._used.set()
            self._consumer.close()

    def _sort(self, messages: Sequence[Any]) -> None:
        if any([m.error() is not None for m in messages]):
            self._sort([m for m in messages if m.error() is None])
            # After the messages: an end is behind them, and moves `next`.
            for message in messages:
                if message.error() is not None:
                    self._note(message)
            return
        if not messages:
            return
        assigned = [slot for slot in self._slots.values() if slot.assigned]
        if len(assigned) == 1 and assigned[0].where == (messages[0].topic(), messages[0].partition()):
            self._add(assigned[0], messages)
            return
        for where, run in groupby(messages, lambda m: (m.topic(), m.partition())):
            slot = self._slots.get(where)
            if slot is not None and slot.assigned:
                self._add(slot, list(run))

    def _add(self, slot: Slot, messages: Sequence[Any]) -> None:
        slot.heard = True
        last = messages[-1].offset()
        if last < slot.next:
            return
        if messages[0].offset() < slot.next:
            messages = [m for m in messages if m.offset() >= slot.next]
        slot.next = slot.seen = last + 1
        if not self._keep:
            if slot.next - slot.start > _WATCH_MESSAGES:
                self._unassign(slot)
            return
        now_s = time.monotonic()
        for batch in batches_of(messages):
            slot.chunks.append((batch, now_s))
            slot.bytes += size_of(batch)
        if slot.bytes > self._full():
            self._unassign(slot)

    def _note(self, message: Any) -> None:
        """The end of a partition, or trouble with it."""
        slot = self._slots.get((message.topic(), message.partition()))
        error = message.error()
        if slot is None or not slot.assigned:
            return
        slot.heard = True
        if error.code() == KafkaError._PARTITION_EOF:
            if message.offset() >= slot.next:
                # Past what nobody sees: transaction markers, aborted messages.
                slot.next = slot.ended = message.offset()
            return
        slot.error = error
        self._unassign(slot)

    # --- partitions nobody needs ---

    def _tidy_up(self) -> None:
        """The one thread: takes partitions that are not used any more from the consumer. Rests while there are none."""
        while not self._closed:
            self._used.wait(_REST_S)
            time.sleep(_TIDY_S)
            with contextlib.suppress(Unavailable), self:
                self._tidy()
                if not self._dropped and not any(slot.assigned for slot in self._slots.values()):
                    self._used.clear()

    def _tidy(self) -> None:
        while self._dropped:
            slot = self._dropped.popleft()
            slot.readers -= 1
            if slot.readers <= 0 and self._keep and self._slots.get(slot.where) is slot:
                self._unassign(slot)
                del self._slots[slot.where]
        now_s = time.monotonic()
        for slot in list(self._slots.values()):
            if slot.used_s < now_s - self._idle_s:
                self._unassign(slot)
            if not self._keep and slot.readers <= 0 and slot.used_s < now_s - _WATCH_FORGET_S:
                del self._slots[slot.where]

    def _full(self) -> int:
        return max(MIB, KAFKA_BUFFER_BYTES // max(1, len(self._slots)))

    def _assign(self, slot: Slot) -> None:
        """Fetches from `slot.next` on; what is under way from elsewhere, the client drops. A slot whose last reader is
        gone, but which somebody still waits with, is not fetched: nobody would take its partition away again."""
        if self._slots.get(slot.where) is not slot:
            return
        self._unassign(slot)
        slot.heard = False
        slot.ended = -1
        slot.error = None
        self._consumer.incremental_assign([TopicPartition(*slot.where, slot.next)])
        slot.assigned = True
        self._used.set()

    def _unassign(self, slot: Slot) -> None:
        if slot.assigned:
            slot.assigned = False
            self._consumer.incremental_unassign([TopicPartition(*slot.where)])

    @staticmethod
    def _pop(slot: Slot, count: int) -> None:
        chunk, came_s = slot.chunks.popleft()
        slot.bytes -= size_of(chunk)
        if count < len(chunk):
            rest = part(chunk, count, len(chunk))
            slot.chunks.appendleft((rest, came_s))
            slot.bytes += size_of(rest)

    def _forget_before(self, slot: Slot, position: int) -> None:
        while slot.chunks and int(slot.chunks[0][0].offsets[0]) < position:
            self._pop(slot, int(slot.chunks[0][0].offsets.searchsorted(position)))
