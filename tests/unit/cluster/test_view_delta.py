# SPDX-License-Identifier: Apache-2.0
"""Views travel as differences: whatever changes, old view plus difference is the new view, also over the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.cluster.partitions import open_partition
from cremant.cluster.view_delta import apply, diff, is_empty
from cremant.model.cluster import (
    ClusterView,
    LiveInstance,
    PartitionView,
    PipelineRecord,
    PipelineReport,
    Role,
    TableRecord,
    TableView,
    TailReport,
)
from cremant.model.errors import Conflict
from cremant.model.offsets import Watermark
from cremant.model.schema import Schema
from cremant.model.segments import ReplicaState, SegmentStatus
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.wire.codec import decode, encode
from cremant.wire.view import TableDelta, ViewDelta


def _table(name: str, incarnation: str, draw: st.DrawFn) -> TableView:
    few = st.integers(0, 2)
    config = TableConfig(
        name=name, time_column="ts", replication=1, stream=StreamConfig(stream_type="embedded", topic="t"),
        flush=FlushConfig(rows=10 + draw(few)),
    )  # fmt: skip
    record = TableRecord(config=config, table_schema=Schema(name=name, fields=()), incarnation=incarnation)
    parts, segments, tails = [], [], {}
    for partition in range(1 + draw(few)):
        own, opened = open_partition(name, partition, 0, tuple("ab"[: 1 + draw(st.integers(0, 1))]), draw(few))
        parts.append(PartitionView(record=own, consuming=opened))
        if draw(st.booleans()):
            watermark = Watermark(next_offset=draw(few), epoch=1)
            tails[str(partition)] = {
                "a": TailReport(
                    table=name,
                    incarnation=incarnation,
                    partition=partition,
                    first_offset=0,
                    rows=0,
                    watermark=watermark,
                )
            }
        for sequence in draw(st.sets(few)):
            sealed = msgspec.structs.replace(
                opened, name=f"{name}__{partition}__{sequence}__x", sequence=sequence, status=SegmentStatus.DONE,
                rows=draw(few),
            )  # fmt: skip
            segments.append(sealed)
    external = {
        segment.name: {"a": draw(st.sampled_from(list(ReplicaState)))} for segment in segments if draw(st.booleans())
    }
    pipeline = PipelineReport(table=name, incarnation=incarnation, state="running") if draw(st.booleans()) else None
    return TableView(
        record=record, partitions=tuple(parts), segments=tuple(sorted(segments, key=lambda s: s.name)),
        external=external, tails=tails, pipeline=pipeline, pipeline_record=PipelineRecord(generation=draw(few)),
    )  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    names = draw(st.sets(st.sampled_from("stu")))
    return ClusterView(
        version=0,
        controller_nonce="n",
        instances=tuple(
            LiveInstance(id=i, role=Role.SERVER, url="", live=draw(st.booleans())) for i in draw(st.sets(st.just("a")))
        ),
        tables={name: _table(name, draw(st.sampled_from(("i1", "i2"))), draw) for name in sorted(names)},
    )


def _numbered(view: ClusterView, version: int) -> ClusterView:
    return msgspec.structs.replace(view, version=version)


@settings(max_examples=200, deadline=None)
@given(st.lists(views(), min_size=2, max_size=4))
def test_the_old_view_and_the_difference_make_the_new_view(sequence: list[ClusterView]) -> None:
    have = _numbered(sequence[0], 1)
    for version, view in enumerate(sequence[1:], start=2):
        wanted = _numbered(view, version)
        delta = decode(encode(diff(have, wanted)), ViewDelta)
        have = apply(have, delta)
        assert have == wanted
        assert list(have.tables) == sorted(have.tables)


@given(views())
def test_views_that_differ_in_nothing_but_the_version_have_an_empty_difference(view: ClusterView) -> None:
    assert is_empty(diff(_numbered(view, 1), _numbered(view, 2)))
    copied = decode(encode(view), ClusterView)
    assert is_empty(diff(view, copied))


def test_a_change_of_another_view_is_refused() -> None:
    old, new = ClusterView(version=3, controller_nonce="n"), ClusterView(version=4, controller_nonce="n")
    delta = diff(old, new)
    with pytest.raises(Conflict, match="from version 3 does not fit a view of version 4"):
        apply(new, delta)
    with pytest.raises(Conflict):
        apply(msgspec.structs.replace(old, controller_nonce="m"), delta)
    with pytest.raises(Conflict, match="names 'stranger', which the view does not have"):
        apply(old, msgspec.structs.replace(delta, tables={"stranger": TableDelta(segments_gone=("s",))}))
