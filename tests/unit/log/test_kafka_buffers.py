# SPDX-License-Identifier: Apache-2.0
"""The buffers of a Fetcher over a consumer made of lists: whatever jumps, full buffers, ends and troubles come in
whatever order, each read gives exactly the messages from its position on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, KafkaError

from cremant.log import kafka_fetch
from cremant.log.kafka_errors import Faults
from cremant.log.kafka_fetch import Fetcher, Where

OFFSETS, MESSAGES, PARTITIONS, STEPS = 500, 200, 3, 400


class _Message:
    def __init__(self, where: Where, offset: int, error: KafkaError | None = None) -> None:
        self.where, self._offset, self._error = where, offset, error

    def topic(self) -> str:
        return self.where[0]

    def partition(self) -> int:
        return self.where[1]

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error

    def value(self) -> bytes:
        return _value(self.where, self._offset)

    def key(self) -> None: ...

    def headers(self) -> None: ...

    def timestamp(self) -> tuple[int, int]:
        return (TIMESTAMP_LOG_APPEND_TIME if self._offset % 50 < 25 else TIMESTAMP_CREATE_TIME), self._offset


def _value(where: Where, offset: int) -> bytes:
    return b"%d:%d" % (where[1], offset) + b"x" * (offset % 7 * 1000)


class _Consumer:
    """`offsets`: of the messages of each partition, with holes; behind the last of them is a hole, too."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._at: dict[Where, int] = {}
        self._queue: list[_Message] = []
        self.offsets = {("t", p): sorted(rng.sample(range(OFFSETS), MESSAGES)) for p in range(PARTITIONS)}

    def incremental_assign(self, places: list[Any]) -> None:
        for place in places:
            assert (place.topic, place.partition) not in self._at
            self._at[place.topic, place.partition] = place.offset

    def incremental_unassign(self, places: list[Any]) -> None:
        for place in places:
            del self._at[place.topic, place.partition]
            self._queue = [m for m in self._queue if m.where != (place.topic, place.partition)]

    def poll(self, timeout_s: float) -> _Message | None:
        for where, at in list(self._at.items()):
            left = [offset for offset in self.offsets[where] if offset >= at]
            some = left[: self._rng.randint(0, 40)]
            self._queue += [_Message(where, offset) for offset in some]
            self._at[where] = some[-1] + 1 if some else at
            if self._rng.random() < 0.05:
                self._queue.append(_Message(where, self._at[where], KafkaError(KafkaError._TRANSPORT)))
            elif some == left and self._rng.random() < 0.6:
                self._at[where] = max(self._at[where], OFFSETS)
                self._queue.append(_Message(where, self._at[where], KafkaError(KafkaError._PARTITION_EOF)))
        return self._queue.pop(0) if self._queue else None

    def consume(self, messages: int, timeout_s: float) -> list[_Message]:
        count = self._rng.randint(0, len(self._queue))
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken

    def close(self) -> None: ...


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("buffer_bytes", [2_000, 20_000, 10_000_000])
def test_reads_give_exactly_what_is_there(seed: int, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    consumer = _Consumer(rng)
    monkeypatch.setattr(kafka_fetch, "_Consumer", lambda config: consumer)
    monkeypatch.setattr(kafka_fetch, "KAFKA_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(kafka_fetch, "MIB", 1)
    fetcher = Fetcher({}, "nobody", Faults(), keep=True)
    with fetcher:
        slots = [fetcher.slot(where) for where in consumer.offsets]
    positions = [0] * PARTITIONS
    for _ in range(STEPS):
        chosen = rng.randrange(PARTITIONS)
        slot = slots[chosen]
        if rng.random() < 0.05:
            positions[chosen] = rng.randrange(OFFSETS + 1)
        first = positions[chosen]
        with fetcher:
            fetcher.place(slot, first)
            taken = fetcher.take(slot, rng.randint(1, 60), rng.randint(1, 30_000))
            positions[chosen] = slot.position
            if taken is None:
                fetcher.retry(slot)
                fetcher.poll(0)
        expected = [offset for offset in consumer.offsets[slot.where] if first <= offset < positions[chosen]]
        batch = taken[0] if taken is not None else None
        assert (batch.offsets.tolist() if batch is not None else []) == expected
        if batch is not None:
            assert batch.values.to_pylist() == [_value(slot.where, offset) for offset in expected]
            assert batch.next_offset == positions[chosen]
    fetcher.stop()
