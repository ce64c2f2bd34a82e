# SPDX-License-Identifier: Apache-2.0
"""The controller without its HTTP: the parts wired together, started and stopped as one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.commits import Commits
from cremant.controller.compactions import TableCompactions
from cremant.controller.force_commits import ForceCommits
from cremant.controller.freshness import FreshnessBoard
from cremant.controller.housekeeping import (
    CLAIM_INTERVAL_MS,
    GROWTH_INTERVAL_MS,
    LOOK_INTERVAL_MS,
    RETENTION_INTERVAL_MS,
    SWEEP_INTERVAL_MS,
    SWEEP_UNFINISHED_INTERVAL_MS,
    TRIM_INTERVAL_MS,
    Duty,
    Housekeeping,
    Janitor,
)
from cremant.controller.instances import Instances
from cremant.controller.objects import Objects
from cremant.controller.pipelines import Pipelines
from cremant.controller.rebalances import Rebalances
from cremant.controller.repair import Repair
from cremant.controller.rewinds import Rewinds
from cremant.controller.schemas import Schemas
from cremant.controller.streams import LogSource, Streams
from cremant.controller.tables import SERVERS_GRACE_MS, Tables
from cremant.controller.view import ViewBoard
from cremant.model.cluster import TableRecord
from cremant.model.completion import StorePolicy, policy_of
from cremant.model.errors import NoResource, Unavailable
from cremant.shell.journal import Journal
from cremant.shell.logs import log_failure
from cremant.store.deepstore import DeepStore
from cremant.store.lease import Leadership, last_lease, lead
from cremant.store.metadata import MetadataStore
from cremant.wire.messages import Heartbeat, HeartbeatReply

_log = logging.getLogger(__name__)

LEADER = "controller"
LEADER_LEASE_MS = 15_000
_LEASE_INTERVAL_MS = LEADER_LEASE_MS // 3
REPAIR_INTERVAL_MS = 2_000


class Controller:
    """Owns the catalog and everything that changes it. Thread-safe; blocking calls belong on a thread pool."""

    def __init__(
        self,
        store: MetadataStore,
        logs: LogSource,
        deep_store: DeepStore,
        *,
        name: str = "Controller",
        has_store: bool = False,
        servers_grace_ms: int = SERVERS_GRACE_MS,
        take_over: bool = True,
        expire_streams: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`has_store`: a store is configured; `deep_store` is not just the embedded directory.
        `take_over`: the caller has made sure that no other process leads this store (it holds the directory).
        `expire_streams` applies the log's own retention by age, where somebody must ask for it."""
        self.clock = clock or Clock()
        self.store = store
        self.streams = Streams(logs)
        self.deep_store = deep_store
        self.has_store = has_store
        self.name = name
        #: What this process did to segments, if it keeps a journal.
        self.journal: Journal | None = None
        self.on_deposed: Callable[[], None] = lambda: None
        before = last_lease(store, LEADER)
        leadership = self._lead(take_over=take_over)
        if leadership is None:
            raise Unavailable("another controller leads this metadata store")
        self.catalog = Catalog(store, leadership)
        self.instances = Instances(self.catalog, self.clock)
        self.view = ViewBoard(self.catalog, self.instances)
        self.freshness = FreshnessBoard(
            self.catalog, self.instances, self.streams, self.clock, name
        )  # fmt: skip
        self.schemas = Schemas(self.catalog)
        self.tables = Tables(
            self.catalog, self.instances, self.streams, deep_store, self.clock, servers_grace_ms=servers_grace_ms
        )
        self.pipelines = Pipelines(
            self.catalog, self.instances, self.clock, lambda: self.janitor.retention_now_ms()
        )  # fmt: skip
        self.commits = Commits(self.catalog, self.instances, self.clock)
        self.rebalances = Rebalances(self.catalog, self.instances, self.clock)
        self.force_commits = ForceCommits(self.catalog, self.instances, self.streams, self.clock)
        self.repair = Repair(self.catalog, self.instances, self.streams, self.policy, self.clock)
        self.objects = Objects(self.catalog, deep_store, self.clock)
        self.compactions = TableCompactions(self.catalog, self.instances, self.objects, self.clock)
        self.rewinds = Rewinds(self.catalog, self.streams, self.objects, self.clock)
        self.janitor = Janitor(self.catalog, self.instances, self.tables, self.streams, self.objects, self.clock)
        if before is not None:
            self.janitor.doubt_clock(before.until_ms)
        self._expire_streams = expire_streams or (lambda: None)
        self._housekeeping = [
            Housekeeping("timers", self._timers(), self.clock, lambda: self.on_deposed()),
            Housekeeping("chores", self._chores(), self.clock, lambda: self.on_deposed()),
            Housekeeping("repair of consumption", self._consumption(), self.clock, lambda: self.on_deposed()),
            Housekeeping("repair of copies", self._copies(), self.clock, lambda: self.on_deposed()),
        ]

    def policy(self, record: TableRecord) -> StorePolicy:
        """Where sealed segments of a table must be."""
        return policy_of(record.config, has_store=self.has_store)

    def _timers(self) -> list[Duty]:
        """What must not wait for anybody: memory and the metadata store only."""
        return [
            Duty("liveness", 0, self._refresh_liveness),
            Duty("leader lease", _LEASE_INTERVAL_MS, lambda: self.catalog.renew(self._lead())),
            Duty("rebalance", 0, self.rebalances.run),
            Duty("force commits", 0, self.force_commits.run),
        ]

    def _consumption(self) -> list[Duty]:
        """What keeps partitions consumed: it waits for no store and no server."""
        return [
            Duty("repair of consumption", REPAIR_INTERVAL_MS, self.repair.run_liveness),
            Duty("growth", GROWTH_INTERVAL_MS, self.janitor.grow_tables),
        ]

    def _copies(self) -> list[Duty]:
        return [
            Duty("repair of copies", REPAIR_INTERVAL_MS, self.repair.run_copies),
            Duty("compaction", REPAIR_INTERVAL_MS, self.compactions.run),
        ]

    def _chores(self) -> list[Duty]:
        """What asks logs and the deep store, which may take their time."""
        return [
            Duty("claim store", CLAIM_INTERVAL_MS, self.objects.keep_claimed),
            Duty("finish drops", 0, self.tables.finish_drops),
            Duty("retention", RETENTION_INTERVAL_MS, self.janitor.expire_segments),
            Duty("expire keys", RETENTION_INTERVAL_MS, self.pipelines.expire_keys),
            Duty("trim", TRIM_INTERVAL_MS, self.janitor.trim_epoch_logs),
            Duty("expire streams", RETENTION_INTERVAL_MS, self._expire_streams),
            Duty("look at stored objects", LOOK_INTERVAL_MS, self.objects.look),
            Duty("sweep store", SWEEP_INTERVAL_MS, self.objects.sweep),
            Duty("sweep unfinished uploads", SWEEP_UNFINISHED_INTERVAL_MS, self.objects.sweep_unfinished),
        ]

    def _lead(self, *, take_over: bool = False) -> Leadership | None:
        holder = f"{self.name}:{os.getpid()}:{id(self)}"
        now_ms = self.clock.now_ms()
        return lead(self.store, LEADER, holder, now_ms=now_ms, lease_ms=LEADER_LEASE_MS, take_over=take_over)

    def start(self) -> None:
        self.view.start()
        for thread in self._housekeeping:
            thread.start()

    def stop(self) -> None:
        for thread in self._housekeeping:
            thread.stop()
        self.repair.close()
        self.view.stop()

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        report = self.instances.whole_report(beat)
        if report is None:
            return self._reply(say_all=True)
        if self.instances.heartbeat(beat, report):
            self.view.mark_dirty()
        try:
            if not beat.segments_kept or self.instances.is_due_to_be_looked_at(beat.instance.id):
                with self.catalog.lock:
                    if self.instances.is_newest(beat):  # what is late may name copies that are gone
                        self.commits.heard(beat.instance.id, report)
        except NoResource as error:  # said again with the next heartbeat; a full disk must not look like a death
            log_failure(_log, "what a heartbeat says of segments could not be written", error)
        return self._reply()

    def _reply(self, *, say_all: bool = False) -> HeartbeatReply:
        return HeartbeatReply(
            controller_nonce=self.view.nonce, view_version=self.view.version, now_ms=self.clock.now_ms(),
            say_all=say_all,
        )  # fmt: skip

    def _refresh_liveness(self) -> None:
        if self.instances.refresh_liveness():
            self.view.mark_dirty()

    def ready(self) -> tuple[bool, str]:
        if self.view.version == 0:
            return False, "no view is published yet"
        return True, ""
