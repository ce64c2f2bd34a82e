# SPDX-License-Identifier: Apache-2.0
"""Repair, carried out: `completion/repair.py` for copies, `completion/liveness.py` for consumption.

Rules

- Two duties on two threads: neither waits for the other, and neither for a server: those are asked on threads of their
  own. Only the epoch log is asked on the thread of copies, with a deadline.
- The index of what is missing is kept up to date by the commits themselves; nothing scans the records. `report` says
  how many records the runs read and wrote, and how many reports of replicas they went through.
- Everything is guarded by the catalog's lock, but `Said`: what may be long is done without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, assert_never

import httpx
import msgspec

from cremant.completion.liveness import Liveness, Place, Reset, Stopped
from cremant.completion.orders import Assign, Key, Prune, RecordLoss, Situation, TakeBackLoss, Upload, Wants
from cremant.completion.repair import CopiesRepair
from cremant.completion.safeguards import ALL, Safeguards
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.jobs import running_rebalance
from cremant.controller.said import Said
from cremant.controller.streams import Streams
from cremant.log.api import Log
from cremant.model.cluster import (
    Role,
    TableRecord,
    partition_key,
    segment_key,
    table_key,
)
from cremant.model.completion import StorePolicy
from cremant.model.errors import CremantError, StoreFailed, Unavailable
from cremant.model.limits import INTERNAL_REQUEST_TIMEOUT_MS, REPAIR_UPLOAD_TIMEOUT_MS
from cremant.model.names import epoch_topic
from cremant.model.segments import SegmentMetadata
from cremant.shell.logs import CAUSE_HEADER, cause, current_cause, log_event, log_failure
from cremant.shell.member import raise_for

_log = logging.getLogger(__name__)

#: Of a partition's tail that reads no more.
_STOPPED = "stopped"


class RepairReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`missing`: segments that miss something now. In the last run `looked_at` records were read, `written` changed,
    and `reports_read` reports of replicas were gone through."""

    missing: int = 0
    uploading: int = 0
    looked_at: int = 0
    written: int = 0
    reports_read: int = 0
    looked_at_total: int = 0
    written_total: int = 0
    reports_read_total: int = 0
    uploads_total: int = 0
    upload_failures_total: int = 0
    runs_total: int = 0


class Ended(Protocol):
    """Told once what came of a call: the first error, or "". `of_store`: the server did its part, the store did not."""

    def __call__(self, error: str, *, of_store: bool = False) -> None: ...


