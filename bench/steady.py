# SPDX-License-Identifier: Apache-2.0
"""Rows at a steady rate, evenly over partitions: what commits and outages of a store are measured under."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any, Self

from bench.context import Stream

PARTITIONS = 2
RATE_PER_S = 10_000
_BURSTS_PER_S = 100
#: Of rows that are there to make a build long: texts that hardly compress.
_WIDE_BYTES = 150
_FILL_BATCH = 5_000


def schema(name: str) -> dict[str, Any]:
    return {
        "schemaName": name,
        "dimensionFieldSpecs": [
            {"name": "part", "dataType": "INT"},
            {"name": "device", "dataType": "STRING"},
            {"name": "note", "dataType": "STRING"},
        ],
        "metricFieldSpecs": [{"name": "number", "dataType": "LONG"}],
        "dateTimeFieldSpecs": [
            {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
        ],
    }


class SteadyRows:
    """A context manager: a thread that appends while it lasts, a little of each partition a hundred times a second, and
    catches up if it was late. Numbers of a partition's rows count from 0."""

    def __init__(self, stream: Stream, topic: str) -> None:
        self._stream = stream
        self._topic = topic
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        #: Rows appended, by partition.
        self.rows = [0] * PARTITIONS
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._stream.flush()

    def fill(self, rows: int) -> None:
        """So many wide rows of each partition, as fast as it goes, beside the steady ones."""
        for _ in range(0, rows, _FILL_BATCH):
            for partition in range(PARTITIONS):
                self._append(partition, _FILL_BATCH, wide=True)

    def _run(self) -> None:
        share = RATE_PER_S // _BURSTS_PER_S // PARTITIONS
        started_s, burst = time.monotonic(), 0
        try:
            while not self._stop.is_set():
                for partition in range(PARTITIONS):
                    self._append(partition, share, wide=False)
                burst += 1
                self._stop.wait(max(0.0, started_s + burst / _BURSTS_PER_S - time.monotonic()))
        except Exception as error:
            self.failure = error

    def _append(self, partition: int, size: int, *, wide: bool) -> None:
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            first = self.rows[partition]
            noise = os.urandom(size * _WIDE_BYTES).hex().encode() if wide else b""
            width = 2 * _WIDE_BYTES if wide else 0
            self._stream.append(
                self._topic, partition,
                [_row(partition, first + n, now_ms, noise[n * width : (n + 1) * width]) for n in range(size)],
            )  # fmt: skip
            self.rows[partition] = first + size


def _row(partition: int, number: int, now_ms: int, noise: bytes) -> bytes:
    return (
        b'{"part":%d,"device":"device-%d","note":"a reading of the usual length, %d %s","number":%d,"ts":%d}'
        % (partition, number % 5_000, number, noise, number, now_ms)
    )  # fmt: skip
