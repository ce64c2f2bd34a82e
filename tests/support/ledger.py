# SPDX-License-Identifier: Apache-2.0
"""Known rows and the model of right answers: a producer that remembers what the log acknowledged, and a checker that
compares answers with it.

The model is made of delivery reports only, never of the epoch log. An answer says through its readToken which offsets
it contains; it is right iff its counts and sums are those of exactly these offsets (I-4).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from bench.cluster import Rest, is_complete, token_offsets

from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog
from cremant.log.partitioner import partition_of

BUCKETS = 8
KEYS = 5_000

SCHEMA: dict[str, Any] = {
    "schemaName": "ledger",
    "dimensionFieldSpecs": [
        {"name": "key", "dataType": "STRING"},
        {"name": "bucket", "dataType": "INT"},
        {"name": "note", "dataType": "STRING"},
    ],
    "metricFieldSpecs": [{"name": "v", "dataType": "LONG"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}


def table_config(*, flush_rows: int, replication: int = 2) -> dict[str, Any]:
    return {
        "tableName": "ledger",
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts", "schemaName": "ledger", "replication": str(replication)},
        "tenants": {},
        "tableIndexConfig": {
            "streamConfigs": {
                "streamType": "embedded",
                "stream.embedded.topic.name": "ledger",
                "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
                "realtime.segment.flush.threshold.rows": str(flush_rows),
            }
        },
        "metadata": {},
    }


class Ledger:
    """Appends numbered rows and remembers, per partition and offset, what was in them. Row n has v = n * n % 10007."""

    def __init__(self, log_dir: Path, partitions: int) -> None:
        self._log = EmbeddedLog(log_dir)
        self._partitions = partitions
        self._values: list[list[int]] = [[] for _ in range(partitions)]
        self._buckets: list[list[int]] = [[] for _ in range(partitions)]
        self.rows = 0

    def produce(
        self, count: int, *, rate_per_s: float = 0, batch: int = 500, stop: Callable[[], bool] | None = None
    ) -> None:
        """Appends `count` rows, keyed; with `rate_per_s` evenly over time."""
        started = time.monotonic()
        done = 0
        while done < count and not (stop is not None and stop()):
            size = min(batch, count - done)
            self._append(size)
            done += size
            if rate_per_s:
                time.sleep(max(0.0, started + done / rate_per_s - time.monotonic()))

    def _append(self, size: int) -> None:
        messages: list[list[Message]] = [[] for _ in range(self._partitions)]
        contents: list[list[tuple[int, int]]] = [[] for _ in range(self._partitions)]
        now_ms = time.time_ns() // 1_000_000
        for number in range(self.rows, self.rows + size):
            key = f"key-{number * 2654435761 % KEYS}"
            value, bucket = number * number % 10_007, number % BUCKETS
            row = {"key": key, "bucket": bucket, "v": value, "ts": now_ms, "note": f"row {number}"}
            partition = partition_of(key.encode(), self._partitions)
            messages[partition].append(Message(json.dumps(row).encode(), key.encode()))
            contents[partition].append((value, bucket))
        for partition, share in enumerate(messages):
            if share:
                acknowledged = self._log.append("ledger", partition, share)
                assert acknowledged.first_offset == len(self._values[partition]), "somebody else writes to the topic"
                self._values[partition] += [value for value, _ in contents[partition]]
                self._buckets[partition] += [bucket for _, bucket in contents[partition]]
        self.rows += size

    def close(self) -> None:
        self._log.close()

    def expected(self, offsets: dict[int, int]) -> list[list[int]]:
        """[bucket, count, sum] of the rows below `offsets`, by bucket."""
        counts = np.zeros(BUCKETS, dtype=np.int64)
        sums = np.zeros(BUCKETS, dtype=np.int64)
        for partition, end in offsets.items():
            if end > len(self._values[partition]):
                raise AssertionError(f"an answer names offset {end} of partition {partition}, nobody wrote it")
            buckets = np.array(self._buckets[partition][:end], dtype=np.int64)
            counts += np.bincount(buckets, minlength=BUCKETS)
            sums += np.bincount(
                buckets, weights=np.array(self._values[partition][:end], dtype=float), minlength=BUCKETS
            ).astype(np.int64)
        return [[b, int(counts[b]), int(sums[b])] for b in range(BUCKETS) if counts[b]]

    def ends(self) -> dict[int, int]:
        return {partition: len(values) for partition, values in enumerate(self._values)}

    def total(self) -> list[list[Any]]:
        rows = self.expected(self.ends())
        return [[sum(row[1] for row in rows), float(sum(row[2] for row in rows))]]


TOTAL_SQL = "SELECT COUNT(*), SUM(v) FROM ledger"
BUCKETS_SQL = "SELECT bucket, COUNT(*), SUM(v) FROM ledger GROUP BY bucket ORDER BY bucket LIMIT 100"


@dataclass
class Findings:
    """What a checker saw. `wrong` must stay empty; the rest is for judging whether the test tested anything."""

    complete: int = 0
    partial: int = 0
    unanswered: int = 0
    wrong: list[str] = field(default_factory=list)
    #: Longest time without a complete answer, and when complete answers came (seconds since start).
    complete_at_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        moments = self.complete_at_s
        return max((b - a for a, b in pairwise(moments)), default=0.0)


class Checker:
    """Asks all the time, in threads of its own; `findings()` compares every complete answer with the ledger."""

    def __init__(self, rest: Rest, ledger: Ledger, *, threads: int = 2, pause_s: float = 0.02) -> None:
        self._rest = rest
        self._ledger = ledger
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._answers: list[tuple[float, str, dict[str, Any]]] = []
        self._findings = Findings()
        self._started = time.monotonic()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(threads)]

    def start(self) -> Checker:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> Findings:
        self._stop.set()
        for thread in self._threads:
            thread.join(40)
            assert not thread.is_alive(), "a query did not return within its timeout"
        for _, sql, answer in self._answers:
            problem = self._judge(sql, answer)
            if problem:
                self._findings.wrong.append(problem)
        return self._findings

    @property
    def complete_so_far(self) -> int:
        return self._findings.complete

    def _ask(self, number: int) -> None:
        asked = number
        rest = Rest(self._rest.controller, self._rest.broker)
        while not self._stop.is_set():
            sql = (TOTAL_SQL, BUCKETS_SQL)[asked % 2]
            asked += 1
            try:
                answer = rest.query(sql)
            except (httpx.HTTPError, ValueError):
                with self._lock:
                    self._findings.unanswered += 1
                self._stop.wait(0.1)
                continue
            at = time.monotonic() - self._started
            with self._lock:
                if is_complete(answer):
                    self._findings.complete += 1
                    self._findings.complete_at_s.append(at)
                    kept = {key: answer.get(key) for key in ("resultTable", "readToken", "requestId")}
                    self._answers.append((at, sql, kept))
                else:
                    self._findings.partial += 1
            self._stop.wait(self._pause_s)
        rest.close()

    def _judge(self, sql: str, answer: dict[str, Any]) -> str | None:
        if not answer.get("readToken"):
            return f"a complete answer without readToken: {answer}"
        offsets = token_offsets(answer)
        if set(offsets) != set(self._ledger.ends()):  # I-8: no partition is silently skipped
            return f"a complete answer names partitions {sorted(offsets)}: {answer}"
        try:
            buckets = self._ledger.expected(offsets)
        except AssertionError as error:
            return str(error)
        rows = answer["resultTable"]["rows"]
        expected: list[list[float]]
        if sql == TOTAL_SQL:
            expected = [[sum(row[1] for row in buckets), sum(row[2] for row in buckets)]]
            rows = [[count, 0 if not count else total] for count, total in rows]
        else:
            expected = [list(row) for row in buckets]
        if rows != expected:
            return f"{sql}: {rows} instead of {expected} at offsets {offsets}"
        return None
