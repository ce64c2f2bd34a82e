# SPDX-License-Identifier: Apache-2.0
"""Force commit through the REST: what is marked, when a job is done, what becomes of marks. Servers are pretended."""

from __future__ import annotations

import msgspec
from control import Cluster, tail

from cremant.log.api import Message
from cremant.model.cluster import InstanceReport, Role, TableView, segment_key
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
)

SERVER = "Server_127.0.0.1_8098"


def _opened(cluster: Cluster) -> dict[int, SegmentMetadata]:
    view = cluster.controller.view.build(0)
    return {part.record.partition: part.consuming for part in view.tables["gold"].partitions}


def _created(cluster: Cluster) -> None:
    made = cluster.create(partitions=3)
    tails = [tail(made, 0, next_offset=100), tail(made, 1, next_offset=0), tail(made, 2, next_offset=70)]
    cluster.beat(SERVER, report=InstanceReport(tails=tuple(tails)))


def test_force_commit_marks_open_segments_with_rows_at_what_was_visible(cluster: Cluster) -> None:
    _created(cluster)
    job = cluster.post("/tables/gold/forceCommit")
    assert (job["forceCommitStatus"], job["jobMetaZKWriteStatus"]) == ("SUCCESS", "SUCCESS")
    opened = _opened(cluster)
    assert {p: segment.force_at_offset for p, segment in opened.items()} == {0: 100, 1: None, 2: 70}
    status = cluster.get(f"/tables/forceCommitStatus/{job['forceCommitJobId']}")
    wanted = sorted((opened[0].name, opened[2].name))
    assert sorted(status["segmentsForceCommitted"]) == sorted(status["segmentsYetToBeCommitted"]) == wanted
    assert status["numberOfSegmentsYetToBeCommitted"] == 2
    assert (status["tableName"], status["jobType"]) == ("gold_REALTIME", "FORCE_COMMIT")
    catalog = cluster.controller.catalog
    done = msgspec.structs.replace(opened[0], status=SegmentStatus.DONE)
    catalog.commit({segment_key("gold", done.name): done})
    cluster.restart()
    status = cluster.get(f"/tables/forceCommitStatus/{job['forceCommitJobId']}")
    assert status["segmentsYetToBeCommitted"] == [opened[2].name]


def test_force_commit_of_some_partitions_or_segments(cluster: Cluster) -> None:
    _created(cluster)
    opened = _opened(cluster)
    cluster.post("/tables/gold/forceCommit?partitions=2")
    assert {p: segment.force_at_offset for p, segment in _opened(cluster).items()} == {0: None, 1: None, 2: 70}
    cluster.post(f"/tables/gold/forceCommit?segments={opened[0].name}")
    assert _opened(cluster)[0].force_at_offset == 100
    for query, words in (
        (f"partitions=0&segments={opened[0].name}", "both partitions and segments"),
        ("partitions=7", "no partition 7"), ("partitions=x", "expected numbers"),
        (f"partitions={'1' * 5_000}", "expected numbers"),
        ("segments=gold__0__7__x", "not a consuming segment of table gold: gold__0__7__x"),
    ):  # fmt: skip
        assert words in cluster.post(f"/tables/gold/forceCommit?{query}", status=400)["error"]


def _produce(cluster: Cluster, **rows: int) -> None:
    """Messages in partitions of the stream: p0, p1..."""
    for partition, count in rows.items():
        cluster.log.append("events", int(partition[1:]), [Message(value=b"{}")] * count)


def _left(cluster: Cluster, job: str) -> list[int]:
    """Partitions of the segments that the job still waits for."""
    left = cluster.get(f"/tables/forceCommitStatus/{job}")["segmentsYetToBeCommitted"]
    return sorted(cluster.controller.catalog.segments["gold"][name].partition for name in left)


def _forced(cluster: Cluster) -> dict[int, int | None]:
    return {p: segment.force_at_offset for p, segment in _opened(cluster).items()}


def test_what_was_produced_is_to_be_committed_though_no_server_has_seen_it(cluster: Cluster) -> None:
    cluster.create(partitions=3)
    _produce(cluster, p0=500, p2=30)
    job = cluster.post("/tables/gold/forceCommit")["forceCommitJobId"]
    assert _forced(cluster) == {0: 500, 1: None, 2: 30}
    assert _left(cluster, job) == [0, 2]


def test_a_paused_table_commits_what_is_visible_and_so_does_one_whose_stream_is_gone(cluster: Cluster) -> None:
    _created(cluster)
    _produce(cluster, p0=500)
    cluster.post("/tables/gold/pauseConsumption")
    cluster.post("/tables/gold/forceCommit")
    assert _forced(cluster) == {0: 100, 1: None, 2: 70}
    cluster.post("/tables/gold/resumeConsumption")
    cluster.log.delete_topic("events")
    cluster.post("/tables/gold/forceCommit")
    assert _forced(cluster) == {0: 100, 1: None, 2: 70}
    cluster.log.create_topic("events", 3)
    _produce(cluster, p1=500)
    cluster.post("/tables/gold/forceCommit")
    assert _forced(cluster) == {0: 100, 1: None, 2: 70}, "that is another topic"


