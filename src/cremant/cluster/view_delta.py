# SPDX-License-Identifier: Apache-2.0
"""Differences of cluster views, and views made of them: `apply(old, diff(old, new)) == new`. Pure.

Rule: an unchanged record is the same object in both views, so looking for changes costs an identity check for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from cremant.model.cluster import ClusterView, TableView
from cremant.model.errors import Conflict
from cremant.wire.view import TableDelta, ViewDelta

V = TypeVar("V")


def diff(old: ClusterView, new: ClusterView) -> ViewDelta:
    tables: dict[str, TableDelta] = {}
    whole: dict[str, TableView] = {}
    for name, table in new.tables.items():
        known = old.tables.get(name)
        if known is None or not _is_successor(known, table):
            whole[name] = table
        elif known is not table and (delta := table_diff(known, table)) != TableDelta():
            tables[name] = delta
    return ViewDelta(
        since=old.version,
        version=new.version,
        controller_nonce=new.controller_nonce,
        instances=UNSET if old.instances == new.instances else new.instances,
        tables=tables,
        whole=whole,
        gone=tuple(name for name in old.tables if name not in new.tables),
    )


def _is_successor(old: TableView, new: TableView) -> bool:
    """The same table, a moment later: partitions never go."""
    parts = {part.record.partition for part in new.partitions}
    same = old.record.incarnation == new.record.incarnation
    return same and all(part.record.partition in parts for part in old.partitions)


def is_empty(delta: ViewDelta) -> bool:
    return not (delta.tables or delta.whole or delta.gone) and delta.instances is UNSET


def table_diff(old: TableView, new: TableView) -> TableDelta:
    segments = {segment.name: segment for segment in old.segments}
    changed = tuple(s for s in new.segments if (known := segments.pop(s.name, None)) is not s and known != s)
    partitions = {part.record.partition: part for part in old.partitions}
    return TableDelta(
        record=UNSET if old.record is new.record or old.record == new.record else new.record,
        partitions=tuple(part for part in new.partitions if partitions.get(part.record.partition) != part),
        segments=changed,
        segments_gone=tuple(segments),
        external=_changed(old.external, new.external),
        tails=_changed(old.tails, new.tails),
        pipeline=UNSET if old.pipeline == new.pipeline else new.pipeline,
        pipeline_record=UNSET if old.pipeline_record == new.pipeline_record else new.pipeline_record,
    )


def apply(view: ClusterView, delta: ViewDelta) -> ClusterView:
    """The next view. Raises Conflict when the delta is not of this view."""
    if (delta.since, delta.controller_nonce) != (view.version, view.controller_nonce):
        raise Conflict(f"a change from version {delta.since} does not fit a view of version {view.version}")
    tables = {name: table for name, table in view.tables.items() if name not in delta.gone}
    tables |= delta.whole
    try:
        tables |= {name: table_applied(tables[name], change) for name, change in delta.tables.items()}
    except KeyError as error:
        raise Conflict(f"a change from version {delta.since} names {error}, which the view does not have") from error
    return ClusterView(
        version=delta.version,
        controller_nonce=delta.controller_nonce,
        instances=view.instances if delta.instances is UNSET else delta.instances,
        tables={name: tables[name] for name in sorted(tables)},
    )


def table_applied(table: TableView, delta: TableDelta) -> TableView:
    fields: dict[str, Any] = {}
    if delta.partitions:
        parts = {part.record.partition: part for part in (*table.partitions, *delta.partitions)}
        fields["partitions"] = tuple(parts[number] for number in sorted(parts))
    if delta.segments or delta.segments_gone:
        segments = {segment.name: segment for segment in (*table.segments, *delta.segments)}
        for name in delta.segments_gone:
            del segments[name]
        fields["segments"] = tuple(segments[name] for name in sorted(segments))
    if delta.external:
        fields["external"] = _merged(table.external, delta.external)
    if delta.tails:
        fields["tails"] = _merged(table.tails, delta.tails)
    for name in ("record", "pipeline", "pipeline_record"):
        if (value := getattr(delta, name)) is not UNSET:
            fields[name] = value
    return msgspec.structs.replace(table, **fields)


def _changed(old: Mapping[str, dict[str, V]], new: Mapping[str, dict[str, V]]) -> dict[str, dict[str, V]]:
    """Entries that differ; one that is gone has an empty value (an empty value is none)."""
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    return changed | {name: {} for name in old if name not in new}


def _merged(known: Mapping[str, dict[str, V]], changed: Mapping[str, dict[str, V]]) -> dict[str, dict[str, V]]:
    merged = {**known, **changed}
    for name, value in changed.items():
        if not value:
            del merged[name]
    return merged
