# SPDX-License-Identifier: Apache-2.0
"""Versions of many keys, and the table that they must make: a producer that remembers what the log acknowledged, and
the model of an upsert table at any vector of ends, columnar, because it is asked at thousands of epochs.

The stream is made to hurt: a key's rows go to partitions at random, some keys are hot (so that they occur in every
partition of every epoch), comparison values tie, come late, are repeated in another partition, keys are deleted and
come back, and some rows have a null key (rejected: the table never has them).

What is right is a function of the rows below the ends of an epoch alone (`UpsertModel` says the same, row by row).
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ledger import Sink, ledger_table

from cremant.log.api import Message

TABLE = "accounts"
BUCKETS = 16
TENANTS = 10
HOT_KEYS = 200
V_END = 10_007
#: Below every comparison value.
_NEVER = np.iinfo(np.int64).min

SCHEMA: dict[str, Any] = {
    "schemaName": TABLE,
    "primaryKeyColumns": ["tenant", "key"],
    "dimensionFieldSpecs": [
        {"name": "tenant", "dataType": "INT"},
        {"name": "key", "dataType": "STRING"},
        {"name": "bucket", "dataType": "INT"},
        {"name": "seq", "dataType": "LONG"},
        {"name": "deleted", "dataType": "BOOLEAN"},
        {"name": "note", "dataType": "STRING"},
    ],
    "metricFieldSpecs": [{"name": "v", "dataType": "LONG"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}


def table_config(*, flush_rows: int, replication: int = 2, kafka: str = "", table: str = TABLE) -> dict[str, Any]:
    return ledger_table(
        table, table, flush_rows, replication, kafka, routing={"instanceSelectorType": "strictReplicaGroup"},
        upsertConfig={"mode": "FULL", "comparisonColumns": ["seq"], "deleteRecordColumn": "deleted"},
    )  # fmt: skip


class Rows(NamedTuple):
    """Rows of one partition in offset order. `key` is a number, -1 for a null key: `tenant` = key % TENANTS."""

    key: np.ndarray
    seq: np.ndarray
    v: np.ndarray
    bucket: np.ndarray
    deleted: np.ndarray

    def __getitem__(self, which: Any) -> Rows:  # type: ignore[override]  # rows, not columns
        return Rows(*(column[which] for column in self))

    @classmethod
    def none(cls) -> Rows:
        return cls(*(np.empty(0, dtype=kind) for kind in (np.int64, np.int64, np.int64, np.int64, bool)))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class _Partition:
    """What was acknowledged, and when, in chunks; old ones may be forgotten."""

    def __init__(self) -> None:
        self._chunks: list[Rows] = []
        #: Offset after each chunk, and the wall clock (ms) just before it was appended.
        self._ends: list[int] = []
        self._sent_ms: list[float] = []
        self.end = 0

    def add(self, rows: Rows, sent_ms: float) -> None:
        self.end += len(rows.key)
        self._chunks.append(rows)
        self._ends.append(self.end)
        self._sent_ms.append(sent_ms)

    def slice(self, first: int, end: int) -> Rows:
        parts = [Rows.none()]
        for at in range(bisect_right(self._ends, first), len(self._ends)):
            begin = self._ends[at] - len(self._chunks[at].key)
            if begin >= end:
                break
            assert begin <= first or parts[1:], f"offset {first} was forgotten"
            parts.append(self._chunks[at][max(0, first - begin) : end - begin])
        return Rows.joined(parts)

    def sent_at(self, offset: int) -> float | None:
        """When the row at `offset` was sent; None if nobody did."""
        at = bisect_right(self._ends, offset)
        return self._sent_ms[at] if at < len(self._ends) else None

    def forget(self, before: int) -> None:
        gone = bisect_right(self._ends, before)
        del self._chunks[:gone], self._ends[:gone], self._sent_ms[:gone]


class UpsertLedger:
    """Appends versions and remembers, per partition and offset, what was in them. One producer, any number of readers:
    a chunk is there once it is acknowledged."""

    def __init__(self, sink: Sink, partitions: int, *, keys: int = 100_000, seed: int = 1) -> None:
        self.sink = sink
        self.partitions = partitions
        self.keys = keys
        self.rows = 0
        self._dice = np.random.default_rng(seed)
        self._parts = [_Partition() for _ in range(partitions)]
        self._lock = threading.Lock()
        self._last = Rows.none()

    def produce(
        self, count: int, *, rate_per_s: float = 0, batch: int = 1_000, stop: Callable[[], bool] | None = None
    ) -> None:
        """Appends `count` rows; with `rate_per_s` evenly over time."""
        started = time.monotonic()
        done = 0
        while done < count and not (stop is not None and stop()):
            size = min(batch, count - done)
            self.append(self._versions(size))
            done += size
            if rate_per_s:
                time.sleep(max(0.0, started + done / rate_per_s - time.monotonic()))

    def append(self, rows: Rows, partition: np.ndarray | None = None) -> None:
        """To partitions at random, or as told row by row."""
        size = len(rows.key)
        if partition is None:
            partition = self._dice.integers(0, self.partitions, size)
        now_ms = time.time() * 1000
        encoded = _messages(rows, self.rows, int(now_ms))
        shares = {p: np.flatnonzero(partition == p) for p in np.unique(partition).tolist()}
        firsts = self.sink.append({p: [encoded[n] for n in which.tolist()] for p, which in shares.items()})
        with self._lock:
            for p, first in firsts.items():
                assert first == self._parts[p].end, "somebody else writes to the topic"
                self._parts[p].add(rows[shares[p]], now_ms)
        self.rows += size

    def _versions(self, size: int) -> Rows:
        """A tenth late by up to a minute, one in fifty a copy of a row of the batch before, one in 25 a deletion, one
        in 500 without a key. Comparison values have a tenth of a second, so hot keys tie all the time."""
        dice = self._dice
        key = dice.integers(0, self.keys, size)
        hot = dice.random(size) < 0.2
        key[hot] = dice.integers(0, min(HOT_KEYS, self.keys), int(hot.sum()))
        key[dice.random(size) < 0.002] = -1
        seq = np.full(size, time.time_ns() // 100_000_000)
        late = dice.random(size) < 0.1
        seq[late] -= dice.integers(1, 600, int(late.sum()))
        rows = Rows(key, seq, dice.integers(0, V_END, size), dice.integers(0, BUCKETS, size), dice.random(size) < 0.04)
        if len(self._last.key):
            copies = np.flatnonzero(dice.random(size) < 0.02)
            source = dice.integers(0, len(self._last.key), len(copies))
            for column, old in zip(rows, self._last, strict=True):
                column[copies] = old[source]
        self._last = rows
        return rows

    def slice(self, partition: int, first: int, end: int) -> Rows:
        with self._lock:
            known = self._parts[partition].end
            assert end <= known, f"offset {end} of partition {partition} is named, its end is {known}"
            return self._parts[partition].slice(first, end)

    def sent_at(self, partition: int, offset: int) -> float | None:
        with self._lock:
            return self._parts[partition].sent_at(offset)

    def ends(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(part.end for part in self._parts)

    def forget(self, ends: Sequence[int]) -> None:
        """Rows below `ends` are not asked for again."""
        with self._lock:
            for part, end in zip(self._parts, ends, strict=True):
                part.forget(end)

    def staleness_ms(self, ends: Sequence[int], now_ms: float) -> float:
        """How long the oldest row that is not below `ends` has been there at `now_ms`; 0 if there was none yet."""
        waiting = [self.sent_at(partition, end) for partition, end in enumerate(ends)]
        return max([0.0, *(now_ms - sent for sent in waiting if sent is not None)])

    def close(self) -> None:
        self.sink.close()


class ListSink:
    """Keeps what was appended, decoded."""

    def __init__(self, partitions: int) -> None:
        self.partitions: dict[int, list[dict[str, Any]]] = {partition: [] for partition in range(partitions)}

    def append(self, shares: dict[int, list[Message]]) -> dict[int, int]:
        firsts = {partition: len(self.partitions[partition]) for partition in shares}
        for partition, messages in shares.items():
            self.partitions[partition] += [json.loads(message.value) for message in messages]
        return firsts

    def close(self) -> None:
        pass


class Updates(NamedTuple):
    """Where the rows are that come into force and those that cease to be."""

    insert_partition: np.ndarray
    insert_offset: np.ndarray
    delete_partition: np.ndarray
    delete_offset: np.ndarray

    def of(self, partition: int) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of INSERTs and of DELETEs, sorted."""
        return (
            np.sort(self.insert_offset[self.insert_partition == partition]),
            np.sort(self.delete_offset[self.delete_partition == partition]),
        )


