# SPDX-License-Identifier: Apache-2.0
"""Rebalance through the REST, with pretended servers that take up what the view gives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import control
import msgspec
import pytest
from control import Cluster, tail

from cremant.model.cluster import InstanceReport, SegmentReport, segment_key
from cremant.model.limits import REBALANCE_AWAY_MS
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentStatus
from cremant.wire.messages import CommitEnd, CommitEndReply, CompletionStatus

S = [f"Server_127.0.0.1_{8001 + n}" for n in range(5)]


class Fleet:
    """Servers that hold what the view assigns to them, except what a test keeps from them."""

    def __init__(self, cluster: Cluster, servers: list[str]) -> None:
        self.cluster = cluster
        self.servers = list(servers)
        #: (server, segment or partition number) that do not get ready.
        self.withheld: Callable[[str, object], bool] = lambda server, what: False
        #: Fewest able replicas that any partition, any segment had at any look.
        self.fewest: dict[str, int] = {}
        for server in servers:
            cluster.beat(server)

    def beat(self) -> None:
        self.cluster.controller.rebalances.run()
        view = self.cluster.controller.view.build(0)
        able: dict[str, int] = {}
        for server in self.servers:
            segments: list[SegmentReport] = []
            tails = []
            for table in view.tables.values():
                for part in table.partitions:
                    if server in part.record.replicas and not self.withheld(server, part.record.partition):
                        tails.append(tail(table, part.record.partition, next_offset=100))
                        key = f"{part.record.partition}"
                        able[key] = able.get(key, 0) + 1
                for segment in table.segments:
                    if server in segment.replicas and not self.withheld(server, segment.name):
                        segments.append(
                            SegmentReport(
                                table=table.name,
                                segment=segment.name,
                                state=ReplicaState.ONLINE,
                                checksum=segment.checksum,
                            )
                        )
                        able[segment.name] = able.get(segment.name, 0) + 1
            self.cluster.beat(server, report=InstanceReport(segments=tuple(segments), tails=tuple(tails)))
        for key, count in able.items():
            self.fewest[key] = min(count, self.fewest.get(key, count))

    def pass_time(self, ms: int) -> None:
        """In steps that do not look like a pause of the controller."""
        clock: Any = self.cluster.controller.clock
        for _ in range(ms // 1_000 + 1):
            clock.advance(1_000)
            self.beat()

    def until(self, condition: Callable[[], Any], timeout_s: float = 20) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline_s
            self.beat()
            time.sleep(0.01)
        return found

    def ended(self, job: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status: dict[str, Any] = self.cluster.get(f"/rebalanceStatus/{job}")
            return status if status["tableRebalanceProgressStats"]["status"] != "IN_PROGRESS" else None

        found: dict[str, Any] = self.until(look)
        return found


def _sealed(cluster: Cluster, count: int) -> list[str]:
    """Segments of the table's partitions as if they had been sealed long ago."""
    catalog = cluster.controller.catalog
    names = []
    with catalog.lock:
        partitions = catalog.partitions["gold"]
        for number in range(count):
            part = partitions[number % len(partitions)]
            opened = catalog.segments["gold"][part.consuming]
            name = f"gold__{part.partition}__{900 + number}__20260101T0000Z"
            end = Position(log_offset=1, epoch=1, generation=1, next_offset=1)
            sealed = msgspec.structs.replace(
                opened, name=name, sequence=900 + number, status=SegmentStatus.DONE, rows=1, size_bytes=1000, end=end,
                end_offset=1, checksum="sha256:aa", replicas=part.replicas,
            )  # fmt: skip
            catalog.commit({segment_key("gold", name): sealed})
            names.append(name)
    return names


