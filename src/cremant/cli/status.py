# SPDX-License-Identifier: Apache-2.0
"""`cremant status`: roles, tables, partitions, segments, lag, from one view of the controller."""

from __future__ import annotations

import time
from typing import Any

from rich.markup import escape
from rich.table import Table

from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import Target
from cremant.model.cluster import ClusterView, PipelineReport, TableView, as_json
from cremant.model.segments import ReplicaState


def status(target: Target, *, as_json: bool) -> None:
    with Client(target.controller) as client:
        view = client.view()
    described = describe(view, target.controller, int(time.time() * 1000))
    if as_json:
        write_json(described)
        return
    _print(described)


def describe(view: ClusterView, controller: str, now_ms: int) -> dict[str, Any]:
    """The view as plain values: what `--json` prints, and what the tables are drawn from."""
    return {
        "controller": controller,
        "roles": [
            {"id": instance.id, "role": str(instance.role), "url": instance.url, "live": instance.live}
            for instance in sorted(view.instances, key=lambda instance: (instance.role, instance.id))
        ],
        "tables": [_table(view.tables[name], now_ms) for name in sorted(view.tables)],
    }


def _table(table: TableView, now_ms: int) -> dict[str, Any]:
    partitions = [_partition(table, number, now_ms) for number in range(len(table.partitions))]
    online = [segment for segment in table.segments if _has_online_replica(table, segment.name)]
    sealed_rows = sum(segment.rows for segment in table.segments)
    lags = [partition["freshnessLagMs"] for partition in partitions]
    return {
        "name": table.name,
        "topic": table.record.config.stream.topic,
        "state": _state(table),
        "replication": table.record.config.replication,
        "sealedSegments": len(table.segments),
        "sealedSegmentsOnline": len(online),
        "sealedRows": sealed_rows,
        "consumingRows": sum(partition["consumingRows"] for partition in partitions),
        "freshnessLagMs": None if not lags or None in lags else max(lags),
        "pipeline": None if table.pipeline is None else as_json(table.pipeline),
        "partitions": partitions,
    }


def _state(table: TableView) -> str:
    if table.record.dropping:
        return "dropping"
    if table.record.paused:
        return "paused"
    return table.pipeline.state if table.pipeline else "waiting for a pipeline"


def _partition(table: TableView, number: int, now_ms: int) -> dict[str, Any]:
    record = table.partitions[number].record
    tails = table.tails.get(str(record.partition), {})
    consuming = table.partitions[number].consuming
    best = max(tails.values(), key=lambda tail: tail.watermark.next_offset, default=None)
    freshness = best.watermark.freshness_ms if best else None
    return {
        "partition": record.partition,
        "consuming": record.consuming,
        "replicas": list(record.replicas),
        "replicasTailing": sorted(tails),
        "nextOffset": best.watermark.next_offset if best else None,
        "epoch": best.watermark.epoch if best else None,
        "consumingRows": max(0, best.watermark.next_offset - consuming.start_offset) if best else 0,
        "freshnessLagMs": None if freshness is None else max(0, now_ms - freshness),
        "errors": {instance: tail.error for instance, tail in tails.items() if tail.error},
    }


def _has_online_replica(table: TableView, segment: str) -> bool:
    return ReplicaState.ONLINE in table.external.get(segment, {}).values()


def _print(described: dict[str, Any]) -> None:
    roles = Table("role", "instance", "address", "state", box=None, header_style="bold", pad_edge=False)
    for role in described["roles"]:
        roles.add_row(role["role"], role["id"], role["url"], "[green]live[/]" if role["live"] else "[red]dead[/]")
    out.print(roles)
    out.print()
    if not described["tables"]:
        out.print("no tables")
        return
    tables = Table(
        "table", "state", "partitions", "rows", "sealed segments", "epoch", "lag", box=None, header_style="bold",
        pad_edge=False,
    )  # fmt: skip
    for table in described["tables"]:
        epochs = [partition["epoch"] for partition in table["partitions"] if partition["epoch"] is not None]
        tables.add_row(
            table["name"],
            _coloured(table["state"]),
            str(len(table["partitions"])),
            f"{table['sealedRows'] + table['consumingRows']:,}",
            f"{table['sealedSegmentsOnline']}/{table['sealedSegments']}",
            str(min(epochs)) if epochs else "-",
            _lag(table["freshnessLagMs"]),
        )
    out.print(tables)
    for table in described["tables"]:
        _print_problems(table)


def _print_problems(table: dict[str, Any]) -> None:
    pipeline: dict[str, Any] = table["pipeline"] or as_json(PipelineReport(table="", incarnation="", state=""))
    if pipeline["error"]:
        out.print(f"[red]{table['name']}: pipeline: {escape(str(pipeline['error']))}[/]")
    if pipeline["rejectedTotal"]:
        out.print(f"[yellow]{table['name']}: {pipeline['rejectedTotal']:,} records rejected[/]")
    for partition in table["partitions"]:
        for instance, error in partition["errors"].items():
            out.print(f"[red]{table['name']} partition {partition['partition']} on {instance}: {escape(error)}[/]")


def _coloured(state: str) -> str:
    colour = {"running": "green", "paused": "yellow", "failed": "red", "backoff": "red"}.get(state)
    return f"[{colour}]{state}[/]" if colour else state


def _lag(lag_ms: int | None) -> str:
    return "-" if lag_ms is None else f"{lag_ms} ms" if lag_ms < 10_000 else f"{lag_ms / 1000:.0f} s"
