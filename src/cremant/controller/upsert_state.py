# SPDX-License-Identifier: Apache-2.0
"""What is known of an upsert table while it runs: low-water marks, keys, versions. Read off the last reports, pure.

The low-water marks are those of the key-coordinator design: of a server and partition the last epoch whose rows and
updates it has applied; of a server the least of its partitions; of the table the least of its servers. Queries do not
wait for the table's: a broker takes the least over the servers that it asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cremant.model.cluster import TableView, VersionsReport, as_json
from cremant.model.upsert import UpsertConfig

#: Counts that add up over partitions.
_SUMS = ("rows", "keys", "superseded", "tombstones", "sizeBytes")


def upsert_state(table: TableView) -> dict[str, Any]:
    """As `GET /tables/{table}/upsert` answers it; a number that nobody knows is null."""
    config = table.record.config.upsert
    assert config is not None
    servers = _servers(table)
    pairs = [(server, partition) for server, partitions in servers.items() for partition in partitions.items()]
    counts = [_best(table, number) for number in (view.record.partition for view in table.partitions)]
    return {
        "tableName": table.record.config.name_with_type,
        "config": _config(config, table.record.table_schema.primary_key_columns),
        "epoch": max((report.closed for _, (_, report) in pairs if report is not None), default=None),
        "lowWaterMark": _least(report for _, (_, report) in pairs),
        "horizon": max((report.horizon for _, (_, report) in pairs if report is not None), default=None),
        **_total(counts),
        "coordinator": _coordinator(table),
        "compaction": _compaction(table, config),
        "servers": {
            server: {
                "lowWaterMark": _least(partitions.values()),
                **_total(partitions.values()),
                "partitions": {str(number): _partition(report) for number, report in sorted(partitions.items())},
            }
            for server, partitions in servers.items()
        },
    }


def upsert_summary(table: TableView) -> dict[str, Any] | None:
    """The line of it that belongs into an overview; None for an append table."""
    if table.record.config.upsert is None:
        return None
    state = upsert_state(table)
    shown = {key: state[key] for key in ("epoch", "lowWaterMark", "horizon", *_SUMS)}
    return shown | {"rebuilding": state["coordinator"]["rebuilding"]}


def _config(config: UpsertConfig, key: tuple[str, ...]) -> dict[str, Any]:
    return {
        "primaryKeyColumns": list(key),
        "comparisonColumns": list(config.comparison_columns),
        "deleteRecordColumn": config.delete_column,
        "nullKey": str(config.null_key),
        "metadataTTL": config.ttl,
        "deletedKeysTTL": config.deleted_ttl,
        "retentionMs": config.retained_ms,
        "historyMs": config.history_ms,
    }


def _compaction(table: TableView, config: UpsertConfig) -> dict[str, Any]:
    """`epoch`: rows that were replaced up to there may be gone; `pending`: segments that are being compacted."""
    done = [segment for segment in table.segments if segment.compacted_at]
    return {
        "enabled": config.compaction is not None,
        "epoch": max((segment.compacted_at for segment in done), default=None),
        "segments": len(done),
        "rowsRemoved": sum(segment.rows_removed for segment in done),
        "pending": sorted(segment.name for segment in table.segments if segment.compacting is not None),
    }


def _coordinator(table: TableView) -> dict[str, Any]:
    record, said = table.pipeline_record, table.pipeline
    keys, size = (said.keys, said.state_bytes) if said is not None else (None, None)
    return {
        "holder": record.holder,
        "generation": record.generation,
        "state": said.state if said is not None else None,
        "epoch": said.epoch if said is not None and said.epoch >= 0 else None,
        "keys": keys,
        "stateBytes": size,
        "stateBytesPerKey": round(size / keys, 1) if keys and size is not None else None,
        "rebuilding": said is not None and said.rebuilding,
    }


def _servers(table: TableView) -> dict[str, dict[int, VersionsReport | None]]:
    """server -> partition -> report: of all that should host a partition, and of all that host something of it."""
    found: dict[str, dict[int, VersionsReport | None]] = {}
    for view in table.partitions:
        number = view.record.partition
        tails = table.tails.get(str(number), {})
        for server in sorted({*view.record.replicas, *(name for name, tail in tails.items() if tail.versions)}):
            tail = tails.get(server)
            found.setdefault(server, {})[number] = tail.versions if tail is not None else None
    return dict(sorted(found.items()))


def _best(table: TableView, partition: int) -> VersionsReport | None:
    """Of the server that hosts most of the partition, and of such of the furthest."""
    said = [tail.versions for tail in table.tails.get(str(partition), {}).values() if tail.versions is not None]
    return max(said, key=lambda report: (report.rows, report.closed), default=None)


def _least(reports: Iterable[VersionsReport | None]) -> int | None:
    """None if one of them is not known: a low-water mark that leaves somebody out is none."""
    found = [report.closed if report is not None else None for report in reports]
    known = [closed for closed in found if closed is not None]
    return min(known) if known and len(known) == len(found) else None


def _total(reports: Iterable[VersionsReport | None]) -> dict[str, int | None]:
    parts = [_partition(report) for report in reports]
    if not parts or None in parts:
        return dict.fromkeys(_SUMS)
    return {key: sum(part[key] for part in parts if part is not None) for key in _SUMS}


def _partition(report: VersionsReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    shown: dict[str, Any] = as_json(report)
    return (
        {"lowWaterMark": shown.pop("closed")}
        | shown
        | {
            "keys": report.in_force - report.tombstones,
            "superseded": report.rows - report.in_force,
        }
    )
