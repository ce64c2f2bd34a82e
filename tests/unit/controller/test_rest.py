# SPDX-License-Identifier: Apache-2.0
"""Cremant's own endpoints and what the recorded calls do not cover: topics, status, segments, retention, brokers."""

from __future__ import annotations

import http.server
import threading
import time
from typing import Any

import msgspec
import pytest
from authority import Authority
from control import Cluster, schema, table, tail

from cremant.controller.main import make_controller_app
from cremant.log.api import Message
from cremant.model.cluster import TAIL_QUOTA, InstanceReport, Role, SegmentReport, TableView
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, StoreState
from cremant.model.settings import Settings
from cremant.segment.archive import unpack
from cremant.shell.tls import client_context, listener_context
from cremant.store.deepstore import checksum_of
from cremant.wire.messages import CommitEnd, CommitEndReply, SegmentConsumed, SegmentConsumedReply

S1, S2 = "Server_127.0.0.1_8098", "Server_127.0.0.1_8097"


def _seal(cluster: Cluster, made: TableView, offset: int, **fields: Any) -> str:
    """Commits the open segment of partition 0 at `offset`; returns its name."""
    name = cluster.controller.catalog.partitions["gold"][0].consuming
    position = Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)
    incarnation = made.record.incarnation
    consumed = SegmentConsumed(
        instance=S1, table="gold", incarnation=incarnation, segment=name, at=position, reason="rowLimit"
    )
    reply = cluster.send("segmentConsumed", consumed, SegmentConsumedReply)
    values: dict[str, Any] = {"store_url": None, "max_time_ms": 1, "min_time_ms": 1, **fields}
    if values["store_url"] is not None:
        values["store_state"] = StoreState.STORED
    ended = CommitEnd(
        instance=S1, table="gold", incarnation=incarnation, segment=name, token=reply.token, end=position, rows=5,
        size_bytes=11, checksum="sha256:00ff", **{"file_checksum": "f", **values},
    )  # fmt: skip
    assert cluster.send("commitEnd", ended, CommitEndReply).status == "COMMIT_SUCCESS"
    return name


# --- topics -------------------------------------------------------------------------------------------------------


def test_topics_are_created_listed_grown_and_deleted(cluster: Cluster) -> None:
    assert cluster.post("/topics", {"name": "a", "partitions": 2})["partitions"] == 2
    assert cluster.post("/topics/b?partitions=1", method="PUT")["name"] == "b"
    cluster.post("/topics", {"name": "a"}, status=409)
    assert [(t["name"], t["partitions"], t["messages"]) for t in cluster.get("/topics")["topics"]] == [
        ("a", 2, 0), ("b", 1, 0),
    ]  # fmt: skip
    assert cluster.post("/topics/b?partitions=3&grow=true", method="PUT")["partitions"] == 3
    assert cluster.request("DELETE", "/topics/b").status_code == 200
    assert cluster.request("DELETE", "/topics/b").status_code == 404


@pytest.mark.parametrize(
    "document",
    [{}, {"name": 5}, {"name": "a b"}, {"name": "a", "partitions": 0}, {"name": "a", "partitions": True}, []],
)
def test_malformed_topics_are_refused(cluster: Cluster, document: Any) -> None:
    assert "error" in cluster.post("/topics", document, status=400)


def test_a_tables_own_topics_are_hidden_and_cannot_be_touched(cluster: Cluster) -> None:
    made = cluster.create()
    internal = epoch_topic("gold", made.record.incarnation)
    assert [t["name"] for t in cluster.get("/topics")["topics"]] == ["events"]
    assert internal in [t["name"] for t in cluster.get("/topics?internal=true")["topics"]]
    assert cluster.request("DELETE", f"/topics/{internal}").status_code == 400
    assert cluster.request("POST", f"/topics/{internal}", content=b"{}").status_code == 400
    cluster.post("/topics", {"name": f"epochs.x.{'0' * 16}"}, status=400)


def test_a_tables_stream_cannot_be_deleted(cluster: Cluster) -> None:
    cluster.create()
    answer = cluster.request("DELETE", "/topics/events")
    assert answer.status_code == 409
    assert "stream of table gold" in answer.json()["error"]


