# SPDX-License-Identifier: Apache-2.0
"""The state of the cluster in one document: what a person looks at first (`GET /status`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import cremant
from cremant.completion.copies import Safety, safety_of, totals
from cremant.controller.core import Controller
from cremant.controller.streams import Round
from cremant.controller.upsert_state import upsert_summary
from cremant.model.cluster import CATCHING_UP, TableRecord, TableView, TailReport, as_json
from cremant.model.errors import CremantError
from cremant.model.limits import STREAM_LOOK_MS
from cremant.model.segments import ReplicaState, SegmentStatus


def status(controller: Controller) -> dict[str, Any]:
    """Units are in the names; a number that nobody knows is null."""
    view = controller.view.build(controller.view.version)
    streams = Round()
    return {
        "version": cremant.__version__,
        "viewVersion": view.version,
        "timeMs": controller.clock.now_ms(),
        "leaderTerm": controller.catalog.leadership.term,
        "instances": [
            {
                "id": instance.id,
                "role": str(instance.role),
                "url": instance.url,
                "live": instance.live,
                "heardMsAgo": controller.instances.heard_ms_ago(instance.id),
                "enabled": controller.instances.is_enabled(instance.id),
            }
            for instance in view.instances
        ],
        "repair": as_json(controller.repair.report),
        "tables": [_table(controller, table, streams) for _, table in sorted(view.tables.items())],
    }


def _table(controller: Controller, table: TableView, streams: Round) -> dict[str, Any]:
    record = table.record
    ends = stream_ends(controller, record, [view.record.partition for view in table.partitions], streams)
    partitions = [_partition(controller, table, index, ends) for index in range(len(table.partitions))]
    lags = [partition["lagRows"] for partition in partitions]
    epochs = [partition["epoch"] for partition in partitions if partition["epoch"] is not None]
    return {
        "name": table.name,
        "incarnation": record.incarnation,
        "state": _state(table),
        "topic": record.config.stream.topic,
        "replication": record.config.replication,
        "configVersion": record.config_version,
        "epoch": min(epochs, default=None),
        "lagRows": None if None in lags else sum(lags),
        "rows": sum(segment.rows for segment in table.segments) + sum(p["consumingRows"] for p in partitions),
        "segments": _segments(controller, table),
        "pipeline": _pipeline(table),
        "upsert": upsert_summary(table),
        "partitions": partitions,
    }


def _state(table: TableView) -> str:
    if not table.record.enabled:
        return "disabled"
    if table.record.paused:
        return "paused"
    return table.pipeline.state if table.pipeline is not None else "waiting for a pipeline"


def _pipeline(table: TableView) -> dict[str, Any]:
    record = table.pipeline_record
    said = as_json(table.pipeline) if table.pipeline is not None else {}
    return {"holder": record.holder, "generation": record.generation, "base": record.base, "report": said or None}


def _segments(controller: Controller, table: TableView) -> dict[str, Any]:
    with controller.catalog.lock:
        everyone = list(controller.catalog.segments.get(table.name, {}).values())
    copies = totals(table.segments, controller.policy(table.record))
    online = {name for name, replicas in table.external.items() if ReplicaState.ONLINE in replicas.values()}
    return {
        "done": len(table.segments),
        "committing": sum(segment.status is SegmentStatus.COMMITTING for segment in everyone),
        "consuming": sum(segment.status is SegmentStatus.IN_PROGRESS for segment in everyone),
        "online": sum(segment.name in online for segment in table.segments),
        "withoutReplica": sorted(segment.name for segment in table.segments if segment.name not in online),
        "singleCopy": copies.single_copy,
        "withoutCopy": copies.no_copy,
        "lost": sorted(segment.name for segment in table.segments if safety_of(segment) is Safety.LOST),
        "uploadBacklog": copies.upload_backlog,
        "uploadError": next((s.store_error for s in table.segments if s.store_error), None),
        "rows": sum(segment.rows for segment in table.segments),
        "bytes": sum(segment.size_bytes for segment in table.segments),
        "errors": [
            {"segment": said.segment, "instance": instance, "error": said.error}
            for instance, report in sorted(controller.instances.reports().items())
            for said in report.segments
            if said.table == table.name and said.error
        ],
    }


def _partition(controller: Controller, table: TableView, index: int, ends: dict[int, int]) -> dict[str, Any]:
    view = table.partitions[index]
    tails = table.tails.get(str(view.record.partition), {})
    best = max(tails.values(), key=lambda tail: tail.watermark.next_offset, default=None)
    visible = best.watermark.next_offset if best is not None else None
    end = ends.get(view.record.partition)
    freshness_ms = best.watermark.freshness_ms if best is not None else None
    return {
        "partition": view.record.partition,
        "consuming": view.record.consuming,
        "status": str(view.consuming.status),
        "streamEnd": end,
        "visibleOffset": visible,
        "lagRows": None if end is None or visible is None else max(0, end - visible),
        "epoch": best.watermark.epoch if best is not None else None,
        "freshnessLagMs": None if freshness_ms is None else max(0, controller.clock.now_ms() - freshness_ms),
        "consumingRows": max(0, visible - view.consuming.start_offset) if visible is not None else 0,
        "replicas": {
            instance: {
                "live": controller.instances.is_alive(instance),
                "visibleOffset": tails[instance].watermark.next_offset if instance in tails else None,
                "epoch": tails[instance].watermark.epoch if instance in tails else None,
                "tailRows": tails[instance].rows if instance in tails else None,
                "catchUp": _catch_up(tails.get(instance)),
                "state": tails[instance].state if instance in tails else None,
                "error": tails[instance].error if instance in tails else None,
            }
            for instance in view.record.replicas
        },
    }


def _catch_up(tail: TailReport | None) -> dict[str, int] | None:
    """Of a replica that is not asked yet: records of its log that it has read since it started, of how many."""
    if tail is None or tail.state != CATCHING_UP:
        return None
    done, total = tail.log_records
    return {"logRecordsDone": done, "logRecordsOf": total}


def stream_ends(
    controller: Controller, record: TableRecord, partitions: Collection[int], streams: Round
) -> dict[int, int]:
    """End of the stream per partition, as far as the stream says so in time."""
    stream = record.config.stream

    def ask() -> dict[int, int]:
        return controller.streams.ends(stream, partitions, timeout_ms=STREAM_LOOK_MS)

    try:
        return streams.ask(stream, ask, quiet=True) or {}
    except CremantError:
        return {}
