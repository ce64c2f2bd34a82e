# SPDX-License-Identifier: Apache-2.0
"""How fresh tables are, as the controller sees it: from heartbeats, and ends of streams that it reads when asked.

Rules: the last word of a process is kept when it dies, with its age, so that what it held back is named; a stream is
asked once for all who want to know at the same time, within LOOK_MS, and never by metrics.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cremant.cluster.freshness import Observed, freshness_of_table
from cremant.cluster.moves import Moves
from cremant.cluster.stages import SILENT_AFTER_MS
from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.streams import Streams
from cremant.model.cluster import CATCHING_UP, PartitionView, PipelineRecord, TableView, TailReport
from cremant.model.errors import CremantError
from cremant.model.names import REALTIME_SUFFIX
from cremant.wire.freshness import TableFreshness, Upstream

#: A stream that takes longer to say where it ends does not answer: whoever asks wants to know within two seconds.
LOOK_MS = 1_000
#: Ends are as good as new for so long.
ENDS_KEPT_MS = 200
#: States of a tail that no query is answered from.
_NOT_SERVING = frozenset({CATCHING_UP, "stopped", "waiting"})


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a stream ended at `read_ms`, by partition; or why that is not known."""

    offsets: dict[int, int]
    read_ms: int
    error: str | None = None


_UNREAD = Ends({}, 0)


class FreshnessBoard:
    """Thread-safe."""

    def __init__(self, catalog: Catalog, instances: Instances, streams: Streams, clock: Clock, name: str) -> None:
        self._catalog, self._instances = catalog, instances
        self._streams, self._clock, self._name = streams, clock, name
        self._guard = threading.Lock()
        self._ends: dict[str, Ends] = {}
        self._looking: dict[str, threading.Lock] = {}
        self._moves = Moves()

    def of(self, table: TableView, *, look: bool = True) -> TableFreshness:
        """`look`: asks the stream where it ends."""
        record, now_ms = table.record, self._clock.now_ms()
        ends = self._look(table) if look else _UNREAD
        heard = self._instances.last_tails(table.name, record.incarnation)
        tails: dict[int, dict[str, TailReport]] = {}
        responding = {name for name, (_, age_ms) in heard.items() if age_ms <= SILENT_AFTER_MS}
        for name, (said, _) in heard.items():
            for tail in said:
                tails.setdefault(tail.partition, {})[name] = tail
        with self._guard:
            moved_ms = self._moves.look(record.incarnation, tails, now_ms)
        alive = {name for name in heard if self._instances.is_alive(name)}
        return freshness_of_table(
            Observed(
                table=table,
                now_ms=max(now_ms, self._clock.now_ms()),
                tails=tails,
                responding=responding,
                serving={
                    (partition, name)
                    for partition, said_of in tails.items()
                    for name, tail in said_of.items()
                    if name in alive & responding and tail.state not in _NOT_SERVING
                },
                live=alive,
                upstream=self._upstream(table, ends),
                ends_read_ms=ends.read_ms,
                moved_ms=moved_ms,
                observer=self._name,
            )
        )

    def upstream(self, table: TableView) -> Upstream:
        """What a broker cannot know: asks the stream where it ends."""
        return self._upstream(table, self._look(table))

    def _upstream(self, table: TableView, ends: Ends) -> Upstream:
        record = table.record
        found = self._instances.last_pipeline(table.name, record.incarnation, table.pipeline_record.holder)
        name, report, age_ms = found if found is not None else (None, None, None)
        return Upstream(
            incarnation=record.incarnation, pipeline=report, pipeline_id=name, age_ms=age_ms, ends=ends.offsets,
            stream_error=ends.error,
        )  # fmt: skip

    def _look(self, table: TableView) -> Ends:
        name = table.record.incarnation
        with self._guard:
            looking = self._looking.setdefault(name, threading.Lock())
        with looking:
            known = self._ends.get(name)
            if known is None or self._clock.now_ms() - known.read_ms > ENDS_KEPT_MS:
                known = self._ends[name] = self._read_ends(table)
                self._forget()
            return known

    def _read_ends(self, table: TableView) -> Ends:
        began_ms = self._clock.now_ms()
        partitions = [view.record.partition for view in table.partitions]
        try:
            offsets = self._streams.ends(table.record.config.stream, partitions, timeout_ms=LOOK_MS)
        except CremantError as error:
            return Ends({}, self._clock.now_ms(), str(error))
        return Ends(offsets, began_ms)

    def _forget(self) -> None:
        """Of tables that are gone."""
        with self._catalog.lock:
            alive = {record.incarnation for record in self._catalog.tables.values()}
        with self._guard:
            self._ends = {name: ends for name, ends in self._ends.items() if name in alive}
            self._looking = {name: lock for name, lock in self._looking.items() if name in alive}
            self._moves.keep(alive)

    def all(self) -> dict[str, TableFreshness]:
        """Of every table, for metrics: nobody is asked, and segments, of which there may be many, are not looked at."""
        catalog = self._catalog
        with catalog.lock:
            tables = {
                name: TableView(
                    record=record,
                    partitions=tuple(
                        PartitionView(record=partition, consuming=catalog.segments[name][partition.consuming])
                        for _, partition in sorted(catalog.partitions.get(name, {}).items())
                    ),
                    segments=(),
                    pipeline_record=catalog.pipelines.get(name, PipelineRecord()),
                )
                for name, record in sorted(catalog.tables.items())
            }
        return {name + REALTIME_SUFFIX: self.of(table, look=False) for name, table in tables.items()}
