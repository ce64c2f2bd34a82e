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
from typing import Any, Protocol

import httpx
import numpy as np
from bench.cluster import Rest, is_complete, token_offsets

from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog
from cremant.log.partitioner import partition_of

TOPIC = "ledger"
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


def table_config(*, flush_rows: int, replication: int = 2, kafka: str = "") -> dict[str, Any]:
    return ledger_table("ledger", TOPIC, flush_rows, replication, kafka)


def ledger_table(table: str, topic: str, flush_rows: int, replication: int, kafka: str, **more: Any) -> dict[str, Any]:
    """Config of a table on the embedded log, or on the Kafka at `kafka`."""
    kind = "kafka" if kafka else "embedded"
    stream = {
        "streamType": kind,
        f"stream.{kind}.topic.name": topic,
        f"stream.{kind}.consumer.prop.auto.offset.reset": "smallest",
        "realtime.segment.flush.threshold.rows": str(flush_rows),
    }
    if kafka:
        stream |= {
            "stream.kafka.broker.list": kafka,
            "stream.kafka.consumer.factory.class.name": "org.apache.pinot.plugin.stream.kafka30.KafkaConsumerFactory",
            "stream.kafka.decoder.class.name": "org.apache.pinot.plugin.inputformat.json.JSONMessageDecoder",
        }
    return {
        "tableName": table,
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts", "schemaName": table, "replication": str(replication)},
        "tenants": {},
        "tableIndexConfig": {"streamConfigs": stream},
        "metadata": {},
        **more,
    }


class Sink(Protocol):
    """Where a ledger writes. `append` takes messages by partition and returns when all are acknowledged, with the
    first offset per partition."""

    def append(self, shares: dict[int, list[Message]]) -> dict[int, int]: ...

    def close(self) -> None: ...


class EmbeddedSink:
    def __init__(self, log_dir: Path, topic: str = TOPIC) -> None:
        self._log = EmbeddedLog(log_dir)
        self._topic = topic

    def append(self, shares: dict[int, list[Message]]) -> dict[int, int]:
        return {
            partition: self._log.append(self._topic, partition, messages).first_offset
            for partition, messages in shares.items()
        }

    def close(self) -> None:
        self._log.close()


class KafkaSink:
    """Kafka's own client, idempotent: it repeats what was not acknowledged, in order, until `deadline_s` passes."""

    def __init__(self, brokers: str, topic: str = TOPIC, *, deadline_s: float = 120.0) -> None:
        from confluent_kafka import Producer

        self._topic = topic
        self._deadline_s = deadline_s
        self._producer = Producer(
            {
                "bootstrap.servers": brokers,
                "enable.idempotence": True,
                "message.timeout.ms": int(deadline_s * 1000),
                "linger.ms": 2,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )

    def append(self, shares: dict[int, list[Message]]) -> dict[int, int]:
        offsets: dict[int, list[int]] = {partition: [] for partition in shares}
        failed: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failed.append(str(error))
            else:
                offsets[message.partition()].append(message.offset())

        for partition, messages in shares.items():
            for message in messages:
                self._producer.produce(self._topic, message.value, message.key, partition, on_delivery=delivered)
        left = self._producer.flush(self._deadline_s)
        assert not left, f"{left} messages without a delivery report after {self._deadline_s} s"
        assert not failed, f"Kafka refused {len(failed)} messages: {failed[0]}"
        for partition, messages in shares.items():
            first = offsets[partition][0]
            assert offsets[partition] == list(range(first, first + len(messages))), "somebody else writes to the topic"
        return {partition: found[0] for partition, found in offsets.items()}

    def close(self) -> None:
        self._producer.flush(self._deadline_s)


class Ledger:
    """Appends numbered rows and remembers, per partition and offset, what was in them. Row n has v = n * n % 10007."""

    def __init__(self, sink: Sink, partitions: int) -> None:
        #: May be replaced by another way into the same topic.
        self.sink = sink
        self._partitions = partitions
        self._values: list[list[int]] = [[] for _ in range(partitions)]
        self._buckets: list[list[int]] = [[] for _ in range(partitions)]
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}
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
        messages: dict[int, list[Message]] = {}
        contents: dict[int, list[tuple[int, int]]] = {}
        now_ms = time.time_ns() // 1_000_000
        for number in range(self.rows, self.rows + size):
            key = f"key-{number * 2654435761 % KEYS}"
            value, bucket = number * number % 10_007, number % BUCKETS
            row = {"key": key, "bucket": bucket, "v": value, "ts": now_ms, "note": f"row {number}"}
            partition = partition_of(key.encode(), self._partitions)
            messages.setdefault(partition, []).append(Message(json.dumps(row).encode(), key.encode()))
            contents.setdefault(partition, []).append((value, bucket))
        for partition, first in self.sink.append(messages).items():
            assert first == len(self._values[partition]), "somebody else writes to the topic"
            self._values[partition] += [value for value, _ in contents[partition]]
            self._buckets[partition] += [bucket for _, bucket in contents[partition]]
        self.rows += size

    def close(self) -> None:
        self.sink.close()

    def expected(self, offsets: dict[int, int]) -> list[list[int]]:
        """[bucket, count, sum] of the rows below `offsets`, by bucket."""
        counts = np.zeros(BUCKETS, dtype=np.int64)
        sums = np.zeros(BUCKETS, dtype=np.int64)
        for partition, end in offsets.items():
            if end > len(self._values[partition]):
                raise AssertionError(f"an answer names offset {end} of partition {partition}, nobody wrote it")
            buckets, values = self._columns(partition)
            counts += np.bincount(buckets[:end], minlength=BUCKETS)
            sums += np.bincount(buckets[:end], weights=values[:end], minlength=BUCKETS).astype(np.int64)
        return [[b, int(counts[b]), int(sums[b])] for b in range(BUCKETS) if counts[b]]

    def _columns(self, partition: int) -> tuple[np.ndarray, np.ndarray]:
        """Buckets and values of a partition, made anew only when rows came."""
        known = self._arrays.get(partition)
        if known is None or len(known[0]) < len(self._values[partition]):
            size = min(len(self._buckets[partition]), len(self._values[partition]))
            known = (
                np.array(self._buckets[partition][:size], dtype=np.int64),
                np.array(self._values[partition][:size], dtype=float),
            )
            self._arrays[partition] = known
        return known

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

    def __init__(self, rest: Rest, ledger: Ledger, *, threads: int = 2, pause_s: float = 0.05) -> None:
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
