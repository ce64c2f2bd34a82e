# SPDX-License-Identifier: Apache-2.0
"""Housekeeping: what the controller does by itself, each duty at its own interval, one after the other.

Rule: a duty that fails is logged and tried again at its next turn; it never stops the others. The exception is losing
the leadership: then this controller must not go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cremant.cluster.retention import expired, trim_floor
from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.tables import Tables
from cremant.log.api import Log
from cremant.model.cluster import segment_key
from cremant.model.errors import NotFound
from cremant.model.limits import HEARTBEAT_MS
from cremant.model.names import epoch_topic
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.shell.logs import cause, log_event, log_failure
from cremant.store.deepstore import DeepStore
from cremant.store.metadata import StoreConflict

_log = logging.getLogger(__name__)

TICK_S = HEARTBEAT_MS / 1000
GROWTH_INTERVAL_MS = 3_000
RETENTION_INTERVAL_MS = 60_000
SWEEP_INTERVAL_MS = 60_000
#: A stored object that no record names is removed once it is this old: no commit takes longer.
ORPHAN_OBJECT_AGE_MS = 2 * 3_600_000


@dataclass(slots=True)
class Duty:
    name: str
    interval_ms: int
    run: Callable[[], object]
    due_ms: int = 0


class Housekeeping:
    """One thread. `on_deposed` is called once if another controller took over."""

    def __init__(self, duties: list[Duty], clock: Clock, on_deposed: Callable[[], None]) -> None:
        self._duties = duties
        self._clock = clock
        self._on_deposed = on_deposed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_forever, name="housekeeping", daemon=True)

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
    """Retention, trimming and sweeping: carries out `cluster.retention`."""

    def __init__(
        self, catalog: Catalog, instances: Instances, tables: Tables, log: Log, deep_store: DeepStore, clock: Clock
    ) -> None:
        self._catalog = catalog
        self._instances = instances
        self._tables = tables
        self._log = log
        self._deep_store = deep_store
        self._clock = clock

    def grow_tables(self) -> None:
        for name in sorted(self._catalog.tables):
            try:
                self._tables.grow(name)
            except NotFound as error:  # the stream topic was deleted: the pipeline reports it
                log_failure(_log, "growth check skipped", error, table=name)

    def expire_segments(self) -> int:
        """Deletes segments past their table's retention. Records go first, bytes after: a crash in between leaves
        objects that no record names, which `sweep_store` removes."""
        count = 0
        for name, record in sorted(self._catalog.tables.items()):
            with self._catalog.lock:
                segments = self._catalog.segments.get(name, {})
                due = expired(segments.values(), record.config.retention_ms, self._clock.now_ms())
            count += self.delete_segments(name, due)
        return count

    def delete_segments(self, table: str, segments: list[SegmentMetadata]) -> int:
        """Sealed segments only; those that are gone meanwhile are skipped."""
        deleted = []
        for segment in segments:
            with self._catalog.lock:
                known = self._catalog.segments.get(table, {}).get(segment.name)
                if known is None or known.status is not SegmentStatus.DONE:
                    continue
                self._catalog.commit({segment_key(table, segment.name): None})
                deleted.append(known)
        for segment in deleted:
            if segment.store_url:
                self._deep_store.delete(self._deep_store.name_of(segment.store_url))
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
            for partition in partitions:
                visible = [tail.watermark.next_offset for tail in tails.get(str(partition), {}).values()]
                floor = trim_floor((s for s in segments if s.partition == partition), visible)
                if floor > 0:
                    self._log.trim(topic, partition, floor)

    def sweep_store(self) -> int:
        """Removes stored objects that no record names, once they are old enough. Returns how many."""
        candidates = [stored for stored in self._deep_store.list("") if stored.age_ms > ORPHAN_OBJECT_AGE_MS]
        with self._catalog.lock:
            named = {
                segment.store_url
                for segments in self._catalog.segments.values()
                for segment in segments.values()
                if segment.store_url
            }
        names = {self._deep_store.name_of(url) for url in named}
        orphans = [stored.name for stored in candidates if stored.name not in names]
        for name in orphans:
            self._deep_store.delete(name)
        return len(orphans)