def test_produced_lines_are_acknowledged_with_their_offsets(cluster: Cluster) -> None:
    cluster.post("/topics", {"name": "events", "partitions": 2})
    first = cluster.request("POST", "/topics/events", content=b'{"a":1}\n{"a":2}\n').json()
    second = cluster.request("POST", "/topics/events", content=b'{"a":3}').json()
    assert (first["messages"], second["messages"]) == (2, 1)
    assert sorted([*first["offsets"].items(), *second["offsets"].items()]) == [("0", [[0, 2]]), ("1", [[0, 1]])]
    assert (first["token"], second["token"]) == ('{"0":1}', '{"1":0}')  # offsets of the last rows, for readYourWrites


def test_keyed_lines_of_one_key_go_to_one_partition(cluster: Cluster) -> None:
    cluster.post("/topics", {"name": "events", "partitions": 4})
    lines = b"\n".join(b'{"key":"k","value":{"n":%d}}' % n for n in range(10))
    answer = cluster.request("POST", "/topics/events?keyed=true", content=lines).json()
    assert [spans for spans in answer["offsets"].values()] == [[[0, 10]]]


def test_a_malformed_line_is_named_and_nothing_is_appended(cluster: Cluster) -> None:
    cluster.post("/topics", {"name": "events", "partitions": 1})
    answer = cluster.request("POST", "/topics/events", content=b'{"a":1}\nnot json\n')
    assert answer.status_code == 400
    assert "line 2" in answer.json()["error"]
    assert cluster.log.latest("events", 0) == 0


# --- segments -----------------------------------------------------------------------------------------------------


