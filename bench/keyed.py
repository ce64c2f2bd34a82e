# SPDX-License-Identifier: Apache-2.0
"""The epoch log of an upsert table, written as its pipeline would, but without Spark: for benchmarks of servers, which
need tens of millions of versions, and see nothing of a pipeline but this.

The table is paused, so that its own pipeline leaves it alone; this one takes the lease, goes through the protocol of a
start, and decides by arrays which row of a key is in force: the last one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pyarrow as pa

from bench.cluster import ClusterError, LocalCluster
from bench.dataset import START_MS
from cremant.cluster.leases import holder_name
from cremant.epoch.format import row_block, to_message
from cremant.epoch.records import DELETE, INSERT, EpochMark, PartitionMark
from cremant.epoch.updates import update_block
from cremant.log.embedded import EmbeddedLog
from cremant.model.cluster import ClusterView, TableView
from cremant.model.names import epoch_topic
from cremant.model.offsets import OffsetRange
from cremant.pipeline.lease import LEASE_PATH
from cremant.pipeline.starter import StartDriver
from cremant.segment.layout import stored_columns
from cremant.wire.codec import decode, encode
from cremant.wire.messages import LeaseReply, LeaseRequest

#: Of one partition and epoch.
BLOCK_ROWS = 50_000
T = TypeVar("T")


class _Member:
    """A pipeline, as far as the controller is concerned."""

    id, nonce = "Pipeline_bench", "1"

    def __init__(self, controller: str) -> None:
        self._controller = controller

    def call(self, path: str, message: object, reply_type: type[T], timeout_ms: int = 10_000) -> T:
        url = self._controller + path
        answer = httpx.post(url, content=encode(message), timeout=timeout_ms / 1000, trust_env=False)
        if answer.status_code >= 400:
            raise ClusterError(f"POST {path}: HTTP {answer.status_code} {answer.text[:500]}")
        return decode(answer.content, reply_type)


class KeyedLog:
    """Rows of the benchmarks' schema, with ids that the caller chooses. `keys`: ids are below."""

    def __init__(self, cluster: LocalCluster, table: str, keys: int) -> None:
        self._cluster, self._table = cluster, table
        self._log = EmbeddedLog(Path(cluster.ready["logDir"]))
        cluster.rest.call("POST", f"/tables/{table}/pauseConsumption")
        view = self._view()
        self._partitions = len(view.partitions)
        self._schema = stored_columns(view.record.table_schema)
        self._incarnation = view.record.incarnation
        self._topic = epoch_topic(table, self._incarnation)
        self._config_version = view.record.config_version
        self._generation, self._epoch, self._previous = self._begin(view)
        self._ends = [0] * self._partitions
        #: By key: where its row in force is, -1: nowhere; and its number.
        self._partition_of, self._offset_of = np.full(keys, -1), np.full(keys, -1)
        self._last = np.full(keys, -1)
        self._dice = np.random.default_rng(7)
        self.rows = 0

    def close(self) -> None:
        self._log.close()

    @property
    def keys(self) -> int:
        return int((self._last >= 0).sum())

    @property
    def answer(self) -> list[list[Any]]:
        """COUNT(*) and SUM(quantity) of the rows in force."""
        live = self._last[self._last >= 0]
        return [[len(live), int((live * 31 % 100).sum())]]

    def _view(self) -> TableView:
        url = f"{self._cluster.rest.controller}/internal/v1/view?since=-1&nonce=&timeoutMs=0"
        return decode(httpx.get(url, trust_env=False).content, ClusterView).tables[self._table]

    def _begin(self, view: TableView) -> tuple[int, int, int]:
        """Generation, first epoch, and the one before. The lease comes with the end of the present holder's."""
        member = _Member(self._cluster.rest.controller)
        request = LeaseRequest(
            holder=holder_name(member.id, member.nonce), table=self._table, incarnation=view.record.incarnation
        )
        while not member.call(LEASE_PATH, request, LeaseReply).held:
            pass  # it is asked for again and again, for a lease's length
        with tempfile.TemporaryDirectory(prefix="cremant-bench-") as checkpoints:
            plan = StartDriver(member, self._log, view, Path(checkpoints), self._partitions).run()
        return plan.generation, plan.epoch_of(plan.first_batch), plan.previous

    def write(self, ids: np.ndarray) -> None:
        """One epoch: rows of these keys, an equal share for each partition."""
        first, size = self.rows, len(ids)
        numbers = np.arange(first, first + size)
        self.rows += size
        shares = [
            slice(p * size // self._partitions, (p + 1) * size // self._partitions) for p in range(self._partitions)
        ]
        partition, offset = np.empty(size, np.int64), np.empty(size, np.int64)
        for number, share in enumerate(shares):
            rows = share.stop - share.start
            partition[share], offset[share] = number, np.arange(self._ends[number], self._ends[number] + rows)
            self._ends[number] += rows
            for block in _blocks(share):
                self._append_rows(number, offset[block], ids[block], numbers[block])
        updates = self._append_updates(ids, partition, offset, numbers)
        lines = tuple(
            PartitionMark(end=end, rows=share.stop - share.start, updates=count, stream_end=end)
            for end, share, count in zip(self._ends, shares, updates, strict=True)
        )
        mark = EpochMark(
            generation=self._generation, epoch=self._epoch, blocks_generation=self._generation,
            config_version=self._config_version, previous=self._previous, partitions=lines,
        )  # fmt: skip
        for number in range(self._partitions):
            self._append(number, mark)
        self._epoch, self._previous = self._epoch + 1, self._epoch

    def _append(self, partition: int, record: Any) -> None:
        self._log.append(self._topic, partition, [to_message(record, self._incarnation)])

    def _append_rows(self, partition: int, offsets: np.ndarray, ids: np.ndarray, numbers: np.ndarray) -> None:
        size, dice = len(offsets), self._dice
        columns = {
            "$offset": offsets, "$subRow": np.zeros(size, np.int32), "$ingestionTime": START_MS + 10 * numbers,
            "id": ids, "country": _COUNTRIES.take(pa.array((dice.random(size) ** 2 * 20).astype(np.int32))),
            "city": _CITIES.take(pa.array((dice.random(size) ** 2 * 1_000).astype(np.int32))),
            "device": _DEVICES.take(pa.array(numbers % 7 % 5)), "userId": numbers * 2_654_435_761 % 100_000,
            "quantity": numbers * 31 % 100, "amount": dice.integers(1, 1_000_000, size) / 100,
            "ts": START_MS + 10 * numbers,
        }  # fmt: skip
        arrays = [pa.array(columns[field.name]).cast(field.type) for field in self._schema]
        block = row_block(
            generation=self._generation, epoch=self._epoch, config_version=self._config_version,
            range=OffsetRange(int(offsets[0]), int(offsets[-1]) + 1), timestamp_type="logAppend",
            batch=pa.RecordBatch.from_arrays(arrays, schema=self._schema),
        )  # fmt: skip
        self._append(partition, block)

    def _append_updates(
        self, ids: np.ndarray, partition: np.ndarray, offset: np.ndarray, numbers: np.ndarray
    ) -> list[int]:
        """Of each key the last row comes into force, what was so far no longer is; how many by partition."""
        keys, back = np.unique(ids[::-1], return_index=True)
        best, before = len(ids) - 1 - back, self._last[keys] >= 0
        touched = np.concatenate([partition[best], self._partition_of[keys[before]]])
        offsets = np.concatenate([offset[best], self._offset_of[keys[before]]])
        ops = np.repeat(np.array([INSERT, DELETE], np.int8), [len(best), int(before.sum())])
        self._partition_of[keys], self._offset_of[keys] = partition[best], offset[best]
        self._last[keys] = numbers[best]
        counts = []
        for number in range(self._partitions):
            mine = touched == number
            counts.append(int(mine.sum()))
            if counts[-1]:
                block = update_block(
                    generation=self._generation, epoch=self._epoch, offsets=offsets[mine],
                    sub_rows=np.zeros(counts[-1], np.int32), ops=ops[mine],
                )  # fmt: skip
                self._append(number, block)
        return counts


def _blocks(share: slice) -> Iterator[slice]:
    for first in range(share.start, share.stop, BLOCK_ROWS):
        yield slice(first, min(first + BLOCK_ROWS, share.stop))


_COUNTRIES = pa.array([f"country-{n:02d}" for n in range(20)])
_CITIES = pa.array([f"city-{n:03d}" for n in range(1_000)])
_DEVICES = pa.array(["phone", "desktop", "tablet", "television", "watch"])
