# SPDX-License-Identifier: Apache-2.0
"""All tables of one pipeline process: compares the cluster view with what runs, and makes the difference go away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cremant.log.open import Logs
from cremant.model.cluster import ClusterView, InstanceReport, Role, TableView
from cremant.model.limits import PIPELINE_STOP_MS
from cremant.model.settings import Settings
from cremant.pipeline.query import TableQuery, remove_run_dir
from cremant.pipeline.starter import Controller

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Supervisor:
    """Thread-safe. `on_view` never blocks for long: queries of dropped tables are ended by a thread of their own."""

    def __init__(
        self, session: Callable[[], SparkSession], logs: Logs, settings: Settings, controller: Controller, *,
        standby: bool = False,
    ) -> None:  # fmt: skip
        self._session = session
        self._logs = logs
        self._settings = settings
        self._controller = controller
        self._standby = standby
        self._lock = threading.Lock()
        self._queries: dict[str, TableQuery] = {}
        self._stopped = False
        self._view: ClusterView | None = None

    def on_view(self, view: ClusterView) -> None:
        with self._lock:
            if self._stopped:
                return
            self._view = view
            for name, query in list(self._queries.items()):
                table = view.tables.get(name)
                if table is None or table.record.incarnation != query.incarnation:
                    del self._queries[name]
                    threading.Thread(target=self._let_go, args=(name, query), name=f"drop-{name}", daemon=True).start()
            for name, table in view.tables.items():
                self._reconcile(name, table)

    def _reconcile(self, name: str, table: TableView) -> None:
        query = self._queries.get(name)
        if query is not None:
            query.update(table)
        elif table.partitions:
            query = TableQuery(
                self._session, self._logs, self._settings, self._controller, table, standby=self._standby,
                brokers=self._live_brokers,
            )  # fmt: skip
            self._queries[name] = query
            query.start()

    def _live_brokers(self) -> tuple[str, ...]:
        view = self._view
        return tuple(one.url for one in view.instances if one.live and one.role is Role.BROKER) if view else ()

    def _let_go(self, name: str, query: TableQuery) -> None:
        query.stop()
        if query.join(2 * PIPELINE_STOP_MS / 1000):
            remove_run_dir(self._settings, name, query.incarnation)

    def report(self) -> InstanceReport:
        with self._lock:
            queries = list(self._queries.values())
        return InstanceReport(pipelines=tuple(query.report() for query in queries))

    def queries(self) -> list[TableQuery]:
        with self._lock:
            return list(self._queries.values())

    def stop(self, timeout_s: float) -> None:
        """Ends all queries, after their epoch in flight where that is soon."""
        with self._lock:
            self._stopped = True
            queries = list(self._queries.values())
        for query in queries:
            query.stop()
        deadline = time.monotonic() + timeout_s
        for query in queries:
            query.join(max(0.0, deadline - time.monotonic()))
