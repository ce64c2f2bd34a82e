# SPDX-License-Identifier: Apache-2.0
"""The controller without its HTTP: the parts wired together, started and stopped as one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.commits import Commits
from cremant.controller.housekeeping import (
    GROWTH_INTERVAL_MS,
    RETENTION_INTERVAL_MS,
    SWEEP_INTERVAL_MS,
    Duty,
    Housekeeping,
    Janitor,
)
from cremant.controller.instances import Instances
from cremant.controller.pipelines import Pipelines
from cremant.controller.schemas import Schemas
from cremant.controller.tables import SERVERS_GRACE_MS, Tables
from cremant.controller.view import ViewBoard
from cremant.log.api import Log
from cremant.model.errors import Unavailable
from cremant.store.deepstore import DeepStore
from cremant.store.lease import Leadership, lead
from cremant.store.metadata import MetadataStore
from cremant.wire.messages import Heartbeat, HeartbeatReply

_log = logging.getLogger(__name__)

LEADER = "controller"
LEADER_LEASE_MS = 15_000
_LEASE_INTERVAL_MS = LEADER_LEASE_MS // 3


class Controller:
    """Owns the catalog and everything that changes it. Thread-safe; blocking calls belong on a thread pool."""

    def __init__(
        self,
        store: MetadataStore,
        log: Log,
        deep_store: DeepStore,
        *,
        name: str = "Controller",
        servers_grace_ms: int = SERVERS_GRACE_MS,
        take_over: bool = True,
        expire_streams: Callable[[], None] | None = None,
    ) -> None:
        """`take_over`: the caller has made sure that no other process leads this store (it holds the directory).
        `expire_streams` applies the log's own retention by age, where somebody must ask for it."""
        self.clock = Clock()
        self.store = store
        self.log = log
        self.deep_store = deep_store
        self.name = name
        self.on_deposed: Callable[[], None] = lambda: None
        leadership = self._lead(take_over=take_over)
        if leadership is None:
            raise Unavailable("another controller leads this metadata store")
        self.catalog = Catalog(store, leadership)
        self.instances = Instances(self.catalog, self.clock)
        self.view = ViewBoard(self.catalog, self.instances)
        self.schemas = Schemas(self.catalog)
        self.tables = Tables(
            self.catalog, self.instances, log, deep_store, self.clock, servers_grace_ms=servers_grace_ms
        )
        self.pipelines = Pipelines(self.catalog, self.instances, self.clock)
        self.commits = Commits(self.catalog, self.clock)
        self.janitor = Janitor(self.catalog, self.instances, self.tables, log, deep_store, self.clock)
        self._expire_streams = expire_streams or (lambda: None)
        self._housekeeping = Housekeeping(self._duties(), self.clock, lambda: self.on_deposed())

    def _duties(self) -> list[Duty]:
        return [
            Duty("liveness", 0, self._refresh_liveness),
            Duty("leader lease", _LEASE_INTERVAL_MS, lambda: self.catalog.renew(self._lead())),
            Duty("finish drops", 0, self.tables.finish_drops),
            Duty("growth", GROWTH_INTERVAL_MS, self.janitor.grow_tables),
            Duty("retention", RETENTION_INTERVAL_MS, self.janitor.expire_segments),
            Duty("trim", RETENTION_INTERVAL_MS, self.janitor.trim_epoch_logs),
            Duty("expire streams", RETENTION_INTERVAL_MS, self._expire_streams),
            Duty("sweep topics", SWEEP_INTERVAL_MS, self.tables.sweep_topics),
            Duty("sweep store", SWEEP_INTERVAL_MS, self.janitor.sweep_store),
        ]

    def _lead(self, *, take_over: bool = False) -> Leadership | None:
        holder = f"{self.name}:{os.getpid()}:{id(self)}"
        now_ms = self.clock.now_ms()
        return lead(self.store, LEADER, holder, now_ms=now_ms, lease_ms=LEADER_LEASE_MS, take_over=take_over)

    def start(self) -> None:
        self.view.start()
        self._housekeeping.start()

    def stop(self) -> None:
        self._housekeeping.stop()
        self.view.stop()

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        if self.instances.heartbeat(beat):
            self.view.mark_dirty()
        self.commits.heard(beat.instance.id, beat.report)
        return HeartbeatReply(controller_nonce=self.view.nonce, view_version=self.view.version)

    def _refresh_liveness(self) -> None:
        if self.instances.refresh_liveness():
            self.view.mark_dirty()

    def ready(self) -> tuple[bool, str]:
        if self.view.version == 0:
            return False, "no view is published yet"
        return True, ""
