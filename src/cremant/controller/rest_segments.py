# SPDX-License-Identifier: Apache-2.0
"""REST of segments: lists, metadata, ideal state, external view, sizes, consuming segments."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.cluster.states import States, external_view
from cremant.controller.core import Controller
from cremant.controller.http import NotBuilt, answering, raw_name, table_record
from cremant.controller.status import stream_ends
from cremant.controller.streams import Round
from cremant.model.cluster import BLOCKED, Role, TableRecord, TailReport
from cremant.model.errors import Conflict, NotFound
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.shell.segment_json import crc_of, full_metadata


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
            Route("/debug/tables/{table}", answering(self.debug), methods=get),
            Route("/segments/{table}", answering(self.listed), methods=get),
            Route("/tables/{table}/metadata", answering(self.table_metadata), methods=get),
            Route("/segments/{table}/crc", answering(self.crcs), methods=get),
            Route("/segments/{table}/servers", answering(self.servers), methods=get),
            Route("/segments/{table}/metadata", answering(self.all_metadata), methods=get),
            Route("/segments/{table}/{segment}/metadata", answering(self.metadata), methods=get),
            Route("/segments/{table}/{segment}", answering(self.deleted), methods=["DELETE"]),
        ]

    # --- lookups --------------------------------------------------------------------------------------------------

    def _segments(self, record: TableRecord) -> dict[str, SegmentMetadata]:
        with self._catalog.lock:
            return dict(sorted(self._catalog.segments.get(record.config.name, {}).items()))

    def _external(self, record: TableRecord) -> States:
        with self._catalog.lock:
            name = record.config.name
            return external_view(
                name, record.incarnation, self._catalog.partitions.get(name, {}).values(), self._segments(record),
                self._controller.instances.reports(),
            )  # fmt: skip

    # --- states ---------------------------------------------------------------------------------------------------

    def ideal_state(self, request: Request) -> dict[str, Any]:
        record = table_record(request, self._catalog, "Table not found")
        return {"OFFLINE": None, "REALTIME": self._catalog.ideal_state(record.config.name)}

    def external_view(self, request: Request) -> dict[str, Any]:
        return {"OFFLINE": None, "REALTIME": self._external(table_record(request, self._catalog, "Table not found"))}

    def servers(self, request: Request) -> list[dict[str, Any]]:
        record = table_record(request, self._catalog)
        by_server: dict[str, list[str]] = {}
        for segment, replicas in self._catalog.ideal_state(record.config.name).items():
            for server in replicas:
                by_server.setdefault(server, []).append(segment)
        return [
            {
                "tableName": record.config.name_with_type,
                "serverToSegmentsMap": by_server,
                "serverToSegmentsCountMap": {server: len(segments) for server, segments in by_server.items()},
            }
        ]

    def debug(self, request: Request) -> list[dict[str, Any]]:
        """What is wrong with a table: replicas in error, the pipeline's trouble."""
        record = table_record(request, self._catalog, "Table {0} not found")
        name, instances = record.config.name, self._controller.instances
        with self._catalog.lock:
            ideal, size = self._catalog.ideal_state(record.config.name), self.size(request)
            pipeline = instances.pipeline(name, record.incarnation, None)
            tails = [tail for held in instances.tails(name, record.incarnation).values() for tail in held.values()]
            broken = [
                (said.segment, instance, said.error)
                for instance, report in instances.reports().items()
                for said in report.segments
                if said.table == name and said.error
            ]
        troubles = [tail.error for tail in tails if tail.error] + ([pipeline.error] if pipeline else [])
        trouble = next((text for text in troubles if text), "")
        return [
            {
                "tableName": record.config.name_with_type,
                "numSegments": len(ideal),
                "numServers": len({server for replicas in ideal.values() for server in replicas}),
                "numBrokers": len(instances.live(Role.BROKER)),
                "segmentDebugInfos": [
                    {
                        "segmentName": segment,
                        "serverState": {instance: {"errorInfo": {"errorMessage": error}}},
                    }
                    for segment, instance, error in sorted(broken)
                ],
                "serverDebugInfos": [],
                "brokerDebugInfos": [],
                "ingestionStatus": {"ingestionState": "UNHEALTHY" if trouble else "HEALTHY", "errorMessage": trouble},
                "tableSize": {
                    "reportedSize": f"{size['reportedSizeInBytes']} bytes",
                    "estimatedSize": f"{size['estimatedSizeInBytes']} bytes",
                },
            }
        ]

    # --- lists and metadata ---------------------------------------------------------------------------------------

    def listed(self, request: Request) -> list[dict[str, list[str]]]:
        return [{"REALTIME": list(self._segments(table_record(request, self._catalog)))}]

    def metadata(self, request: Request) -> dict[str, str]:
        record = table_record(request, self._catalog)
        segment = self._segments(record).get(request.path_params["segment"])
        if segment is None:
            name = request.path_params["segment"]
            raise NotFound(f"Failed to find segment: {name} in table: {record.config.name_with_type}")
        return store_metadata(record, segment)

    def all_metadata(self, request: Request) -> dict[str, Any]:
        record = table_record(request, self._catalog)
        wanted = request.query_params.getlist("segments")
        return {
            name: full_metadata(record, segment)
            for name, segment in self._segments(record).items()
            if not wanted or name in wanted
        }

    def table_metadata(self, request: Request) -> dict[str, Any]:
        table_record(request, self._catalog)
        raise NotBuilt("Table type : REALTIME not yet supported.")

    def crcs(self, request: Request) -> dict[str, Any]:
        """As in Pinot, an endpoint of offline tables only."""
        raise NotFound(f"Table '{raw_name(request.path_params['table'])}_OFFLINE' not found.")

    def deleted(self, request: Request) -> dict[str, str]:
        record = table_record(request, self._catalog)
        segment = self._segments(record).get(request.path_params["segment"])
        if segment is not None and segment.status is not SegmentStatus.DONE:
            raise Conflict(f"segment {segment.name} is {segment.status}: only sealed segments can be deleted")
        if segment is not None:
            self._controller.janitor.delete_segments(record.config.name, [segment])
        return {"status": "Segment deleted"}

    # --- sizes and consumption ------------------------------------------------------------------------------------

    def size(self, request: Request) -> dict[str, Any]:
        record = table_record(request, self._catalog, "Table {0} not found")
        reported: dict[str, dict[str, int]] = {}
        for instance, report in self._controller.instances.reports().items():
            for said in report.segments:
                if said.table == record.config.name:
                    reported.setdefault(said.segment, {})[instance] = said.bytes
        segments = {
            name: _segment_size(name, sorted(replicas), reported.get(name, {}))
            for name, replicas in self._catalog.ideal_state(record.config.name).items()
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
        record = table_record(request, self._catalog, "Table {0}_REALTIME not found!")
        tails = self._controller.instances.tails(record.config.name, record.incarnation)
        with self._catalog.lock:
            partitions = dict(self._catalog.partitions.get(record.config.name, {}))
            expected = {server for partition in partitions.values() for server in partition.replicas}
            failing = [server for server in expected if not self._controller.instances.is_alive(server)]
        consuming = {} if record.paused and self._is_paused(record) else partitions
        ends = stream_ends(self._controller, record, consuming, Round())
        return {
            "serversFailingToRespond": len(failing),
            "serversUnparsableRespond": 0,
            "_segmentToConsumingInfoMap": {
                partition.consuming: [
                    self._consumer(server, tail, ends.get(number))
                    for server, tail in sorted(tails.get(str(number), {}).items())
                ]
                for number, partition in sorted(consuming.items())
            },
        }

    def _is_paused(self, record: TableRecord) -> bool:
        pipeline = self._controller.instances.pipeline(record.config.name, record.incarnation, None)
        return pipeline is None or pipeline.state == "paused"

    def _consumer(self, server: str, tail: TailReport, latest: int | None) -> dict[str, Any]:
        partition, at = str(tail.partition), tail.watermark.next_offset
        latest_text = "NOT_CALCULATED" if latest is None else str(latest)
        lag_text = "NOT_CALCULATED" if latest is None else str(max(0, latest - at))
        freshness = tail.watermark.freshness_ms
        behind_ms = "NOT_CALCULATED" if freshness is None else str(max(0, self._controller.clock.now_ms() - freshness))
        blocked = {"tailState": tail.state} if tail.state in BLOCKED else {}  # a key that Pinot has not
        return {
            "serverName": server,
            "consumerState": "NOT_CONSUMING" if tail.error or blocked else "CONSUMING",
            **blocked,
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
