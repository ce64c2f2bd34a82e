# SPDX-License-Identifier: Apache-2.0
"""Housekeeping: what the controller does by itself, each duty at its own interval, one after the other.

Rule: a duty that fails is logged and tried again at its next turn; it never stops the others. The exception is losing
the leadership: then this controller must not go on.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cremant.cluster.retention import expired, hidden
from cremant.completion.copies import trim_floor
from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.objects import Objects
from cremant.controller.streams import Round, Streams
from cremant.controller.tables import Tables
from cremant.log.api import Log
from cremant.model.cluster import Expiry, TableRecord, TailReport, segment_key
from cremant.model.errors import CremantError, PeerError
from cremant.model.limits import HEARTBEAT_MS, QUERY_TIMEOUT_MS, UPSERT_EXPIRY_PATIENCE_MS
from cremant.model.names import epoch_topic
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.shell.logs import cause, log_event, log_failure
from cremant.store.metadata import StoreConflict

_log = logging.getLogger(__name__)

TICK_S = HEARTBEAT_MS / 1000
GROWTH_INTERVAL_MS = 3_000
RETENTION_INTERVAL_MS = 60_000
TRIM_INTERVAL_MS = 60_000
CLAIM_INTERVAL_MS = 5_000
LOOK_INTERVAL_MS = 5_000
SWEEP_INTERVAL_MS = 60_000
SWEEP_UNFINISHED_INTERVAL_MS = 3_600_000
#: A start this long after the last sign of life: a long stop, or a wall clock that is wrong. Retention waits, so that
#: somebody may notice before data goes.
CLOCK_DOUBT_MS = 24 * 3_600_000
CLOCK_DOUBT_WAIT_MS = 3_600_000


@dataclass(slots=True)
class Duty:
    name: str
    interval_ms: int
    run: Callable[[], object]
    due_ms: int = 0


class Housekeeping:
    """One thread. `on_deposed` is called once if another controller took over."""

    def __init__(self, name: str, duties: list[Duty], clock: Clock, on_deposed: Callable[[], None]) -> None:
        self._duties = duties
        self._clock = clock
        self._on_deposed = on_deposed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run_forever(self) -> None:
        while not self._stopping.wait(TICK_S):
            with cause():
                if not self.run_due():
                    return

    def run_due(self) -> bool:
        """Runs what is due; False when this controller was deposed."""
        for duty in self._duties:
            if duty.due_ms > self._clock.now_ms():
                continue
            duty.due_ms = self._clock.now_ms() + duty.interval_ms
            try:
                duty.run()
            except StoreConflict as error:
                log_failure(_log, "another controller took over: this one stops", error, duty=duty.name)
                self._on_deposed()
                return False
            except Exception as error:
                _log.warning(
                    "housekeeping duty failed",
                    exc_info=error,
                    extra={"fields": {"duty": duty.name, "error": str(error)}},
                )
        return True


class Janitor:
    """Growth, retention and trimming: carries out `cluster.retention`."""

    def __init__(
        self, catalog: Catalog, instances: Instances, tables: Tables, streams: Streams, objects: Objects, clock: Clock
    ) -> None:
        self._catalog = catalog
        self._instances = instances
        self._tables = tables
        self._streams = streams
        self._objects = objects
        self._clock = clock
        self._retention_from_ms = 0
        #: Incarnation -> the last expiry that all servers have applied, and since when.
        self._expiries: dict[str, tuple[Expiry, int]] = {}

    def doubt_clock(self, last_alive_ms: int) -> None:
        """At a start; `last_alive_ms`: when a controller of this store was last known to live."""
        ahead_ms = self._clock.now_ms() - last_alive_ms
        if ahead_ms > CLOCK_DOUBT_MS:
            self._retention_from_ms = self._clock.now_ms() + CLOCK_DOUBT_WAIT_MS
            log_event(
                _log, "the clock is far ahead of the last sign of life: retention waits an hour", ahead_ms=ahead_ms,
                level=logging.WARNING,
            )  # fmt: skip

    def grow_tables(self) -> None:
        streams = Round()
        for name, record in sorted(self._catalog.tables.items()):
            try:
                streams.ask(record.config.stream, functools.partial(self._tables.grow, name))
            except StoreConflict:
                raise
            except CremantError as error:  # a deleted topic, a refused login, too few servers: this table's alone
                log_failure(_log, "growth check skipped", error, table=name)

    def expire_segments(self) -> int:
        """Deletes segments past their table's retention. Records go first, bytes after: a crash in between leaves
        objects that no record names, which are swept. Of a wall clock that jumped and our own clock, the
        earlier one counts."""
        count, now_ms = 0, self.retention_now_ms()
        if now_ms is None:
            return 0
        known = {record.incarnation for record in self._catalog.tables.values()}
        self._expiries = {incarnation: seen for incarnation, seen in self._expiries.items() if incarnation in known}
        for name, record in sorted(self._catalog.tables.items()):
            with self._catalog.lock:
                segments = self._catalog.segments.get(name, {})
                due = expired(segments.values(), record.config.retention_ms, now_ms)
                if due and record.config.upsert is not None and record.config.upsert.retained_ms is not None:
                    late = expired(due, record.config.retention_ms, now_ms - UPSERT_EXPIRY_PATIENCE_MS)
                    due = [*late, *(one for one in hidden(due, self._applied_expiry(record)) if one not in late)]
            count += self.delete_segments(name, due)
        return count

    def retention_now_ms(self) -> int | None:
        """What retention goes by; None while the clock is in doubt."""
        if self._clock.now_ms() < self._retention_from_ms:
            return None
        return min(self._clock.now_ms(), self._clock.wall_ms())

    def _applied_expiry(self, record: TableRecord) -> Expiry | None:
        """The table's last one, once every server has applied it for so long that nobody asks for what was before."""
        name, upsert = record.config.name, record.config.upsert
        expiry, seen = self._catalog.pipelines[name].expiry, self._expiries.get(record.incarnation)
        if expiry is None or upsert is None:
            return None
        if seen is None or seen[0] != expiry:
            tails = self._instances.tails(name, record.incarnation)
            if not all(
                (servers := tails.get(str(partition))) and all(_has_applied(tail, expiry) for tail in servers.values())
                for partition in self._catalog.partitions.get(name, {})
            ):
                return None
            seen = self._expiries[record.incarnation] = expiry, self._clock.now_ms()
        return expiry if self._clock.now_ms() - seen[1] >= max(upsert.history_ms, QUERY_TIMEOUT_MS) else None

    def delete_segments(self, table: str, segments: list[SegmentMetadata]) -> int:
        """Sealed segments only; those that are gone meanwhile are skipped."""
        deleted = []
        record = self._catalog.tables.get(table)
        for segment in segments if record is not None else ():
            with self._catalog.lock:
                known = self._catalog.segments.get(table, {}).get(segment.name)
                if known is None or known.status is not SegmentStatus.DONE:
                    continue
                self._catalog.commit({segment_key(table, segment.name): None})
                deleted.append(known)
        if record is not None:
            for url in (url for segment in deleted for url in segment.objects):
                self._objects.delete(record, url)
        if deleted:
            log_event(_log, "segments deleted", table=table, segments=[segment.name for segment in deleted])
        return len(deleted)

    def trim_epoch_logs(self) -> None:
        for name, record in sorted(self._catalog.tables.items()):
            topic = epoch_topic(name, record.incarnation)
            with self._catalog.lock:
                segments = list(self._catalog.segments.get(name, {}).values())
                partitions = sorted(self._catalog.partitions.get(name, {}))
                tails = self._instances.tails(name, record.incarnation)
                snapshots = self._instances.snapshots(name) if record.config.upsert is not None else None
            floors = {}
            for partition in partitions:
                visible = [tail.watermark.next_offset for tail in tails.get(str(partition), {}).values()]
                own = [segment for segment in segments if segment.partition == partition]
                floors[partition] = trim_floor(own, visible, snapshots=snapshots)
            try:
                self._trim(topic, {partition: floor for partition, floor in floors.items() if floor > 0})
            except PeerError as error:
                log_failure(_log, "the epoch log does not answer, it is trimmed later", error, topic=topic)
                return
            except CremantError as error:
                log_failure(_log, "an epoch log cannot be trimmed", error, topic=topic)

    def _trim(self, topic: str, floors: dict[int, int]) -> None:
        def trim(log: Log) -> None:
            for partition, floor in floors.items():
                log.trim(topic, partition, floor)

        if floors:
            self._streams.of_epochs(trim)


def _has_applied(tail: TailReport, expiry: Expiry) -> bool:
    return tail.versions is not None and tail.versions.closed >= expiry.epoch