class ServerCalls:
    """POSTs to servers, on threads of their own: one that hangs delays nobody."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._client = httpx.Client(trust_env=False, timeout=INTERNAL_REQUEST_TIMEOUT_MS / 1000)

    def close(self) -> None:
        self._client.close()

    def post(self, server: str, paths: Sequence[str], timeout_ms: int, ended: Ended) -> None:
        """One after the other, up to the first that the server does not answer. The caller bounds how many are under
        way."""
        cause_id = current_cause()
        url = next((one.url for one in self._instances.described() if one.id == server), None)

        def run() -> None:
            with cause(cause_id):
                error, of_store = self._post_all(server, url, paths, timeout_ms)
                ended(error, of_store=of_store)

        try:
            threading.Thread(target=run, name=f"repair {server}", daemon=True).start()
        except RuntimeError as error:
            ended(f"no thread to ask server {server}: {error}")

    def _post_all(self, server: str, url: str | None, paths: Sequence[str], timeout_ms: int) -> tuple[str, bool]:
        first, of_store = "", False
        if url is None:
            return f"server {server} is no member", False
        for path in paths:
            try:
                self._post(server, url + path, timeout_ms)
            except CremantError as error:
                first, of_store = first or str(error), of_store or isinstance(error, StoreFailed)
                if isinstance(error, Unavailable):
                    break
            except Exception as error:
                _log.exception("a call to a server failed on a bug", extra={"fields": {"server": server}})
                return first or f"internal error: {type(error).__name__}", of_store
        return first, of_store

    def _post(self, server: str, url: str, timeout_ms: int) -> None:
        timeout = httpx.Timeout(timeout_ms / 1000, connect=INTERNAL_REQUEST_TIMEOUT_MS / 1000)
        try:
            response = self._client.post(url, headers={CAUSE_HEADER: current_cause()}, timeout=timeout)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed by a stop
            raise Unavailable(f"server {server} did not answer {url}: {type(error).__name__} {error}") from error
        raise_for(response, f"server {server} refused {url}")


class Repair:
    def __init__(
        self, catalog: Catalog, instances: Instances, streams: Streams, policy: Callable[[TableRecord], StorePolicy],
        clock: Clock, *, calls: ServerCalls | None = None, safeguards: Safeguards = ALL,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._instances = instances
        self._streams = streams
        self._policy = policy
        self._clock = clock
        self._calls = calls or ServerCalls(instances)
        self._copies = CopiesRepair(safeguards)
        self._said = Said()
        self._liveness = Liveness()
        self.report = RepairReport()
        with catalog.lock:
            for table in catalog.tables:
                self._put_table(table)
            catalog.on_record(self._on_record)

    def close(self) -> None:
        self._calls.close()

    # --- the index ------------------------------------------------------------------------------------------------

    def _on_record(self, key: str, record: Record | None) -> None:
        _, kind, table, *rest = key.split("/")
        if kind == "tables" and isinstance(record, TableRecord):
            self._put_table(table)
        elif kind == "segments" and isinstance(record, SegmentMetadata):
            if table in self._catalog.tables:
                self._copies.put(table, record, self._wants(table), self._clock.now_ms())
        elif kind == "segments":
            self._copies.remove(table, rest[0])

    def _put_table(self, table: str) -> None:
        wants, now_ms = self._wants(table), self._clock.now_ms()
        for segment in self._catalog.segments.get(table, {}).values():
            self._copies.put(table, segment, wants, now_ms)

    def _wants(self, table: str) -> Wants:
        record = self._catalog.tables[table]
        return Wants(self._policy(record), record.config.replication)

    def hurry(self, table: str, segments: list[str]) -> list[str]:
        """Those of the segments that miss something: repair looks at them in its next run, whatever was tried."""
        with self._catalog.lock:
            return [name for name in segments if self._copies.hurry(Key(table, name))]

    def causes(self, table: str) -> dict[str, str]:
        """Segment -> why it could not be mended so far."""
        with self._catalog.lock:
            return {key.segment: why for key, why in self._copies.causes().items() if key.table == table}

    # --- copies ---------------------------------------------------------------------------------------------------

    def run_copies(self) -> None:
        with self._catalog.lock:
            self._copies.notice(frozenset(self._instances.live(Role.SERVER)), self._clock.now_ms())
            asked = self._copies.without_copy()
        log_earliest = self._ask_logs(asked) if asked else {}
        with self._catalog.lock:
            reports = self._instances.reports() if self._copies.missing() else None
        read = self._said.take(reports) if reports is not None else 0
        with self._catalog.lock:
            live = frozenset(self._instances.live(Role.SERVER))
            missing = self._copies.missing()
            if missing and reports is None:  # what it misses came up in this moment: it has the next run
                return
            situation = Situation(
                live, self._said.of(missing), log_earliest, self._moving(),
                leaving=live.difference(self._instances.usable()), homes=self._homes(missing),
            )  # fmt: skip
            run = self._copies.step(situation, self._clock.now_ms())
            # Uploads first: they are under way for the index, whatever becomes of a write (a full disk).
            for order in run.orders:
                if isinstance(order, Upload):
                    self._upload(order)
            written = self._write([order for order in run.orders if not isinstance(order, Upload)])
            before = self.report
            self.report = msgspec.structs.replace(
                before, missing=run.missing, looked_at=run.looked_at, written=written, reports_read=read,
                runs_total=before.runs_total + 1, looked_at_total=before.looked_at_total + run.looked_at,
                written_total=before.written_total + written, reports_read_total=before.reports_read_total + read,
            )  # fmt: skip

    def _moving(self) -> frozenset[str]:
        return frozenset(table for table in self._catalog.jobs if running_rebalance(self._catalog, table) is not None)

    def _homes(self, missing: Collection[Key]) -> dict[tuple[str, int], tuple[str, ...]]:
        """Who consumes the partitions of these segments."""
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        for table, segment in missing:
            partition = self._catalog.segments[table][segment].partition
            record = self._catalog.partitions.get(table, {}).get(partition)
            if record is not None:
                found[table, partition] = record.replicas
        return found

    def _ask_logs(self, asked: frozenset[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """First offsets of epoch logs; those that do not answer are left out. The lock is not held."""
        found: dict[tuple[str, int], int] = {}
        for table in sorted({table for table, _ in asked}):
            record = self._catalog.tables.get(table)
            if record is None:
                continue
            topic = epoch_topic(table, record.incarnation)
            partitions = sorted(partition for name, partition in asked if name == table)

            def earliest(log: Log, topic: str = topic, partitions: list[int] = partitions) -> dict[int, int]:
                return {partition: log.earliest(topic, partition) for partition in partitions}

            try:
                offsets = self._streams.of_epochs(earliest)
            except CremantError as error:
                log_failure(_log, "an epoch log does not say where it begins", error, table=table)
                continue
            found |= {(table, partition): offset for partition, offset in offsets.items()}
        return found

    def _write(self, orders: Sequence[Assign | Prune | RecordLoss | TakeBackLoss]) -> int:
        """In one commit, however many they are: the lock is held. Returns how many records were written."""
        changes: dict[str, Record | None] = {segment_key(*order.key): self._changed(order) for order in orders}
        if changes:
            self._catalog.commit(changes, unchanged={table_key(order.key.table) for order in orders})
        for order in orders:
            _tell(order)
        return len(changes)

    def _changed(self, order: Assign | Prune | RecordLoss | TakeBackLoss) -> SegmentMetadata:
        """The record as it is to be."""
        segment = self._catalog.segments[order.key.table][order.key.segment]
        match order:
            case Assign(replicas=replicas):
                copies = {holder: copy for holder, copy in segment.copies.items() if holder in replicas}
                return msgspec.structs.replace(segment, replicas=replicas, copies=copies)
            case Prune(holders=holders):
                copies = {holder: copy for holder, copy in segment.copies.items() if holder not in holders}
                return msgspec.structs.replace(segment, copies=copies)
            case RecordLoss(loss=loss):
                return msgspec.structs.replace(segment, lost=loss)
            case TakeBackLoss():
                return msgspec.structs.replace(segment, lost=None)
            case _:
                assert_never(order)

    def _upload(self, order: Upload) -> None:
        key = order.key
        log_event(_log, "repair: asks for an upload", table=key.table, segment=key.segment, server=order.server)

        def ended(error: str, *, of_store: bool = False) -> None:
            with self._catalog.lock:
                self._copies.ended(order, error, self._clock.now_ms(), of_store=of_store)
                before = self.report
                self.report = msgspec.structs.replace(
                    before, uploading=before.uploading - 1, uploads_total=before.uploads_total + (not error),
                    upload_failures_total=before.upload_failures_total + bool(error),
                )  # fmt: skip
            if error:
                log_event(
                    _log, "repair: no upload", level=logging.WARNING, segment=key.segment, server=order.server,
                    error=error,
                )  # fmt: skip

        self.report = msgspec.structs.replace(self.report, uploading=self.report.uploading + 1)
        path = f"/segments/{key.table}_REALTIME/{key.segment}/upload"
        self._calls.post(order.server, [path], REPAIR_UPLOAD_TIMEOUT_MS, ended)

    # --- liveness -------------------------------------------------------------------------------------------------

    def run_liveness(self) -> None:
        with self._catalog.lock:
            live = frozenset(self._instances.live(Role.SERVER))
            orders = self._liveness.step(
                {name: list(self._catalog.partitions.get(name, {}).values()) for name in self._catalog.tables},
                live, self._stopped(), self._clock.now_ms(),
                moving=self._moving(), leaving=live.difference(self._instances.usable()),
            )  # fmt: skip
            self._place([order for order in orders if isinstance(order, Place)])
            resets: dict[str, dict[str, list[str]]] = {}
            for order in orders:
                if isinstance(order, Reset):
                    stopped = order.stopped
                    resets.setdefault(stopped.table, {}).setdefault(stopped.server, []).append(stopped.segment)
            for table, wanted in resets.items():
                log_event(_log, "repair: starts stopped replicas again", table=table, segments=wanted)
                self.reset(table, wanted)

    def _stopped(self) -> list[Stopped]:
        found = []
        for instance, report in self._instances.reports().items():
            for tail in report.tails:
                record = self._catalog.tables.get(tail.table)
                partition = self._catalog.partitions.get(tail.table, {}).get(tail.partition)
                if tail.state != _STOPPED or record is None or partition is None:
                    continue
                if tail.incarnation == record.incarnation and instance in partition.replicas:
                    found.append(Stopped(tail.table, tail.partition, partition.consuming, instance))
        return found

    def _place(self, orders: Sequence[Place]) -> None:
        """In one commit: a server that stays away may have been in hundreds of partitions."""
        before = [self._catalog.partitions[order.table][order.partition] for order in orders]
        changes: dict[str, Record | None] = {}
        for order, record in zip(orders, before, strict=True):
            opened = self._catalog.segments[order.table][record.consuming]
            changes[partition_key(order.table, order.partition)] = msgspec.structs.replace(
                record, replicas=order.replicas
            )
            changes[segment_key(order.table, opened.name)] = msgspec.structs.replace(opened, replicas=order.replicas)
        if changes:
            self._catalog.commit(changes, unchanged={table_key(order.table) for order in orders})
        for order, record in zip(orders, before, strict=True):
            log_event(
                _log, "repair: a partition goes on elsewhere", table=order.table, partition=order.partition,
                segment=record.consuming, before=list(record.replicas), replicas=list(order.replicas),
            )  # fmt: skip

    def reset(self, table: str, wanted: Mapping[str, Sequence[str]]) -> None:
        """Asks servers to begin with their replicas of these segments anew; their reports say what comes of it."""
        for server, segments in wanted.items():

            def ended(error: str, *, of_store: bool = False, server: str = server) -> None:
                if error:
                    log_event(
                        _log, "replicas were not reset", level=logging.WARNING, table=table, server=server, error=error
                    )

            paths = [f"/segments/{table}_REALTIME/{segment}/reset" for segment in segments]
            self._calls.post(server, paths, INTERNAL_REQUEST_TIMEOUT_MS, ended)


def _tell(order: Assign | Prune | RecordLoss | TakeBackLoss) -> None:
    table, segment = order.key
    match order:
        case Assign(replicas=replicas, reason=reason):
            log_event(
                _log, "repair: replicas changed", table=table, segment=segment, replicas=list(replicas), reason=reason
            )
        case Prune(holders=holders):
            log_event(_log, "repair: no holder any more", table=table, segment=segment, holders=list(holders))
        case RecordLoss(loss=loss):
            log_event(
                _log, "segment lost", level=logging.ERROR, table=table, segment=segment, rows=loss.rows,
                start_offset=loss.start_offset, end_offset=loss.end_offset, why=loss.cause,
            )  # fmt: skip
        case TakeBackLoss():
            log_event(_log, "a lost segment is back", table=table, segment=segment)
        case _:
            assert_never(order)
