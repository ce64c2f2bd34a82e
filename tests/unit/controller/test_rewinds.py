# SPDX-License-Identifier: Apache-2.0
"""Rewinds and rebuilds as the controller is asked for them over HTTP, and as the pipeline carries them out."""

from __future__ import annotations

from typing import Any

import pytest
from control import Cluster, schema, table

from cremant.cluster.leases import holder_name
from cremant.epoch.format import to_message
from cremant.epoch.records import EpochMark, Fence, PartitionMark, Record
from cremant.model.cluster import UNKEYED, TableView
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.segment.cuts import ROW_LIMIT
from cremant.wire.messages import (
    BaseRequest,
    CompletionStatus,
    GenerationReply,
    GenerationRequest,
    LeaseReply,
    LeaseRequest,
    SegmentConsumed,
    SegmentConsumedReply,
)

HOLDER = holder_name("Pipeline_a", "n1")


def append(cluster: Cluster, made: TableView, *records: Record) -> None:
    topic = epoch_topic("gold", made.record.incarnation)
    for partition in range(len(made.partitions)):
        for record in records:
            cluster.log.append(topic, partition, [to_message(record, made.record.incarnation)])


def mark(epoch: int, partitions: int = 2) -> EpochMark:
    return EpochMark(
        generation=1, epoch=epoch, previous=epoch - 1, blocks_generation=1, config_version=1,
        partitions=tuple(PartitionMark(end=10 * epoch, rows=0) for _ in range(partitions)),
    )  # fmt: skip


@pytest.fixture
def made(cluster: Cluster) -> TableView:
    """Epochs 1 to 5 of ten offsets each, in two partitions."""
    made = cluster.create()
    append(cluster, made, Fence(generation=1), *(mark(epoch) for epoch in range(1, 6)))
    return made


def start(cluster: Cluster, made: TableView) -> GenerationReply:
    """What a pipeline asks first."""
    one: dict[str, Any] = {"holder": HOLDER, "table": "gold", "incarnation": made.record.incarnation}
    cluster.send("pipeline/lease", LeaseRequest(**one), LeaseReply)
    granted: GenerationReply = cluster.send("pipeline/generation", GenerationRequest(**one), GenerationReply)
    return granted


def consumed(cluster: Cluster, made: TableView, at: Position) -> CompletionStatus:
    opened = cluster.controller.catalog.partitions["gold"][0].consuming
    message = SegmentConsumed(
        instance="Server_127.0.0.1_8098", table="gold", incarnation=made.record.incarnation, segment=opened, at=at,
        reason=ROW_LIMIT,
    )  # fmt: skip
    reply: SegmentConsumedReply = cluster.send("segmentConsumed", message, SegmentConsumedReply)
    return reply.status


def test_a_rewind_is_looked_at_asked_for_and_carried_out(cluster: Cluster, made: TableView) -> None:
    looked = cluster.post("/tables/gold/rewind?toEpoch=3&dryRun=true")
    assert (looked["epoch"], looked["closed"], looked["offsetsAgain"]) == (3, 5, 40)
    assert looked["segments"] == [made.partitions[0].consuming.name, made.partitions[1].consuming.name]
    assert start(cluster, made).rewind is None, "only looked at"

    cluster.post("/tables/gold/rewind?toEpoch=3")
    granted = start(cluster, made)
    assert granted.rewind is not None
    assert granted.rewind.to_epoch == 3
    late = Position(log_offset=5, epoch=4, generation=1, next_offset=40)
    assert consumed(cluster, made, late) is CompletionStatus.HOLD, "epoch 4 is to go"
    base = BaseRequest(
        table="gold", incarnation=made.record.incarnation, generation=granted.generation, base=6, checkpoint="c",
        first_epoch=6, previous=3, rewound=granted.rewind,
    )  # fmt: skip
    cluster.send("pipeline/base", base, GenerationReply)
    record = cluster.controller.catalog.pipelines["gold"]
    assert record.rewind is None
    assert [(rewind.to_epoch, rewind.next_epoch) for rewind in record.rewinds] == [(3, 6)]
    assert consumed(cluster, made, late) is CompletionStatus.HOLD, "who has not read the Reset yet"
    again = Position(log_offset=9, epoch=6, generation=granted.generation, next_offset=40)
    assert consumed(cluster, made, again) is CompletionStatus.COMMIT
    assert start(cluster, made).rewind is None