class Table:
    """The table at one vector of ends after another, forwards only."""

    def __init__(self, ledger: UpsertLedger) -> None:
        keys = ledger.keys
        self._ledger = ledger
        self.ends = (0,) * ledger.partitions
        #: Rows that were taken: all but those with a null key.
        self.versions = 0
        #: By key: which row is in force (rank and content); `seq` is the lowest number where there is none.
        self.rank = (
            np.full(keys, _NEVER), np.zeros(keys, dtype=np.int64), np.zeros(keys, dtype=np.int64),
        )  # fmt: skip
        self.v = np.zeros(keys, dtype=np.int64)
        self.bucket = np.zeros(keys, dtype=np.int64)
        self.visible = np.zeros(keys, dtype=bool)
        #: Keys of which one advance saw rows of several partitions.
        self.met = 0

    @property
    def seq(self) -> np.ndarray:
        return self.rank[0]

    def advance(self, ends: Sequence[int]) -> Updates:
        """Answers what the step does to rows, were it one epoch."""
        assert all(new >= old for new, old in zip(ends, self.ends, strict=True)), f"{ends} after {self.ends}"
        parts = []
        places: list[tuple[int, np.ndarray]] = []
        for partition, (first, end) in enumerate(zip(self.ends, ends, strict=True)):
            rows = self._ledger.slice(partition, first, end)
            known = rows.key >= 0
            parts.append(rows[known])
            places.append((partition, first + np.flatnonzero(known)))
        self.ends = tuple(ends)
        rows = Rows.joined(parts)
        self.versions += len(rows.key)
        partition_of = np.concatenate([np.full(len(offsets), partition) for partition, offsets in places])
        return self._take(rows, partition_of, np.concatenate([offsets for _, offsets in places]))

    def _take(self, rows: Rows, partition: np.ndarray, offset: np.ndarray) -> Updates:
        """The greatest of each key by (seq, partition, offset), if it is greater than what is in force."""
        if not len(rows.key):
            return Updates(partition, offset, partition, offset)
        order = np.lexsort((offset, partition, rows.seq, rows.key))
        key = rows.key[order]
        last = np.append(key[1:] != key[:-1], True)
        pairs = np.unique(rows.key * self._ledger.partitions + partition)
        self.met += int((np.unique(pairs // self._ledger.partitions, return_counts=True)[1] > 1).sum())
        best = order[last]
        key = rows.key[best]
        new = (rows.seq[best], partition[best], offset[best])
        old = tuple(column[key] for column in self.rank)
        wins = new[2] > old[2]
        for at in (1, 0):
            wins = (new[at] > old[at]) | ((new[at] == old[at]) & wins)
        key, best = key[wins], best[wins]
        before = key[self.seq[key] > _NEVER]
        updates = Updates(partition[best], offset[best], self.rank[1][before], self.rank[2][before])
        for column, values in zip(self.rank, (rows.seq, partition, offset), strict=True):
            column[key] = values[best]
        self.v[key], self.bucket[key] = rows.v[best], rows.bucket[best]
        self.visible[key] = ~rows.deleted[best]
        return updates

    def buckets(self) -> list[list[int]]:
        """[bucket, count, sum of v] by bucket."""
        bucket, v = self.bucket[self.visible], self.v[self.visible]
        counts = np.bincount(bucket, minlength=BUCKETS)
        sums = np.bincount(bucket, weights=v, minlength=BUCKETS).astype(np.int64)
        return [[b, int(counts[b]), int(sums[b])] for b in range(BUCKETS) if counts[b]]

    def row(self, key: int) -> list[list[int]]:
        """[[seq, v, bucket]] of a visible key, [] of any other."""
        return [[int(self.seq[key]), int(self.v[key]), int(self.bucket[key])]] if self.visible[key] else []


def columns_of(key: int) -> tuple[int, str]:
    """`tenant` and `key` of a key's number."""
    return key % TENANTS, f"k-{key // TENANTS}"


def key_of(tenant: int, key: str) -> int:
    return int(key.removeprefix("k-")) * TENANTS + tenant


def _messages(rows: Rows, first: int, now_ms: int) -> list[Message]:
    names = [b'"k-%d"' % (key // TENANTS) if key >= 0 else b"null" for key in rows.key.tolist()]
    columns = zip(
        (rows.key % TENANTS).tolist(), names, rows.bucket.tolist(), rows.seq.tolist(), rows.deleted.tolist(),
        rows.v.tolist(), range(first, first + len(names)), strict=True,
    )  # fmt: skip
    return [
        Message(
            b'{"tenant":%d,"key":%s,"bucket":%d,"seq":%d,"deleted":%s,"v":%d,"ts":%d,"note":"version %d of all"}'
            % (tenant, key, bucket, seq, b"true" if deleted else b"false", v, now_ms, number)
        )
        for tenant, key, bucket, seq, deleted, v, number in columns
    ]
