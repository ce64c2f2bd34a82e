# SPDX-License-Identifier: Apache-2.0
"""Pinot's BrokerResponse: every field, in Pinot's order; then Cremant's own fields, which clients ignore.

`resultTable` is left out when there is none (on errors). Clients count servers: queried and responded are always there.
Fields of Pinot that have no meaning here (thread times, trimming) are sent with their neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from cremant.cluster.gather_messages import QueryException
from cremant.cluster.shown import Mark
from cremant.model.table import FreshnessSla
from cremant.sql.plan import Plan, ResultColumn, Shape
from cremant.wire.messages import ServerAnswer

NO_PROMISE = FreshnessSla()


@dataclass(slots=True)
class Freshness:
    """What is proven about how new the answer is (freshness design). `fresh_ms` None: unknown, or no partition."""

    fresh_ms: int | None = None
    newest_event_ms: int | None = None
    source: str | None = None
    partitions_expected: int = 0
    partitions_reporting: int = 0
    #: What is shown of those that were answered in full.
    partitions: Mapping[int, Mark] = field(default_factory=dict)
    epoch: int | None = None
    read_token: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Rows of an answer: as JSON text, or as a table for who wants Arrow."""

    row_count: int
    rows: msgspec.Raw | None = None
    table: pa.Table | None = None