def _replicas(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    catalog = cluster.controller.catalog
    with catalog.lock:
        found = {str(p): record.replicas for p, record in catalog.partitions["gold"].items()}
        found |= {s.name: s.replicas for s in catalog.segments["gold"].values() if s.status is SegmentStatus.DONE}
        return found


@pytest.fixture
def cluster(still_cluster: Cluster) -> Cluster:
    return still_cluster


@pytest.fixture
def fleet(cluster: Cluster) -> Fleet:
    """Three servers, a table with four partitions and two replicas, twelve sealed segments."""
    made = Fleet(cluster, S[:3])
    cluster.create(partitions=4, replication=2)
    for server in ("Server_127.0.0.1_8098", "Server_127.0.0.1_8097"):
        made.servers.append(server)
    _sealed(cluster, 12)
    made.beat()
    # The two that `create` brought along are gone for good.
    made.servers = S[:3]
    made.pass_time(5_000)
    answer = cluster.post("/tables/gold/rebalance")
    made.ended(answer["jobId"])
    made.fewest.clear()
    return made


def test_a_balanced_table_is_left_alone(cluster: Cluster, fleet: Fleet) -> None:
    before = _replicas(cluster)
    answer = cluster.post("/tables/gold/rebalance?dryRun=true")
    assert (answer["status"], answer["description"]) == ("NO_OP", "Table is already balanced")
    assert cluster.post("/tables/gold/rebalance")["status"] == "NO_OP"
    assert _replicas(cluster) == before


def test_a_dry_run_shows_what_would_move_and_moves_nothing(cluster: Cluster, fleet: Fleet) -> None:
    before = _replicas(cluster)
    fleet.servers.append(S[3])
    cluster.beat(S[3])
    answer = cluster.post("/tables/gold/rebalance?dryRun=true&type=REALTIME")
    assert (answer["status"], answer["description"]) == ("DONE", "Dry-run mode")
    info = answer["rebalanceSummaryResult"]["serverInfo"]
    assert info["serversAdded"] == [S[3]]
    assert info["serversGettingNewSegments"] == [S[3]]
    assert info["numServers"] == {"valueBeforeRebalance": 3, "expectedValueAfterRebalance": 4}
    moved = answer["rebalanceSummaryResult"]["segmentInfo"]
    assert moved["totalSegmentsToBeMoved"] == moved["totalSegmentsToBeDeleted"] == 2 + 6
    assert moved["totalEstimatedDataToBeMovedInBytes"] == 6_000
    assert moved["consumingSegmentToBeMovedSummary"]["numConsumingSegmentsToBeMoved"] == 2
    assert sum(S[3] in replicas for replicas in answer["segmentAssignment"].values()) == 8
    fleet.beat()
    assert _replicas(cluster) == before
    assert cluster.request("GET", f"/rebalanceStatus/{answer['jobId']}").status_code == 404


def test_a_new_server_takes_its_share_and_no_replica_is_missed_on_the_way(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers.append(S[3])
    cluster.beat(S[3])
    answer = cluster.post("/tables/gold/rebalance")
    assert answer["status"] == "IN_PROGRESS"
    again = cluster.request("POST", "/tables/gold/rebalance")
    assert again.status_code == 409
    assert answer["jobId"] in again.text
    status = fleet.ended(answer["jobId"])
    assert status["tableRebalanceProgressStats"]["status"] == "DONE"
    assert status["tableRebalanceProgressStats"]["rebalanceProgressStatsOverall"]["totalSegmentsToBeMoved"] == 8
    replicas = _replicas(cluster)
    assert sum(S[3] in found for found in replicas.values()) == 8
    for name, servers in replicas.items():
        assert len(servers) == 2
        assert set(servers) == set(replicas[name.split("__")[1] if "__" in name else name])
    assert min(fleet.fewest.values()) == 2
    fleet.pass_time(6_000)
    segments = cluster.controller.catalog.segments["gold"].values()
    assert all(set(s.copies) == set(s.replicas) for s in segments if s.status is SegmentStatus.DONE)
    ideal = cluster.get("/tables/gold/idealstate")["REALTIME"]
    assert all(len(servers) == 2 for servers in ideal.values())


def test_a_server_that_commits_a_segment_keeps_its_part_until_that_is_done(cluster: Cluster, fleet: Fleet) -> None:
    catalog = cluster.controller.catalog
    end = Position(log_offset=9, epoch=2, generation=1, next_offset=50)
    with catalog.lock:
        committing = {
            p: msgspec.structs.replace(
                catalog.segments["gold"][record.consuming], status=SegmentStatus.COMMITTING, end=end, end_offset=50,
                committer=record.replicas[0], commit_token=1,
            )
            for p, record in catalog.partitions["gold"].items()
        }  # fmt: skip
        catalog.commit({segment_key("gold", segment.name): segment for segment in committing.values()})
    fleet.servers = [*S[1:3], S[3]]
    cluster.beat(S[3])
    _kill(cluster, S[0])  # and back once the job is planned without it
    job = cluster.post("/tables/gold/rebalance")["jobId"]
    held = {str(p): segment.committer for p, segment in committing.items() if segment.committer == S[0]}
    assert held
    fleet.servers.append(S[0])
    for _ in range(10):
        fleet.beat()
    assert {p: S[0] in replicas for p, replicas in _replicas(cluster).items() if p in held} == dict.fromkeys(held, True)
    assert cluster.get(f"/rebalanceStatus/{job}")["tableRebalanceProgressStats"]["status"] == "IN_PROGRESS"
    incarnation = catalog.tables["gold"].incarnation
    for segment in committing.values():
        message = CommitEnd(
            instance=str(segment.committer), table="gold", incarnation=incarnation, segment=segment.name, token=1,
            end=end, rows=50, size_bytes=1, checksum="sha256:bb", file_checksum="sha256:cc", store_url=None,
        )  # fmt: skip
        assert cluster.send("commitEnd", message, CommitEndReply).status == CompletionStatus.COMMIT_SUCCESS
    assert fleet.ended(job)["tableRebalanceProgressStats"]["status"] == "DONE"
    assert all(len(replicas) == 2 and S[0] not in replicas for replicas in _replicas(cluster).values())
    assert min(fleet.fewest.values()) == 2


def _kill(cluster: Cluster, server: str) -> None:
    with cluster.controller.catalog.lock:
        cluster.controller.instances._heard.pop(server)
        cluster.controller.instances.refresh_liveness()


def test_a_replica_stays_until_the_new_one_is_able_and_the_status_says_who_is_waited_for(
    cluster: Cluster, fleet: Fleet
) -> None:
    fleet.servers.append(S[3])
    fleet.withheld = lambda server, what: server == S[3]
    cluster.beat(S[3])
    before = _replicas(cluster)
    answer = cluster.post("/tables/gold/rebalance")
    for _ in range(20):
        fleet.beat()
    now = _replicas(cluster)
    assert all(set(before[name]) <= set(now[name]) for name in before)
    assert sum(len(found) == 3 for found in now.values()) == 8
    waiting = cluster.get(f"/rebalanceStatus/{answer['jobId']}")["waitingFor"]
    assert len(waiting) == 8
    assert set(map(tuple, waiting.values())) == {(S[3],)}
    fleet.withheld = lambda server, what: False
    assert fleet.ended(answer["jobId"])["tableRebalanceProgressStats"]["status"] == "DONE"


def test_a_job_goes_on_after_the_controller_restarts_at_any_step(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers.append(S[3])
    cluster.beat(S[3])
    job = cluster.post("/tables/gold/rebalance")["jobId"]
    for step in range(12):
        fleet.withheld = lambda server, what, step=step: hash(str(what)) % 12 > step  # type: ignore[misc]
        fleet.beat()
        cluster.restart()
        fleet.beat()
    fleet.withheld = lambda server, what: False
    assert fleet.ended(job)["tableRebalanceProgressStats"]["status"] == "DONE"
    assert all(len(servers) == 2 for servers in _replicas(cluster).values())
    assert sum(S[3] in servers for servers in _replicas(cluster).values()) == 8


def test_a_live_server_is_taken_out_without_losing_a_copy(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers.append(S[3])
    cluster.beat(S[3])
    path = f"/instances/{S[0]}/state"
    assert "alive" in cluster.post(f"{path}?state=DROP", method="PUT", status=409)["error"]
    assert cluster.post(f"{path}?state=disable", method="PUT") == {
        "status": f"Request to disable instance '{S[0]}' is successful"
    }
    assert cluster.get(f"/instances/{S[0]}")["enabled"] is False
    fleet.beat()
    assert any(S[0] in servers for servers in _replicas(cluster).values()), "what it has it serves until it is moved"
    cluster.beat(S[0], nonce="n2")
    assert cluster.get(f"/instances/{S[0]}")["enabled"] is False, "it outlives a restart of the server"
    enabled = {one["id"]: one["enabled"] for one in cluster.get("/status")["instances"]}
    assert [name for name, is_enabled in enabled.items() if not is_enabled] == [S[0]]
    fleet.fewest.clear()
    job = cluster.post("/tables/gold/rebalance")["jobId"]
    assert fleet.ended(job)["tableRebalanceProgressStats"]["status"] == "DONE"
    assert {server for servers in _replicas(cluster).values() for server in servers} == {S[1], S[2], S[3]}
    assert set(fleet.fewest.values()) == {2}, "at no moment fewer able replicas"
    cluster.restart()
    assert cluster.get(f"/instances/{S[0]}")["enabled"] is False, "and one of the controller"
    cluster.post(f"{path}?state=ENABLE", method="PUT")
    assert cluster.get(f"/instances/{S[0]}")["enabled"] is True
    enabled = {one["id"]: one["enabled"] for one in cluster.get("/status")["instances"]}
    assert enabled[S[0]] is True
    assert "Unknown state" in cluster.post(f"{path}?state=asleep", method="PUT", status=400)["error"]
    assert "not found" in cluster.post("/instances/Server_x_1/state?state=ENABLE", method="PUT", status=404)["error"]


def test_a_server_that_is_to_be_taken_out_gets_no_new_table(cluster: Cluster, fleet: Fleet) -> None:
    for server in S[:2]:
        cluster.post(f"/instances/{server}/state?state=DISABLE", method="PUT")
    cluster.post("/schemas", control.schema("silver"))
    error = cluster.post("/tables", control.table("silver", replication=2), status=400)["error"]
    assert "found 1" in error
    cluster.post("/tables", control.table("silver"))
    placed = cluster.controller.catalog.partitions["silver"].values()
    assert {server for record in placed for server in record.replicas} == {S[2]}


def test_a_cancelled_job_stops_where_it_is_and_the_next_one_goes_on(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers.append(S[3])
    fleet.withheld = lambda server, what: server == S[3]
    cluster.beat(S[3])
    job = cluster.post("/tables/gold/rebalance")["jobId"]
    fleet.beat()
    assert cluster.post("/tables/gold/rebalance", method="DELETE") == [job]
    assert cluster.post("/tables/gold/rebalance", method="DELETE") == []
    assert cluster.get(f"/rebalanceStatus/{job}")["tableRebalanceProgressStats"]["status"] == "CANCELLED"
    stopped = _replicas(cluster)
    for _ in range(5):
        fleet.beat()
    assert _replicas(cluster) == stopped
    fleet.withheld = lambda server, what: False
    following = cluster.post("/tables/gold/rebalance")["jobId"]
    assert fleet.ended(following)["tableRebalanceProgressStats"]["status"] == "DONE"
    assert all(len(servers) == 2 for servers in _replicas(cluster).values())


def test_a_dead_server_is_replaced_and_one_that_dies_in_the_middle_too(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers = [*S[1:3], S[3], S[4]]
    fleet.withheld = lambda server, what: server == S[3]
    fleet.pass_time(5_000)
    job = cluster.post("/tables/gold/rebalance")["jobId"]
    fleet.beat()
    assert any(S[3] in servers for servers in _replicas(cluster).values())
    fleet.servers = [*S[1:3], S[4]]  # the newcomer dies before it has anything
    fleet.pass_time(5_000 + REBALANCE_AWAY_MS)
    status = fleet.ended(job)
    assert status["tableRebalanceProgressStats"]["status"] == "DONE"
    assert status["plannedAgain"] == 1
    assert {server for servers in _replicas(cluster).values() for server in servers} == {S[1], S[2], S[4]}


def test_too_few_servers_fail_the_plan_by_number(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers = S[:1]
    fleet.pass_time(5_000)
    answer = cluster.post("/tables/gold/rebalance")
    assert answer["status"] == "FAILED"
    assert "replication 2 needs 2 live servers, found 1" in answer["description"]


def test_a_job_without_progress_fails_after_its_time(cluster: Cluster, fleet: Fleet) -> None:
    fleet.servers.append(S[3])
    fleet.withheld = lambda server, what: server == S[3]
    cluster.beat(S[3])
    job = cluster.post("/tables/gold/rebalance?externalViewStabilizationTimeoutInMs=60000")["jobId"]
    for _ in range(4):
        fleet.beat()
    fleet.pass_time(60_000)
    status = fleet.ended(job)["tableRebalanceProgressStats"]
    assert status["status"] == "FAILED"
    assert "no progress for 60000 ms" in status["completionStatusMsg"]
    assert S[3] in status["completionStatusMsg"]


def test_another_replication_takes_effect_with_a_rebalance(cluster: Cluster, fleet: Fleet) -> None:
    config = cluster.get("/tables/gold")["REALTIME"]
    config["segmentsConfig"]["replication"] = "3"
    cluster.post("/tables/gold", config, method="PUT")
    fleet.ended(cluster.post("/tables/gold/rebalance")["jobId"])
    assert all(len(servers) == 3 for servers in _replicas(cluster).values())
    config["segmentsConfig"]["replication"] = "1"
    cluster.post("/tables/gold", config, method="PUT")
    fleet.fewest.clear()
    fleet.ended(cluster.post("/tables/gold/rebalance")["jobId"])
    assert all(len(servers) == 1 for servers in _replicas(cluster).values())


def test_without_consuming_only_sealed_segments_move_and_downtime_does_not_wait(cluster: Cluster, fleet: Fleet) -> None:
    before = _replicas(cluster)
    fleet.servers.append(S[3])
    fleet.withheld = lambda server, what: server == S[3]
    cluster.beat(S[3])
    job = cluster.post("/tables/gold/rebalance?includeConsuming=false&downtime=true")["jobId"]
    fleet.ended(job)
    after = _replicas(cluster)
    moved = {name for name in after if S[3] in after[name]}
    assert moved
    assert all("__" in name for name in moved)
    assert all(after[str(p)] == before[str(p)] for p in range(4))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("dryRun=perhaps", "dryRun: expected true or false, found 'perhaps'"),
        ("minAvailableReplicas=two", "minAvailableReplicas: expected a number, found 'two'"),
        ("externalViewStabilizationTimeoutInMs=0", "expected at least 1, found 0"),
        ("type=sometimes", "type: expected realtime or offline"),
    ],
)
def test_malformed_options_are_refused_by_name(cluster: Cluster, fleet: Fleet, query: str, words: str) -> None:
    assert words in cluster.post(f"/tables/gold/rebalance?{query}", status=400)["error"]


def test_jobs_of_tables_that_are_not_there_are_not_found(cluster: Cluster) -> None:
    for method, path in (
        ("POST", "/tables/nosuch/rebalance"), ("DELETE", "/tables/nosuch/rebalance"),
        ("POST", "/tables/nosuch/forceCommit"), ("GET", "/rebalanceStatus/nosuch"),
        ("GET", "/tables/forceCommitStatus/nosuch"),
    ):  # fmt: skip
        assert cluster.request(method, path).status_code == 404, path


def test_dropping_a_table_forgets_its_jobs(cluster: Cluster, fleet: Fleet) -> None:
    job = cluster.post("/tables/gold/rebalance")["jobId"]
    cluster.post("/tables/gold", method="DELETE")
    assert cluster.request("GET", f"/rebalanceStatus/{job}").status_code == 404
    cluster.controller.rebalances.run()


# --- force commit -------------------------------------------------------------------------------------------------
