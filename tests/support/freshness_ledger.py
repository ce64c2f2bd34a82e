# SPDX-License-Identifier: Apache-2.0
"""Rows whose arrival times are known: what the log acknowledged, with its timestamps, is the model that answers about
freshness are compared with.

Row n of a partition has offset n, `part` and `seq` = n; of an upsert table its key is n % KEYS, so that a prefix of k
rows shows the last min(k, KEYS) of them. So what any answer may show of a partition follows from k alone, and which k
an answer's freshness promises from the timestamps of the acknowledgements.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import Any, NamedTuple

from ledger import ledger_table

from cremant.log.api import Log, Message

TOPIC = "moments"
APPEND, UPSERT = "moments", "moments_latest"
#: Of a partition of the upsert table.
KEYS = 2_000

QUESTION = "SELECT part, COUNT(*), MAX(seq), SUM(seq) FROM {table} GROUP BY part LIMIT 100"


def schema(table: str) -> dict[str, Any]:
    keys = {"primaryKeyColumns": ["part", "key"]} if table == UPSERT else {}
    return {
        "schemaName": table,
        "dimensionFieldSpecs": [
            {"name": "part", "dataType": "INT"},
            {"name": "key", "dataType": "INT"},
            {"name": "note", "dataType": "STRING"},
        ],
        "metricFieldSpecs": [{"name": "seq", "dataType": "LONG"}],
        "dateTimeFieldSpecs": [
            {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
        ],
        **keys,
    }


def table_config(table: str, *, flush_rows: int, replication: int = 2, kafka: str = "") -> dict[str, Any]:
    upsert = {
        "upsertConfig": {"mode": "FULL", "comparisonColumns": ["seq"]},
        "routing": {"instanceSelectorType": "strictReplicaGroup"},
    }
    return ledger_table(table, TOPIC, flush_rows, replication, kafka, **(upsert if table == UPSERT else {}))


class Written(NamedTuple):
    """An acknowledged append: the offset of its last row, and the log's time of it (ms)."""

    last_offset: int
    at_ms: int


class _Partition:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.end = 0
        #: Of each append the offset after it, and its timestamp; both grow.
        self.ends: list[int] = []
        self.at_ms: list[int] = []


class MomentLedger:
    """Appends rows, from any thread, and remembers when the log had them."""

    def __init__(self, log: Log, partitions: int, topic: str = TOPIC) -> None:
        """`log` is closed with the ledger."""
        self.partitions = partitions
        self._topic = topic
        self._log = log
        self._parts = [_Partition() for _ in range(partitions)]

    @property
    def rows(self) -> int:
        return sum(part.end for part in self._parts)

    def append(self, partition: int, count: int) -> Written:
        """`count` rows, acknowledged. Appends to one partition wait for each other."""
        part = self._parts[partition]
        with part.lock:
            now_ms = time.time_ns() // 1_000_000
            rows = [
                b'{"part":%d,"key":%d,"seq":%d,"ts":%d,"note":"row %d"}' % (partition, n % KEYS, n, now_ms, n)
                for n in range(part.end, part.end + count)
            ]
            done = self._log.append(self._topic, partition, [Message(row) for row in rows])
            assert done.first_offset == part.end, "somebody else writes to the topic"
            assert not part.at_ms or done.timestamp_ms >= part.at_ms[-1], "the log's time went back"
            part.end = done.next_offset
            part.at_ms.append(done.timestamp_ms)
            part.ends.append(done.next_offset)
            return Written(part.end - 1, done.timestamp_ms)

    def produce(self, rate_per_s: int, stop: threading.Event) -> None:
        """Small bursts to all partitions until `stop`; a late one is not made up for."""
        bursts_per_s = 50
        share = max(1, rate_per_s // bursts_per_s // self.partitions)
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            for partition in range(self.partitions):
                self.append(partition, share)
            due = max(due + 1 / bursts_per_s, time.monotonic() - 1)

    def ends(self) -> dict[int, int]:
        return {number: part.end for number, part in enumerate(self._parts)}

    def rows_before(self, partition: int, at_ms: float) -> int:
        """How many rows the log had before `at_ms`, strictly. Only what is acknowledged counts: ask later."""
        part = self._parts[partition]
        earlier = bisect_left(part.at_ms, at_ms, hi=len(part.ends))
        return part.ends[earlier - 1] if earlier else 0

    def close(self) -> None:
        self._log.close()


def row_of(table: str, partition: int, rows: int) -> list[Any] | None:
    """What `QUESTION` says of a partition of which the first `rows` rows are visible; None: nothing."""
    if not rows:
        return None
    shown = min(rows, KEYS) if table == UPSERT else rows
    return [partition, shown, rows - 1, float((2 * rows - 1 - shown) * shown // 2)]