@dataclass(slots=True)
class BrokerResponse:
    """What a query ended with. `result` is None if it has none."""

    request_id: str
    broker_id: str | None
    client_request_id: str | None = None
    columns: tuple[ResultColumn, ...] = ()
    result: Result | None = None
    exceptions: list[QueryException] = field(default_factory=list)
    answers: list[ServerAnswer] = field(default_factory=list)
    tables: tuple[str, ...] = ()
    servers_queried: int = 0
    servers_responded: int = 0
    pruned_by_broker: int = 0
    trace: dict[str, str] = field(default_factory=dict)
    freshness: Freshness = field(default_factory=Freshness)
    #: What the table promises.
    sla: FreshnessSla = NO_PROMISE
    #: What became of a demand for freshness that was not met at once: waited, refused, partial; and how long it waited.
    stale: str | None = None
    waited_ms: float = 0.0
    provenance: list[dict[str, Any]] | None = None
    elapsed_ms: float = 0.0
    reduce_ms: float = 0.0
    #: Wall clock of its delivery.
    now_ms: int = 0

    @property
    def error_code(self) -> int:
        """Of the first exception; -1 without any."""
        return self.exceptions[0].code if self.exceptions else -1

    @property
    def lag_ms(self) -> int | None:
        """How old it is as it is delivered; clocks that are ahead of this one make nothing fresher than now."""
        fresh_ms = self.freshness.fresh_ms
        return None if fresh_ms is None else max(0, self.now_ms - fresh_ms)

    @property
    def event_age_ms(self) -> int | None:
        newest_ms = self.freshness.newest_event_ms
        return None if newest_ms is None else max(0, self.now_ms - newest_ms)

    @property
    def sla_violated(self) -> bool:
        """What is not known is not kept. Exactly the promise is."""
        lag_max_ms, age_max_ms = self.sla.max_lag_ms, self.sla.max_event_age_ms
        if lag_max_ms is None and age_max_ms is None:
            return False
        lag_ms, age_ms = self.lag_ms, self.event_age_ms
        if lag_ms is None or (lag_max_ms is not None and lag_ms > lag_max_ms):
            return True
        return age_max_ms is not None and (age_ms is None or age_ms > age_max_ms)

    def begin_again(self) -> None:
        """Nothing of the last try is left."""
        self.columns, self.result, self.provenance = (), None, None
        self.exceptions, self.answers, self.freshness = [], [], Freshness()
        self.servers_queried = self.servers_responded = 0

    def put(self, plan: Plan, result: Result) -> None:
        self.columns, self.result = plan.result, result
        if plan.shape is Shape.LITERAL:
            self.tables = ()

    def encode(self) -> bytes:
        return msgspec.json.encode(self.as_fields())

    def as_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.result is not None and self.result.rows is not None:
            names = [column.name for column in self.columns]
            types = [column.type for column in self.columns]
            fields["resultTable"] = {
                "dataSchema": {"columnNames": names, "columnDataTypes": types},
                "rows": self.result.rows,
            }
        fields |= {
            "numRowsResultSet": self.result.row_count if self.result is not None else 0,
            "partialResult": bool(self.exceptions),
            "exceptions": [
                {"message": exception.message, "errorCode": int(exception.code)} for exception in self.exceptions
            ],
            "numGroupsLimitReached": False,
            "numGroupsWarningLimitReached": False,
            "maxRowsInDistinctReached": False,
            "maxRowsWithoutChangeInDistinctReached": False,
            "maxExecutionTimeInDistinctReached": False,
            "timeUsedMs": round(self.elapsed_ms),
            "requestId": self.request_id,
            "clientRequestId": self.client_request_id,
            "brokerId": self.broker_id,
        }
        return fields | self._counters() | _NEUTRAL_TIMES | self._ends() | self._own()

    def _counters(self) -> dict[str, int]:
        answers = self.answers
        tails = [partition for answer in answers for partition in answer.partitions]
        return {
            "numDocsScanned": sum(answer.docs_scanned for answer in answers),
            "totalDocs": sum(answer.docs_total for answer in answers),
            "numEntriesScannedInFilter": sum(answer.entries_scanned_in_filter for answer in answers),
            "numEntriesScannedPostFilter": sum(answer.entries_scanned_post_filter for answer in answers),
            "numServersQueried": self.servers_queried,
            "numServersResponded": self.servers_responded,
            "numSegmentsQueried": sum(answer.segments_queried for answer in answers),
            "numSegmentsProcessed": sum(answer.segments_processed for answer in answers),
            "numSegmentsMatched": sum(answer.segments_matched for answer in answers),
            "numConsumingSegmentsQueried": len(tails),
            "numConsumingSegmentsProcessed": sum(partition.processed for partition in tails),
            "numConsumingSegmentsMatched": sum(partition.matched for partition in tails),
            "minConsumingFreshnessTimeMs": self.freshness.fresh_ms or 0,
            "numSegmentsPrunedByBroker": self.pruned_by_broker,
            "numSegmentsPrunedByServer": sum(answer.segments_pruned for answer in answers),
            "numSegmentsPrunedInvalid": 0,
            "numSegmentsPrunedByLimit": 0,
            "numSegmentsPrunedByValue": 0,
            "brokerReduceTimeMs": round(self.reduce_ms),
        }

    def _ends(self) -> dict[str, Any]:
        return {
            "explainPlanNumEmptyFilterSegments": 0,
            "explainPlanNumMatchAllFilterSegments": 0,
            "traceInfo": self.trace,
            "tablesQueried": list(self.tables),
            "offlineThreadMemAllocatedBytes": 0,
            "realtimeThreadMemAllocatedBytes": 0,
            "offlineResponseSerMemAllocatedBytes": 0,
            "realtimeResponseSerMemAllocatedBytes": 0,
            "offlineTotalMemAllocatedBytes": 0,
            "realtimeTotalMemAllocatedBytes": 0,
            "pools": [-1] if self.servers_queried else [],
            "rlsFiltersApplied": False,
            "groupsTrimmed": False,
        }

    def _own(self) -> dict[str, Any]:
        known = self.freshness
        fields = {
            "freshnessLagMs": self.lag_ms,
            "lastEventAgeMs": self.event_age_ms,
            "freshnessSource": known.source,
            "numPartitionsExpected": known.partitions_expected,
            "numPartitionsReporting": known.partitions_reporting,
            "epoch": known.epoch,
            "readToken": known.read_token,
            "freshnessSlaMs": self.sla.max_lag_ms,
            "freshnessSlaViolated": self.sla_violated,
        }
        return fields if self.provenance is None else {**fields, "provenance": self.provenance}


_NEUTRAL_TIMES: dict[str, int] = dict.fromkeys(
    (
        "offlineThreadCpuTimeNs", "realtimeThreadCpuTimeNs", "offlineSystemActivitiesCpuTimeNs",
        "realtimeSystemActivitiesCpuTimeNs", "offlineResponseSerializationCpuTimeNs",
        "realtimeResponseSerializationCpuTimeNs", "offlineTotalCpuTimeNs", "realtimeTotalCpuTimeNs",
    ),
    0,
)  # fmt: skip