def test_a_sealed_segment_shows_in_lists_states_metadata_and_sizes(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    name = _seal(cluster, made, 7)
    said = SegmentReport(table="gold", segment=name, state=ReplicaState.ONLINE, checksum="sha256:00ff", bytes=11)
    cluster.beat(S1, report=InstanceReport(segments=(said,), tails=(tail(made, 0, next_offset=9),)))
    following = cluster.controller.catalog.partitions["gold"][0].consuming
    assert cluster.get("/segments/gold") == [{"REALTIME": [name, following]}]
    assert cluster.get("/tables/gold/idealstate")["REALTIME"] == {name: {S1: "ONLINE"}, following: {S1: "CONSUMING"}}
    assert cluster.get("/tables/gold/externalview")["REALTIME"] == {name: {S1: "ONLINE"}, following: {S1: "CONSUMING"}}
    shown = cluster.get(f"/segments/gold/{name}/metadata")
    assert shown["segment.realtime.status"] == "DONE"
    assert (shown["segment.realtime.startOffset"], shown["segment.realtime.endOffset"]) == ("0", "7")
    assert (shown["segment.total.docs"], shown["segment.crc"]) == ("5", "255")
    assert cluster.get("/segments/gold/metadata")[name]["endOffset"] == "7"
    sizes = cluster.get("/tables/gold/size")["realtimeSegments"]
    assert (sizes["reportedSizeInBytes"], sizes["missingSegments"]) == (11, 1)


def test_a_missing_segment_is_not_found(cluster: Cluster) -> None:
    cluster.create()
    assert cluster.request("GET", "/segments/gold/nothing/metadata").status_code == 404


def test_segments_past_their_retention_go_with_their_bytes(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    (cluster.directory / "object").write_bytes(b"x")
    url = cluster.deep_store.put(f"gold/{made.record.incarnation}/one.parquet", cluster.directory / "object")
    now_ms = int(time.time() * 1000)
    old = _seal(cluster, made, 5, max_time_ms=now_ms - 2 * 86_400_000, store_url=url)
    young = _seal(cluster, made, 9, max_time_ms=now_ms)
    assert cluster.controller.janitor.expire_segments() == 0, "no retention, nothing goes"
    document = table()
    document["segmentsConfig"] |= {"retentionTimeUnit": "DAYS", "retentionTimeValue": "1"}
    cluster.post("/tables/gold", document, method="PUT")
    assert cluster.controller.janitor.expire_segments() == 1
    names = cluster.get("/segments/gold")[0]["REALTIME"]
    assert old not in names
    assert young in names
    assert cluster.deep_store.list("") == []


def test_only_sealed_segments_can_be_deleted(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    name = _seal(cluster, made, 7)
    assert cluster.request("DELETE", f"/segments/gold/{name}").json() == {"status": "Segment deleted"}
    following = cluster.controller.catalog.partitions["gold"][0].consuming
    assert cluster.request("DELETE", f"/segments/gold/{following}").status_code == 409
    assert cluster.request("DELETE", "/segments/gold/nothing").json() == {"status": "Segment deleted"}


def test_the_epoch_log_is_trimmed_behind_safe_segments_only(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    topic = epoch_topic("gold", made.record.incarnation)
    cluster.log.append(topic, 0, [Message(b"r")] * 100)
    for offset in (10, 20, 30):
        _seal(cluster, made, offset, store_url="file:///stored")
    cluster.controller.janitor.trim_epoch_logs()
    assert cluster.log.earliest(topic, 0) == 20
    _seal(cluster, made, 40)
    _seal(cluster, made, 50, store_url="file:///stored")
    _seal(cluster, made, 60, store_url="file:///stored")
    cluster.controller.janitor.trim_epoch_logs()
    assert cluster.log.earliest(topic, 0) == 30, "the segment from 30 on has one copy only"


def test_stored_objects_that_nobody_names_are_swept_once_they_are_old(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster.create(partitions=1)
    (cluster.directory / "object").write_bytes(b"x")
    incarnation = made.record.incarnation
    named = cluster.deep_store.put(f"gold/{incarnation}/named.parquet", cluster.directory / "object")
    cluster.deep_store.put(f"gold/{incarnation}/orphan.parquet", cluster.directory / "object")
    strangers = {f"gold/{incarnation}x/a.parquet", "silver/1/a.parquet", "gold/a.parquet"}
    for name in strangers:  # of another cluster's tables, or of ours in other metadata
        cluster.deep_store.put(name, cluster.directory / "object")
    _seal(cluster, made, 5, store_url=named)
    assert cluster.controller.objects.sweep() == 0, "too young"
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    assert cluster.controller.objects.sweep() == 0, "seen for the first time"
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_SEEN_MS", 0)
    assert cluster.controller.objects.sweep() == 1
    assert {found.name for found in cluster.deep_store.list("")} == {f"gold/{incarnation}/named.parquet", *strangers}


def test_an_object_that_is_recorded_while_others_are_swept_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_SEEN_MS", 0)
    made = cluster.create(partitions=1)
    (cluster.directory / "object").write_bytes(b"x")
    names = [f"gold/{made.record.incarnation}/{which}.parquet" for which in ("first", "second")]
    urls = [cluster.deep_store.put(name, cluster.directory / "object") for name in names]
    _seal(cluster, made, 5, store_url="s3://the-store-of-before/segment.parquet")
    delete = cluster.deep_store.delete

    def slow_delete(name: str) -> None:
        delete(name)
        _seal(cluster, made, 10, store_url=urls[1])

    monkeypatch.setattr(cluster.deep_store, "delete", slow_delete)
    assert cluster.controller.objects.sweep() == 1
    assert [found.name for found in cluster.deep_store.list("")] == names[1:]


# --- status, brokers, metrics -------------------------------------------------------------------------------------


def test_the_status_shows_lag_per_partition(cluster: Cluster) -> None:
    made = cluster.create(partitions=2)
    cluster.log.append("events", 0, [Message(b"{}")] * 10)
    cluster.beat(S1, report=InstanceReport(tails=(tail(made, 0, next_offset=7), tail(made, 1))))
    (shown,) = cluster.get("/status")["tables"]
    first = shown["partitions"][0]
    assert (first["streamEnd"], first["visibleOffset"], first["lagRows"]) == (10, 7, 3)
    assert (shown["lagRows"], shown["state"]) == (3, "waiting for a pipeline")
    assert first["replicas"][S1]["live"]


def test_a_tail_without_room_says_so_in_the_status_and_as_a_consumer(cluster: Cluster) -> None:
    made = cluster.create(partitions=2)
    full = msgspec.structs.replace(tail(made, 0), state=TAIL_QUOTA)
    cluster.beat(S1, report=InstanceReport(tails=(full, tail(made, 1))))
    (shown,) = cluster.get("/status")["tables"]
    assert [partition["replicas"][S1]["state"] for partition in shown["partitions"]] == [TAIL_QUOTA, "consuming"]
    consumers = cluster.get("/tables/gold/consumingSegmentsInfo")["_segmentToConsumingInfoMap"].values()
    states = [(said["consumerState"], said.get("tailState")) for (said,) in consumers]
    assert states == [("NOT_CONSUMING", TAIL_QUOTA), ("CONSUMING", None)]


def test_live_brokers_are_named_per_table(cluster: Cluster) -> None:
    cluster.create()
    cluster.beat("Broker_127.0.0.1_8099", Role.BROKER)
    broker = {"host": "127.0.0.1", "port": 8099, "instanceName": "Broker_127.0.0.1_8099", "grpcPort": -1}
    assert cluster.get("/tables/livebrokers") == {"gold_REALTIME": [broker]}
    assert cluster.get("/tables/livebrokers?tables=other") == {}
    assert cluster.get("/v2/brokers/tables?state=ONLINE") == {"gold": [broker]}
    assert cluster.get("/tables/gold/instances") == {
        "tableName": "gold",
        "brokers": [{"tableType": "realtime", "instances": ["Broker_127.0.0.1_8099"]}],
        "server": [{"tableType": "realtime", "instances": [S1]}],
    }


def test_a_dead_member_that_hosts_nothing_can_be_dropped(cluster: Cluster) -> None:
    cluster.create()
    cluster.beat("Broker_127.0.0.1_8099", Role.BROKER)
    assert cluster.request("DELETE", "/instances/Broker_127.0.0.1_8099").status_code == 409
    cluster.controller.instances._heard.clear()
    cluster.controller.instances.refresh_liveness()
    refused = cluster.request("DELETE", f"/instances/{S1}")
    assert refused.status_code == 409
    assert f"drop instance {S1} - tables have replicas on it: gold" in refused.json()["error"]
    assert "POST /tables/{table}/rebalance" in refused.json()["error"]
    answer = cluster.request("DELETE", "/instances/Broker_127.0.0.1_8099")
    assert answer.json() == {"status": "Successfully dropped instance"}
    assert cluster.request("GET", "/instances/Broker_127.0.0.1_8099").status_code == 404


def test_sql_without_a_broker_says_what_is_missing(cluster: Cluster) -> None:
    answer = cluster.request("POST", "/sql", content=b'{"sql": "select 1"}')
    assert answer.status_code == 503
    assert "no broker is alive" in answer.json()["error"]


def test_metrics_count_what_there_is(cluster: Cluster) -> None:
    made = cluster.create(partitions=2)
    _seal(cluster, made, 7)
    text = cluster.request("GET", "/metrics").text
    assert "cremant_tables 1.0" in text
    assert 'cremant_segments{status="DONE",table="gold"} 1.0' in text
    assert 'cremant_segments_unsafe{table="gold"} 1.0' in text
    assert 'cremant_instances{live="true",role="server"} 1.0' in text


@pytest.mark.parametrize("path", ["/pinot-controller/admin", "/health"])
def test_probes_answer_in_text(cluster: Cluster, path: str) -> None:
    cluster.beat(S1)
    cluster.settled_view()
    assert cluster.request("GET", path).text in ("GOOD", "OK")


def test_offline_tables_are_not_there(cluster: Cluster) -> None:
    cluster.create()
    assert cluster.request("GET", "/tables/gold_OFFLINE").status_code == 404
    document = table()
    document["tableType"] = "OFFLINE"
    cluster.post("/tables", document, status=400)


def test_what_is_wrong_with_a_table_is_told_in_one_place(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    segment = made.partitions[0].consuming.name
    broken = SegmentReport(table="gold", segment=segment, state=ReplicaState.ERROR, error="rows.parquet is damaged")
    report = InstanceReport(segments=(broken,), tails=(tail(made, 0, error="E-4: counts differ"),))
    cluster.beat("Server_127.0.0.1_8098", report=report)
    [found] = cluster.get("/debug/tables/gold?type=realtime")
    assert found["ingestionStatus"] == {"ingestionState": "UNHEALTHY", "errorMessage": "E-4: counts differ"}
    [info] = found["segmentDebugInfos"]
    assert info["segmentName"] == segment
    assert "rows.parquet is damaged" in str(info["serverState"])
    assert cluster.request("GET", "/debug/tables/nosuch").status_code == 404


def test_a_deep_store_that_does_not_work_is_told_at_creation_and_refuses_no_table(cluster: Cluster) -> None:
    cluster.create()
    assert cluster.deep_store.list("") == []  # the probe of it left nothing
    cluster.post("/tables/gold", method="DELETE")
    root = cluster.deep_store.root
    root.rename(root.with_name("elsewhere"))
    root.write_bytes(b"a file where the share should be")
    made = cluster.post("/tables", table())
    (warning,) = made["warnings"]
    assert str(root) in warning
    assert "gold" in cluster.controller.catalog.tables


def test_holders_are_asked_by_the_scheme_of_the_table(cluster: Cluster) -> None:
    """The server says 409 to whoever reaches it: that is passed on. Nobody listens for HTTP."""
    ours = Authority(cluster.directory, "ours")

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(409)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    context = listener_context(_settings(**dict(zip(("tls_cert", "tls_key"), ours.sign("server"), strict=True))))
    assert context is not None
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for name in (S1, S2):
            cluster.beat(name, tls_port=server.server_address[1])
        cluster.post("/topics", {"name": "events", "partitions": 2})
        cluster.post("/schemas", schema("gold"))
        document = table("gold", replication=2)
        document["segmentsConfig"]["peerSegmentDownloadScheme"] = "https"
        cluster.post("/tables", document)
        made = cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]
        name = _seal(cluster, made, 5)
        stranger = cluster.request("GET", f"/segments/gold/{name}")
        assert "certificate verify failed" in stranger.json()["error"]
        cluster.app = make_controller_app(cluster.controller, client_context(_settings(tls_ca=ours.certificate)))
        assert cluster.request("GET", f"/segments/gold/{name}").status_code == 409
    finally:
        server.shutdown()
        server.server_close()


def _settings(**values: object) -> Settings:
    return Settings(("test", {name: str(value) for name, value in values.items()}))


def test_a_segment_is_downloaded_from_the_store_when_no_holder_answers(cluster: Cluster) -> None:
    made = cluster.create()
    rows = cluster.directory / "object"
    rows.write_bytes(b"the rows of a segment")
    named = f"gold/{made.record.incarnation}/one.parquet"
    url = cluster.deep_store.put(named, rows)
    name = _seal(cluster, made, 5, store_url=url, file_checksum=checksum_of(rows))
    unstored = _seal(cluster, made, 9)
    answer = cluster.request("GET", f"/segments/gold_REALTIME/{name}")  # the holder is alive, and listens nowhere
    assert answer.status_code == 200
    assert answer.headers["X-Cremant-Content-Checksum"] == "sha256:00ff"
    (cluster.directory / "archive").write_bytes(answer.content)
    unpack(cluster.directory / "archive", name, cluster.directory / "back", bytes_max=100_000)
    assert (cluster.directory / "back").read_bytes() == b"the rows of a segment"
    cluster.deep_store.delete(named)
    for _ in range(5):  # places come back
        missing = cluster.request("GET", f"/segments/gold/{name}")
        assert missing.status_code == 503
        assert f"{S1}: ConnectError" in missing.json()["error"]
        assert f"no object {named}" in missing.json()["error"]
    assert "the deep store does not have it" in cluster.request("GET", f"/segments/gold/{unstored}").json()["error"]
    opened = cluster.controller.catalog.partitions["gold"][0].consuming
    for path in (f"gold/{opened}", "gold/other", f"gold_OFFLINE/{name}", f"other/{name}"):
        assert cluster.request("GET", f"/segments/{path}").status_code == 404
