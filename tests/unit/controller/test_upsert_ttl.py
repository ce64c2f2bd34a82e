# SPDX-License-Identifier: Apache-2.0
"""Keys live as long as the table's rows: the daily rebuild, the bound it is given, and segments that wait for it, under
a clock that moves only when it is told to."""

from __future__ import annotations

import msgspec
import pytest
from control import Cluster, StillClock, schema, table, tail

from cremant.cluster.leases import holder_name
from cremant.controller.housekeeping import CLOCK_DOUBT_MS, CLOCK_DOUBT_WAIT_MS
from cremant.model.cluster import InstanceReport, SegmentReport, TableView, VersionsReport, segment_key
from cremant.model.limits import QUERY_TIMEOUT_MS, UPSERT_EXPIRY_PATIENCE_MS
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentStatus
from cremant.wire.messages import BaseRequest, GenerationReply, GenerationRequest, LeaseReply, LeaseRequest

S1 = "Server_127.0.0.1_8098"
HOLDER = holder_name("Pipeline_127.0.0.1_1", "n")
DAY_MS = 86_400_000
RETENTION_MS = 10 * DAY_MS


@pytest.fixture
def cluster(still_cluster: Cluster) -> Cluster:
    return still_cluster


def clock_of(cluster: Cluster) -> StillClock:
    clock = cluster.controller.clock
    assert isinstance(clock, StillClock)
    return clock


def create(cluster: Cluster, *, unit: str = "DAYS", value: str = "10", **upsert: object) -> TableView:
    cluster.beat(S1)
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", {**schema(), "primaryKeyColumns": ["user_id"]})
    document = table()
    document["segmentsConfig"] |= {"retentionTimeUnit": unit, "retentionTimeValue": value}
    cluster.post("/tables", document | {"upsertConfig": {"mode": "FULL", **upsert}})
    return cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]


def start(cluster: Cluster, made: TableView, *, epoch: int, previous: int) -> GenerationReply:
    """A pipeline begins with a seed, whose epoch is `epoch`."""
    lease = LeaseRequest(holder=HOLDER, table="gold", incarnation=made.record.incarnation)
    assert cluster.send("pipeline/lease", lease, LeaseReply).held
    request = GenerationRequest(holder=HOLDER, table="gold", incarnation=made.record.incarnation)
    granted: GenerationReply = cluster.send("pipeline/generation", request, GenerationReply)
    base = BaseRequest(
        table="gold", incarnation=made.record.incarnation, generation=granted.generation, base=epoch, checkpoint="c",
        first_epoch=epoch, previous=previous, rebuild=granted.rebuild, keyed=True,
        expire_before_ms=granted.expire_before_ms,
    )  # fmt: skip
    cluster.send("pipeline/base", base, GenerationReply)
    return granted


def seal(cluster: Cluster, made: TableView, *, age_ms: int, epoch: int, oldest_ms: int = 2 * RETENTION_MS) -> str:
    """A sealed segment whose newest row is that old, and its oldest."""
    end = Position(log_offset=1, epoch=epoch, generation=1, next_offset=1)
    sealed = msgspec.structs.replace(
        made.partitions[0].consuming, name="gold__0__900__20260101T0000Z", status=SegmentStatus.DONE, end=end,
        end_offset=1, rows=1, min_time_ms=clock_of(cluster).now_ms() - oldest_ms,
        max_time_ms=clock_of(cluster).now_ms() - age_ms,
    )  # fmt: skip
    cluster.controller.catalog.commit({segment_key("gold", sealed.name): sealed})
    return sealed.name


def say_closed(cluster: Cluster, made: TableView, epoch: int, *, served: str | None = None) -> None:
    said = VersionsReport(closed=epoch, horizon=0, rows=1, in_force=1, tombstones=0, size_bytes=8)
    sealed = () if served is None else (SegmentReport(table="gold", segment=served, state=ReplicaState.ONLINE),)
    tails = (msgspec.structs.replace(tail(made, 0), versions=said),)
    cluster.beat(S1, report=InstanceReport(tails=tails, segments=sealed))