@pytest.mark.parametrize(
    ("epoch", "why"),
    [
        ("5", "the last one closed is 5"),
        ("17", "the last one closed is 5"),
        ("x", "expected the number"),
        ("²", "expected the number"),
        ("9" * 5_000, "expected the number"),
        ("", "found"),
    ],
)
def test_what_cannot_be_gone_back_to_is_refused(cluster: Cluster, made: TableView, epoch: str, why: str) -> None:
    answer = cluster.request("POST", f"/tables/gold/rewind?toEpoch={epoch}")
    assert answer.status_code == 400
    assert why in answer.text
    assert cluster.controller.catalog.pipelines["gold"].rewinds == ()


def test_an_epoch_of_fewer_partitions_or_of_a_trimmed_log_is_refused(cluster: Cluster, made: TableView) -> None:
    append(cluster, made, mark(6, partitions=1), mark(7))
    assert "had 1 partitions" in cluster.post("/tables/gold/rewind?toEpoch=6", status=400)["error"]
    cluster.log.trim(epoch_topic("gold", made.record.incarnation), 1, 4)
    assert "begins at 4" in cluster.post("/tables/gold/rewind?toEpoch=5", status=400)["error"]


def test_a_rewind_that_is_under_way_may_only_go_further_back(cluster: Cluster, made: TableView) -> None:
    """Its Resets may be written at any moment: an epoch that they take back would never be found."""
    cluster.post("/tables/gold/rewind?toEpoch=3")
    granted = start(cluster, made)
    assert "is being taken back to epoch 3" in cluster.post("/tables/gold/rewind?toEpoch=4", status=400)["error"]
    cluster.post("/tables/gold/rewind?toEpoch=2")
    base = BaseRequest(
        table="gold", incarnation=made.record.incarnation, generation=granted.generation, base=6, checkpoint="c",
        first_epoch=6, previous=3, rewound=granted.rewind,
    )  # fmt: skip
    cluster.send("pipeline/base", base, GenerationReply)
    again = start(cluster, made).rewind
    assert again is not None
    assert again.to_epoch == 2, "the later wish is still open"


def test_rebuilds_are_for_tables_with_keys_and_begun_once(cluster: Cluster) -> None:
    cluster.beat("Server_127.0.0.1_8098")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", {**schema(), "primaryKeyColumns": ["user_id"]})
    cluster.post("/tables", {**table(), "upsertConfig": {"mode": "FULL"}})
    made = cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]
    assert start(cluster, made).rebuild == 0
    assert cluster.post("/tables/gold/rebuildKeys") == {"table": "gold", "rebuild": 1}
    assert cluster.post("/tables/gold/rebuildKeys")["rebuild"] == 1, "one that was not begun is enough"
    granted = start(cluster, made)
    assert granted.rebuild == 1
    base = BaseRequest(
        table="gold", incarnation=made.record.incarnation, generation=granted.generation, base=6, checkpoint="c",
        first_epoch=6, previous=3, rebuild=1, keyed=True,
    )  # fmt: skip
    cluster.send("pipeline/base", base, GenerationReply)
    record = cluster.controller.catalog.pipelines["gold"]
    assert (record.rebuilds_begun, record.keyed_from) == (1, 6)
    assert record.rebuilt_ms > 0
    assert start(cluster, made).rebuild == 0


def test_append_tables_have_no_keys_to_rebuild(cluster: Cluster, made: TableView) -> None:
    assert "append table" in cluster.post("/tables/gold/rebuildKeys", status=400)["error"]


def test_a_standby_leaves_a_new_table_to_others_for_a_while(cluster: Cluster, made: TableView) -> None:
    request = LeaseRequest(holder=HOLDER, table="gold", incarnation=made.record.incarnation, standby=True)
    reply: LeaseReply = cluster.send("pipeline/lease", request, LeaseReply)
    assert not reply.held
    start(cluster, made)
    other = LeaseRequest(
        holder=HOLDER, table="gold", incarnation=made.record.incarnation, release=True
    )  # fmt: skip
    cluster.send("pipeline/lease", other, LeaseReply)
    assert cluster.send("pipeline/lease", request, LeaseReply).held, "once somebody had it, it is anybody's"


def test_an_append_table_that_gets_keys_has_none_until_a_seed_was_begun(cluster: Cluster, made: TableView) -> None:
    assert start(cluster, made).keyed_from is None
    cluster.post("/schemas?force=true", {**schema(), "primaryKeyColumns": ["user_id"]})
    cluster.post("/tables/gold", {**table(), "upsertConfig": {"mode": "FULL"}}, method="PUT")
    granted = start(cluster, made)
    assert granted.keyed_from == UNKEYED
    base = BaseRequest(
        table="gold", incarnation=made.record.incarnation, generation=granted.generation, base=6, checkpoint="c",
        first_epoch=6, previous=5, keyed=True,
    )  # fmt: skip
    cluster.send("pipeline/base", base, GenerationReply)
    assert start(cluster, made).keyed_from == 6