def test_a_later_job_takes_nothing_from_an_earlier_one(cluster: Cluster) -> None:
    _created(cluster)
    _produce(cluster, p0=500)
    first = cluster.post("/tables/gold/forceCommit")["forceCommitJobId"]
    cluster.post("/tables/gold/pauseConsumption")
    second = cluster.post("/tables/gold/forceCommit")["forceCommitJobId"]
    assert _forced(cluster) == {0: 500, 1: None, 2: 70}
    assert _left(cluster, first) == _left(cluster, second) == [0, 2]


def test_a_mark_goes_when_all_that_was_produced_became_no_row(still_cluster: Cluster) -> None:
    cluster = still_cluster
    made = cluster.create(partitions=2)
    _produce(cluster, p0=50, p1=50)
    job = cluster.post("/tables/gold/forceCommit")["forceCommitJobId"]
    force_commits = cluster.controller.force_commits
    halfway = tail(made, 0, next_offset=20)
    cluster.beat(SERVER, report=InstanceReport(tails=(msgspec.structs.replace(halfway, rows=0),)))
    force_commits.run()
    assert _left(cluster, job) == [0, 1]
    tails = (msgspec.structs.replace(tail(made, 0, next_offset=50), rows=0), tail(made, 1, next_offset=50))
    cluster.beat(SERVER, report=InstanceReport(tails=tails))
    force_commits.run()
    assert _forced(cluster) == {0: None, 1: 50}
    assert _left(cluster, job) == [1]
    tails = (tail(made, 0, next_offset=90), tails[1])
    cluster.beat(SERVER, report=InstanceReport(tails=tails))
    assert _left(cluster, job) == [1], "rows that came later are none of its business"


def test_a_segment_that_a_limit_ends_hands_its_mark_on(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    _produce(cluster, p0=100)
    job = cluster.post("/tables/gold/forceCommit")["forceCommitJobId"]
    listed = cluster.get(f"/tables/forceCommitStatus/{job}")["segmentsForceCommitted"]
    for end, forced in ((60, 100), (100, None)):
        assert len(_left(cluster, job)) == 1
        _commit(cluster, made, end)
        assert _forced(cluster) == {0: forced}
    assert _left(cluster, job) == []
    assert cluster.get(f"/tables/forceCommitStatus/{job}")["segmentsForceCommitted"] == listed


def test_rows_behind_a_segment_that_is_being_committed_are_sealed_with_the_next(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    reply = _consumed(cluster, made, 60)
    _produce(cluster, p0=100)
    job = cluster.post("/tables/gold/forceCommit")["forceCommitJobId"]
    assert len(_left(cluster, job)) == 1
    _end(cluster, made, 60, reply.token)
    assert _forced(cluster) == {0: 100}
    assert len(_left(cluster, job)) == 1
    _commit(cluster, made, 100)
    assert _left(cluster, job) == []


def _consumed(cluster: Cluster, made: TableView, end: int) -> SegmentConsumedReply:
    message = SegmentConsumed(
        instance=SERVER, table="gold", incarnation=made.record.incarnation, segment=_opened(cluster)[0].name,
        at=Position(log_offset=end, epoch=end, generation=1, next_offset=end), reason="test",
    )  # fmt: skip
    return cluster.send("segmentConsumed", message, SegmentConsumedReply)


def _end(cluster: Cluster, made: TableView, end: int, token: int) -> None:
    message = CommitEnd(
        instance=SERVER, table="gold", incarnation=made.record.incarnation, segment=_opened(cluster)[0].name,
        token=token, end=Position(log_offset=end, epoch=end, generation=1, next_offset=end), rows=end, size_bytes=1,
        checksum="sha256:bb", file_checksum="sha256:cc", store_url=None,
    )  # fmt: skip
    assert cluster.send("commitEnd", message, CommitEndReply).status == CompletionStatus.COMMIT_SUCCESS


def _commit(cluster: Cluster, made: TableView, end: int) -> None:
    _end(cluster, made, end, _consumed(cluster, made, end).token)


def test_old_jobs_are_forgotten_in_the_end(cluster: Cluster) -> None:
    _created(cluster)
    jobs = [cluster.post("/tables/gold/forceCommit")["forceCommitJobId"] for _ in range(20)]
    known = [job for job in jobs if cluster.request("GET", f"/tables/forceCommitStatus/{job}").status_code == 200]
    assert known == jobs[-len(known) :]
    assert len(known) == 16
    assert cluster.beat(SERVER, Role.SERVER).status_code == 200