def asked(cluster: Cluster, served: str | None = None) -> int:
    made = cluster.controller.view.table("gold")
    assert made is not None
    say_closed(cluster, made, 0, served=served)
    cluster.controller.pipelines.expire_keys()
    return cluster.controller.catalog.pipelines["gold"].rebuilds_asked


def test_keys_are_looked_through_once_a_day(cluster: Cluster) -> None:
    made = create(cluster)
    old = seal(cluster, made, age_ms=DAY_MS, epoch=5)
    clock_of(cluster).advance(DAY_MS - 1)
    assert asked(cluster, old) == 0, "the table is not a day old"
    clock_of(cluster).advance(1)
    assert (asked(cluster, old), asked(cluster, old)) == (1, 1)
    granted = start(cluster, made, epoch=9, previous=5)
    assert granted.rebuild == 1
    assert granted.expire_before_ms == clock_of(cluster).now_ms() - RETENTION_MS
    for _ in range(3):
        clock_of(cluster).advance(DAY_MS // 3 - 1)
        assert asked(cluster, old) == 1
    clock_of(cluster).advance(DAY_MS // 3)
    assert asked(cluster, old) == 2


def test_nobody_waits_for_a_rebuild_while_no_row_is_as_old_as_the_retention(cluster: Cluster) -> None:
    """It would read all of the table, and take no rows meanwhile, for nothing."""
    made = create(cluster)
    young = seal(cluster, made, age_ms=0, epoch=5, oldest_ms=0)
    for _ in range(9):
        clock_of(cluster).advance(DAY_MS)
        assert asked(cluster, young) == 0
    clock_of(cluster).advance(DAY_MS)
    assert asked(cluster, young) == 1


def test_rows_of_an_open_segment_are_as_old_as_it_is(cluster: Cluster) -> None:
    create(cluster)
    clock_of(cluster).advance(RETENTION_MS - 1)
    assert asked(cluster) == 0
    clock_of(cluster).advance(1)
    assert asked(cluster) == 1


def test_a_start_that_lost_its_state_counts_as_a_rebuild(cluster: Cluster) -> None:
    made = create(cluster)
    start(cluster, made, epoch=2, previous=0)
    clock_of(cluster).advance(DAY_MS - 1)
    assert start(cluster, made, epoch=9, previous=5).rebuild == 0
    clock_of(cluster).advance(DAY_MS - 1)
    assert asked(cluster) == 0


@pytest.mark.parametrize(
    ("unit", "value", "every_ms"), [("HOURS", "3", 3 * 3_600_000), ("MINUTES", "5", 3_600_000), ("DAYS", "90", DAY_MS)]
)
def test_where_rows_are_kept_shorter_than_a_day_keys_are_looked_through_as_often(
    cluster: Cluster, unit: str, value: str, every_ms: int
) -> None:
    old = seal(cluster, create(cluster, unit=unit, value=value), age_ms=DAY_MS, epoch=5, oldest_ms=91 * DAY_MS)
    clock_of(cluster).advance(every_ms - 1)
    assert asked(cluster, old) == 0
    clock_of(cluster).advance(1)
    assert asked(cluster, old) == 1


def test_no_table_stops_for_what_cannot_be_read_whole(cluster: Cluster) -> None:
    """A rebuild takes no rows until it has read everything."""
    made = create(cluster)
    segment = seal(cluster, made, age_ms=DAY_MS, epoch=5)
    clock_of(cluster).advance(DAY_MS)
    assert asked(cluster) == 0, "nobody serves the segment"
    served = SegmentReport(table="gold", segment=segment, state=ReplicaState.ONLINE)
    cluster.beat(S1, report=InstanceReport(segments=(served,)))
    cluster.controller.pipelines.expire_keys()
    assert cluster.controller.catalog.pipelines["gold"].rebuilds_asked == 0, "nobody consumes the partition"
    cluster.beat(S1, report=InstanceReport(segments=(served,), tails=(tail(made, 0),)))
    cluster.controller.pipelines.expire_keys()
    assert cluster.controller.catalog.pipelines["gold"].rebuilds_asked == 1


def test_a_paused_or_disabled_table_is_left_alone(cluster: Cluster) -> None:
    create(cluster)
    clock_of(cluster).advance(2 * DAY_MS)
    cluster.controller.tables.set_paused("gold", paused=True, comment="")
    assert asked(cluster) == 0
    cluster.controller.tables.set_paused("gold", paused=False, comment="")
    cluster.controller.tables.set_enabled("gold", enabled=False)
    assert asked(cluster) == 0


def test_keys_that_live_as_long_as_segments_are_looked_through_but_none_is_too_old(cluster: Cluster) -> None:
    """What went with its segment is not in the state afterwards, that is all."""
    made = create(cluster, metadataTTL=0)
    clock_of(cluster).advance(DAY_MS)
    assert asked(cluster) == 1
    assert start(cluster, made, epoch=9, previous=5).expire_before_ms is None


def test_a_segment_goes_once_its_rows_are_hidden_everywhere(cluster: Cluster) -> None:
    made = create(cluster)
    janitor, clock = cluster.controller.janitor, clock_of(cluster)
    start(cluster, made, epoch=2, previous=0)
    seal(cluster, made, age_ms=11 * DAY_MS, epoch=5)
    say_closed(cluster, made, 6)
    assert janitor.expire_segments() == 0, "its rows are visible"
    start(cluster, made, epoch=9, previous=6)
    assert janitor.expire_segments() == 0, "the seed is planned, not closed"
    start(cluster, made, epoch=12, previous=6)
    say_closed(cluster, made, 9)
    assert janitor.expire_segments() == 0, "the first one was not closed, and another one took its place"
    say_closed(cluster, made, 12)
    assert janitor.expire_segments() == 0, "a query of before may be under way"
    clock.advance(max(60_000, QUERY_TIMEOUT_MS))
    say_closed(cluster, made, 12)
    assert janitor.expire_segments() == 1


def test_a_seed_that_was_not_closed_and_is_not_for_expiry_hides_nothing(cluster: Cluster) -> None:
    """Its epoch's number may be taken by another one."""
    made = create(cluster)
    start(cluster, made, epoch=2, previous=0)
    start(cluster, made, epoch=9, previous=6)
    document = table()
    document["segmentsConfig"] |= {"retentionTimeUnit": "DAYS", "retentionTimeValue": "10"}
    cluster.post("/tables/gold", document | {"upsertConfig": {"mode": "FULL", "metadataTTL": 0}}, method="PUT")
    start(cluster, made, epoch=9, previous=6)
    assert cluster.controller.catalog.pipelines["gold"].expiry is None


def test_a_segment_with_rows_that_came_after_the_seed_waits_for_the_next(cluster: Cluster) -> None:
    made = create(cluster)
    start(cluster, made, epoch=2, previous=0)
    start(cluster, made, epoch=9, previous=6)
    seal(cluster, made, age_ms=11 * DAY_MS, epoch=9)
    for wait_ms in (0, 60_000, 60_000):
        clock_of(cluster).advance(wait_ms)
        say_closed(cluster, made, 10)
        assert cluster.controller.janitor.expire_segments() == 0


def test_no_segment_waits_for_ever(cluster: Cluster) -> None:
    made = create(cluster)
    seal(cluster, made, age_ms=10 * DAY_MS + UPSERT_EXPIRY_PATIENCE_MS, epoch=5)
    assert cluster.controller.janitor.expire_segments() == 0
    clock_of(cluster).advance(1)
    assert cluster.controller.janitor.expire_segments() == 1


def test_no_key_expires_by_a_clock_that_may_be_wrong(cluster: Cluster) -> None:
    made = create(cluster)
    cluster.clock = StillClock(clock_of(cluster).now_ms() + CLOCK_DOUBT_MS + 400 * DAY_MS)
    cluster.restart()
    cluster.beat(S1)
    assert start(cluster, made, epoch=9, previous=5).expire_before_ms is None
    assert cluster.controller.catalog.pipelines["gold"].expiry is None
    clock_of(cluster).advance(CLOCK_DOUBT_WAIT_MS)
    assert start(cluster, made, epoch=12, previous=5).expire_before_ms is not None
