# SPDX-License-Identifier: Apache-2.0
"""REST of segments: lists, metadata, ideal state, external view, sizes, consuming segments."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.cluster.states import States, external_view, ideal_state
from cremant.controller.core import Controller
from cremant.controller.http import NotBuilt, answering, raw_name, table_type, utc_text
from cremant.model.cluster import TableRecord, TailReport
from cremant.model.errors import Conflict, CremantError, NotFound
from cremant.model.segments import SegmentMetadata, SegmentStatus

#: What Pinot shows for "no checksum yet": Long.MIN_VALUE.
_NO_CRC = -(2**63)


class SegmentRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._catalog = controller.catalog

    def routes(self) -> list[BaseRoute]:
        get = ["GET"]
        return [
            Route("/tables/{table}/idealstate", answering(self.ideal_state), methods=get),
            Route("/tables/{table}/externalview", answering(self.external_view), methods=get),
            Route("/tables/{table}/size", answering(self.size), methods=get),
            Route("/tables/{table}/consumingSegmentsInfo", answering(self.consuming_info), methods=get),
            Route("/segments/{table}", answering(self.listed), methods=get),
            Route("/tables/{table}/metadata", answering(self.table_metadata), methods=get),
            Route("/segments/{table}/crc", answering(self.crcs), methods=get),
            Route("/segments/{table}/servers", answering(self.servers), methods=get),
            Route("/segments/{table}/metadata", answering(self.all_metadata), methods=get),
            Route("/segments/{table}/{segment}/metadata", answering(self.metadata), methods=get),
            Route("/segments/{table}/{segment}", answering(self.deleted), methods=["DELETE"]),
        ]

    # --- lookups --------------------------------------------------------------------------------------------------

    def _record(self, request: Request, message: str = "Table {0}_REALTIME not found") -> TableRecord:
        name = raw_name(request.path_params["table"])
        record = self._catalog.tables.get(name)
        if record is None or table_type(request) == "OFFLINE" or table_type(request, "tableType") == "OFFLINE":
            raise NotFound(message.format(name))
        return record

    def _segments(self, record: TableRecord) -> dict[str, SegmentMetadata]:
        with self._catalog.lock:
            return dict(sorted(self._catalog.segments.get(record.config.name, {}).items()))

    def _ideal(self, record: TableRecord) -> States:
        with self._catalog.lock:
            name = record.config.name
            return ideal_state(self._catalog.partitions.get(name, {}).values(), self._segments(record).values())

    def _external(self, record: TableRecord) -> States:
        with self._catalog.lock:
            name = record.config.name
            return external_view(
                name, record.incarnation, self._catalog.partitions.get(name, {}).values(), self._segments(record),
                self._controller.instances.reports(),
            )  # fmt: skip

    # --- states ---------------------------------------------------------------------------------------------------

    def ideal_state(self, request: Request) -> dict[str, Any]:
        return {"OFFLINE": None, "REALTIME": self._ideal(self._record(request, "Table not found"))}

    def external_view(self, request: Request) -> dict[str, Any]:
        return {"OFFLINE": None, "REALTIME": self._external(self._record(request, "Table not found"))}

    def servers(self, request: Request) -> list[dict[str, Any]]:
        record = self._record(request)
        by_server: dict[str, list[str]] = {}
        for segment, replicas in self._ideal(record).items():
            for server in replicas:
                by_server.setdefault(server, []).append(segment)
        return [
            {
                "tableName": record.config.name_with_type,
                "serverToSegmentsMap": by_server,
                "serverToSegmentsCountMap": {server: len(segments) for server, segments in by_server.items()},
            }
        ]

    # --- lists and metadata ---------------------------------------------------------------------------------------

    def listed(self, request: Request) -> list[dict[str, list[str]]]:
        return [{"REALTIME": list(self._segments(self._record(request)))}]

    def metadata(self, request: Request) -> dict[str, str]:
        record = self._record(request)
        segment = self._segments(record).get(request.path_params["segment"])
        if segment is None:
            name = request.path_params["segment"]
            raise NotFound(f"Failed to find segment: {name} in table: {record.config.name_with_type}")
        return store_metadata(record, segment)

    def all_metadata(self, request: Request) -> dict[str, Any]:
        record = self._record(request)
        wanted = request.query_params.getlist("segments")
        return {
            name: full_metadata(record, segment)
            for name, segment in self._segments(record).items()
            if not wanted or name in wanted
        }

    def table_metadata(self, request: Request) -> dict[str, Any]:
        self._record(request)
        raise NotBuilt("Table type : REALTIME not yet supported.")

    def crcs(self, request: Request) -> dict[str, Any]:
        """As in Pinot, an endpoint of offline tables only."""
        raise NotFound(f"Table '{raw_name(request.path_params['table'])}_OFFLINE' not found.")

    def deleted(self, request: Request) -> dict[str, str]:
        record = self._record(request)
        segment = self._segments(record).get(request.path_params["segment"])
        if segment is not None and segment.status is not SegmentStatus.DONE:
            raise Conflict(f"segment {segment.name} is {segment.status}: only sealed segments can be deleted")
        if segment is not None:
            self._controller.janitor.delete_segments(record.config.name, [segment])
        return {"status": "Segment deleted"}

    # --- sizes and consumption ------------------------------------------------------------------------------------

    def size(self, request: Request) -> dict[str, Any]:
        record = self._record(request, "Table {0} not found")
        reported: dict[str, dict[str, int]] = {}
        for instance, report in self._controller.instances.reports().items():
            for said in report.segments:
                if said.table == record.config.name:
                    reported.setdefault(said.segment, {})[instance] = said.bytes
        segments = {
            name: _segment_size(name, sorted(replicas), reported.get(name, {}))
            for name, replicas in self._ideal(record).items()
        }
        known = [segment for segment in segments.values() if segment["reportedSizeInBytes"] >= 0]
        total = sum(segment["reportedSizeInBytes"] for segment in known) if known else -1
        per_replica = sum(segment["maxReportedSizePerReplicaInBytes"] for segment in known) if known else -1
        return {
            "tableName": record.config.name,
            "reportedSizeInBytes": total,
            "estimatedSizeInBytes": total,
            "reportedSizePerReplicaInBytes": per_replica,
            "offlineSegments": None,
            "realtimeSegments": {
                "reportedSizeInBytes": total,
                "estimatedSizeInBytes": total,
                "missingSegments": len(segments) - len(known),
                "reportedSizePerReplicaInBytes": per_replica,
                "segments": segments,
            },
        }

    def consuming_info(self, request: Request) -> dict[str, Any]:
        record = self._record(request, "Table {0}_REALTIME not found!")
        tails = self._controller.instances.tails(record.config.name, record.incarnation)
        with self._catalog.lock:
            partitions = dict(self._catalog.partitions.get(record.config.name, {}))
            expected = {server for partition in partitions.values() for server in partition.replicas}
            failing = [server for server in expected if not self._controller.instances.is_alive(server)]
        consuming = {} if record.paused and self._is_paused(record) else partitions
        return {
            "serversFailingToRespond": len(failing),
            "serversUnparsableRespond": 0,
            "_segmentToConsumingInfoMap": {
                partition.consuming: [
                    self._consumer(record, server, tail) for server, tail in sorted(tails.get(str(number), {}).items())
                ]
                for number, partition in sorted(consuming.items())
            },
        }

    def _is_paused(self, record: TableRecord) -> bool:
        pipeline = self._controller.instances.pipeline(record.config.name, record.incarnation, None)
        return pipeline is None or pipeline.state == "paused"

    def _consumer(self, record: TableRecord, server: str, tail: TailReport) -> dict[str, Any]:
        partition, at = str(tail.partition), tail.watermark.next_offset
        try:
            latest = self._controller.log.latest(record.config.stream.topic, tail.partition)
            latest_text, lag_text = str(latest), str(max(0, latest - at))
        except CremantError:
            latest_text = lag_text = "NOT_CALCULATED"
        freshness = tail.watermark.freshness_ms
        behind_ms = "NOT_CALCULATED" if freshness is None else str(max(0, self._controller.clock.now_ms() - freshness))
        return {
            "serverName": server,
            "consumerState": "NOT_CONSUMING" if tail.error else "CONSUMING",
            "lastConsumedTimestamp": freshness or 0,
            "partitionToOffsetMap": {partition: str(at)},
            "partitionOffsetInfo": {
                "currentOffsetsMap": {partition: str(at)},
                "latestUpstreamOffsetMap": {partition: latest_text},
                "recordsLagMap": {partition: lag_text},
                "availabilityLagMsMap": {partition: behind_ms},
            },
        }


def _segment_size(name: str, replicas: list[str], reported: dict[str, int]) -> dict[str, Any]:
    return {
        "reportedSizeInBytes": sum(reported.values()) if reported else -1,
        "estimatedSizeInBytes": sum(reported.values()) if reported else -1,
        "maxReportedSizePerReplicaInBytes": max(reported.values(), default=-1),
        "serverInfo": {
            server: {"segmentName": name, "diskSizeInBytes": reported.get(server, -1)} for server in replicas
        },
    }


def crc_of(segment: SegmentMetadata) -> int:
    """A 64-bit number of the content checksum, where Pinot shows its CRC."""
    if segment.checksum is None:
        return _NO_CRC
    digits = segment.checksum.rpartition(":")[2][:15]
    return int(digits, 16) if digits else _NO_CRC


def store_metadata(record: TableRecord, segment: SegmentMetadata) -> dict[str, str]:
    """What Pinot keeps in ZooKeeper for a segment: all values are strings."""
    shown = {
        "segment.realtime.numReplicas": str(len(segment.replicas)),
        "segment.creation.time": str(segment.created_ms),
        "segment.flush.threshold.size": str(record.config.flush.rows),
        "segment.realtime.startOffset": str(segment.start_offset),
        "segment.realtime.status": str(segment.status),
    }
    if segment.end_offset is not None:
        shown["segment.realtime.endOffset"] = str(segment.end_offset)
    if segment.status is not SegmentStatus.DONE:
        return shown
    shown |= {
        "segment.crc": str(crc_of(segment)),
        "segment.total.docs": str(segment.rows),
        "segment.size.in.bytes": str(segment.size_bytes),
        "segment.download.url": segment.store_url or "",
    }
    if segment.min_time_ms is not None and segment.max_time_ms is not None:
        shown |= {
            "segment.start.time": str(segment.min_time_ms),
            "segment.end.time": str(segment.max_time_ms),
            "segment.time.unit": "MILLISECONDS",
        }
    return shown


def full_metadata(record: TableRecord, segment: SegmentMetadata) -> dict[str, Any]:
    """What Pinot's servers say of a segment."""
    done = segment.status is SegmentStatus.DONE
    has_time = done and segment.min_time_ms is not None
    start, end = segment.start_offset if done else None, segment.end_offset if done else None
    return {
        "segmentName": segment.name,
        "schemaName": record.table_schema.name,
        "crc": crc_of(segment),
        "creationTimeMillis": segment.created_ms,
        "creationTimeReadable": _readable(segment.created_ms),
        "timeColumn": record.config.time_column if has_time else None,
        "timeUnit": "MILLISECONDS" if has_time else None,
        "timeGranularitySec": None,
        "startTimeMillis": segment.min_time_ms,
        "startTimeReadable": _readable(segment.min_time_ms),
        "endTimeMillis": segment.max_time_ms,
        "endTimeReadable": _readable(segment.max_time_ms),
        "segmentVersion": None,
        "creatorName": None,
        "totalDocs": segment.rows,
        "custom": {},
        "startOffset": None if start is None else str(start),
        "endOffset": None if end is None else str(end),
        "indexes": {},
        "star-tree-index": None,
    }


def _readable(ms: int | None) -> str | None:
    return None if ms is None else f"{utc_text(ms, '%Y-%m-%dT%H:%M:%S')}:{ms % 1000:03d} UTC"
