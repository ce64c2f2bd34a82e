# SPDX-License-Identifier: Apache-2.0
"""Life of a table: created, changed, paused, grown, dropped; and what a controller that died in between leaves."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from control import Cluster, heartbeat_of, schema, table, tail

from cremant.controller.tables import is_internal_topic
from cremant.log.api import Message
from cremant.model.cluster import InstanceReport, Role
from cremant.model.errors import InvalidConfig
from cremant.model.names import dead_letter_topic, epoch_topic
from cremant.model.segments import SegmentStatus
from cremant.store.metadata import StoreConflict


def _topics(cluster: Cluster) -> set[str]:
    return {info.name for info in cluster.log.topics()}


def test_a_created_table_has_its_records_and_its_topics(cluster: Cluster) -> None:
    made = cluster.create(partitions=3, replication=2)
    assert [p.record.partition for p in made.partitions] == [0, 1, 2]
    assert all(len(set(p.record.replicas)) == 2 for p in made.partitions)
    assert all(p.consuming.status is SegmentStatus.IN_PROGRESS for p in made.partitions)
    assert made.record.config_version == 1
    internal = {epoch_topic("gold", made.record.incarnation), dead_letter_topic("gold", made.record.incarnation)}
    assert _topics(cluster) == {"events", *internal}
    assert all(is_internal_topic(topic) for topic in internal)
    assert all(cluster.log.topic(topic).partitions == 3 for topic in internal)


def test_smallest_starts_at_the_first_message_and_largest_after_the_last(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.log.append("events", 0, [Message(b"{}")] * 5)
    for name, start, expected in (("first", "smallest", 0), ("last", "largest", 5)):
        cluster.post("/schemas", schema(name))
        cluster.post("/tables", table(name, start=start))
        view = cluster.view_where(lambda view, name=name: name in view.tables)  # type: ignore[misc]
        assert view.tables[name].partitions[0].consuming.start.next_offset == expected


def test_a_missing_topic_is_named_with_the_command_that_creates_it(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/schemas", schema())
    answer = cluster.post("/tables", table(topic="nowhere"), status=400)
    assert "'nowhere' does not exist" in answer["error"]
    assert "cremant topic create nowhere" in answer["error"]


def test_a_missing_schema_is_named(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    answer = cluster.post("/tables", table(), status=400)
    assert answer["error"].startswith("Failed to find schema for table: gold_REALTIME")


def test_more_replicas_than_live_servers_are_refused_and_leave_nothing(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())
    answer = cluster.post("/tables", table(replication=2), status=400)
    assert "needs 2 live servers, found 1" in answer["error"]
    assert _topics(cluster) == {"events"}


def test_a_creation_waits_a_little_for_servers_that_are_just_starting(cluster: Cluster) -> None:
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())
    cluster.controller.tables._servers_grace_ms = 10_000
    beat = threading.Timer(0.2, lambda: cluster.controller.heartbeat(heartbeat_of("Server_a_1")))
    beat.start()
    cluster.post("/tables", table())
    beat.join()


def test_an_unknown_transform_is_refused_at_creation(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())
    document = table()
    document["ingestionConfig"]["transformConfigs"] = [
        {"columnName": "country", "transformFunction": "noSuchFunction(user_id)"}
    ]
    assert "noSuchFunction" in cluster.post("/tables", document, status=400)["error"]


def test_a_change_of_config_raises_its_version_and_keeps_the_incarnation(cluster: Cluster) -> None:
    before = cluster.create()
    document = table()
    document["segmentsConfig"]["retentionTimeUnit"] = "DAYS"
    document["segmentsConfig"]["retentionTimeValue"] = "5"
    cluster.post("/tables/gold", document, method="PUT")
    after = cluster.view_where(lambda view: view.tables["gold"].record.config_version == 2).tables["gold"]
    assert after.record.incarnation == before.record.incarnation
    assert after.record.config.retention_ms == 5 * 86_400_000


def test_another_stream_topic_is_refused_on_a_live_table(cluster: Cluster) -> None:
    cluster.create()
    cluster.post("/topics", {"name": "other", "partitions": 1})
    cluster.post("/tables/gold", table(topic="other"), method="PUT", status=409)


def test_https_between_servers_is_refused_while_a_live_server_offers_none(cluster: Cluster) -> None:
    def with_scheme(scheme: str) -> dict[str, Any]:
        document = table(replication=2)
        document["segmentsConfig"]["peerSegmentDownloadScheme"] = scheme
        return document

    cluster.beat("Server_a_1", tls_port=9443)
    cluster.beat("Server_b_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())
    answer = cluster.post("/tables", with_scheme("https"), status=400)
    assert "peerSegmentDownloadScheme: https, but Server_b_1 offer no HTTPS" in answer["error"]
    cluster.post("/tables", with_scheme("http"))
    cluster.post("/tables/gold", with_scheme("https"), method="PUT", status=400)
    cluster.beat("Server_b_1", tls_port=9444)
    cluster.post("/tables/gold", with_scheme("https"), method="PUT")
    made = cluster.view_where(lambda view: view.tables["gold"].record.config.completion.peer_scheme == "https")
    assert [server.tls_url for server in made.instances if server.role is Role.SERVER] == [
        "https://127.0.0.1:9443", "https://127.0.0.1:9444",
    ]  # fmt: skip
    cluster.beat("Server_c_1")  # the table stays what it is, and can be changed
    cluster.post("/tables/gold", with_scheme("https"), method="PUT")


def test_a_new_column_reaches_the_table_with_a_new_config_version(cluster: Cluster) -> None:
    cluster.create()
    wider = schema()
    wider["dimensionFieldSpecs"] = [*wider["dimensionFieldSpecs"], {"name": "city", "dataType": "STRING"}]
    cluster.post("/schemas/gold", wider, method="PUT")
    record = cluster.view_where(lambda view: view.tables["gold"].record.config_version == 2).tables["gold"].record
    assert record.table_schema.field("city") is not None


def test_a_column_cannot_be_taken_away(cluster: Cluster) -> None:
    cluster.create()
    narrower = schema()
    narrower["dimensionFieldSpecs"] = narrower["dimensionFieldSpecs"][:1]
    cluster.post("/schemas/gold", narrower, method="PUT", status=400)


def test_a_schema_in_use_cannot_be_deleted(cluster: Cluster) -> None:
    cluster.create()
    answer = cluster.request("DELETE", "/schemas/gold")
    assert answer.status_code == 409
    assert "associated with table gold_REALTIME" in answer.json()["error"]


def test_pausing_shows_in_the_view_and_in_the_status(cluster: Cluster) -> None:
    cluster.create()
    cluster.post("/tables/gold/pauseConsumption?comment=maintenance")
    cluster.view_where(lambda view: view.tables["gold"].record.paused)
    assert cluster.get("/tables/gold/pauseStatus")["comment"] == "maintenance"
    cluster.post("/tables/gold/resumeConsumption")
    cluster.view_where(lambda view: not view.tables["gold"].record.paused)


def test_a_dropped_name_is_free_at_once_and_comes_back_as_another_incarnation(cluster: Cluster) -> None:
    before = cluster.create()
    assert cluster.request("DELETE", "/tables/gold").status_code == 200
    cluster.post("/tables", table())
    after = cluster.view_where(lambda view: view.tables["gold"].record.incarnation != before.record.incarnation).tables[
        "gold"
    ]
    assert all(p.consuming.sequence == 0 for p in after.partitions)


def test_a_dropped_tables_bytes_go_once_nobody_works_on_it(cluster: Cluster) -> None:
    made = cluster.create()
    (cluster.directory / "object").write_bytes(b"x")
    cluster.deep_store.put(f"gold/{made.record.incarnation}/s.1.parquet", cluster.directory / "object")
    server = "Server_127.0.0.1_8098"
    cluster.beat(server, report=InstanceReport(tails=(tail(made, 0),)))
    cluster.request("DELETE", "/tables/gold")
    assert cluster.controller.tables.finish_drops() == 0
    assert epoch_topic("gold", made.record.incarnation) in _topics(cluster)
    cluster.beat(server, report=InstanceReport())
    _until(lambda: not cluster.controller.catalog.being_removed())
    assert _topics(cluster) == {"events"}
    assert cluster.deep_store.list("") == []
    left = [entry.key for entry in cluster.store.list("/") if "gold" in entry.key]
    assert left == [f"/drops/gold/{made.record.incarnation}", "/schemas/gold"]


def test_a_drop_is_finished_by_the_next_controller(cluster: Cluster) -> None:
    made = cluster.create()
    cluster.controller.stop()
    cluster.controller.tables.drop("gold")
    cluster.restart()
    _until(lambda: epoch_topic("gold", made.record.incarnation) not in _topics(cluster))


def test_topics_of_a_creation_that_died_are_removed_by_the_next_controller(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its topics exist, its records do not; topics that only look like a table's are nobody's to delete."""
    made = cluster.create()
    stranger = epoch_topic("of_another_cluster", "0" * 16)
    cluster.log.create_topic(stranger, 2)
    cluster.post("/schemas", schema("dead"))

    def die(*_: object, **__: object) -> None:
        raise SystemExit

    monkeypatch.setattr(cluster.controller.tables, "_write_new", die)
    monkeypatch.setattr(cluster.controller.tables, "_finish_drop", die)
    with pytest.raises(SystemExit):
        cluster.controller.tables.create(table("dead"))
    known = {epoch_topic("gold", made.record.incarnation), dead_letter_topic("gold", made.record.incarnation)}
    assert len(_topics(cluster) - known - {"events", stranger}) == 2
    cluster.restart()
    _until(lambda: _topics(cluster) == known | {"events", stranger})


def test_a_creation_that_fails_to_commit_takes_its_topics_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())

    def refuse(*_: object, **__: object) -> None:
        raise StoreConflict("/terms/controller", 1, 2)

    monkeypatch.setattr(cluster.controller.tables, "_write_new", refuse)
    cluster.post("/tables", table(), status=409)
    assert _topics(cluster) == {"events"}


def test_a_grown_stream_gives_the_table_new_partitions_from_their_beginning(cluster: Cluster) -> None:
    made = cluster.create(partitions=2)
    cluster.log.grow_topic("events", 4)
    cluster.log.append("events", 3, [Message(b"{}")] * 3)
    assert cluster.controller.tables.grow("gold") == 2
    view = cluster.view_where(lambda view: len(view.tables["gold"].partitions) == 4)
    assert [p.consuming.start_offset for p in view.tables["gold"].partitions] == [0, 0, 0, 0]
    assert cluster.log.topic(epoch_topic("gold", made.record.incarnation)).partitions == 4
    assert cluster.controller.tables.grow("gold") == 0


def test_a_stream_beyond_the_limit_of_partitions_is_taken_in_up_to_it_and_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.controller.tables.PARTITIONS_MAX", 3)
    made = cluster.create(partitions=2)
    cluster.log.grow_topic("events", 5)
    tables = cluster.controller.tables
    assert tables.grow("gold") == 1
    with pytest.raises(InvalidConfig, match="topic events has 5 partitions, at most 3 are read: rows of partition 3"):
        tables.grow("gold")
    assert cluster.log.topic(epoch_topic("gold", made.record.incarnation)).partitions == 3
    assert len(cluster.view_where(lambda view: len(view.tables["gold"].partitions) > 2).tables["gold"].partitions) == 3


def test_a_table_that_cannot_grow_or_be_trimmed_keeps_no_other_from_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create(partitions=2, replication=2)
    cluster.post("/topics", {"name": "others", "partitions": 1})
    cluster.post("/schemas", schema("others"))
    cluster.post("/tables", table("others", topic="others"))
    monkeypatch.setattr(cluster.controller.instances, "live", lambda role: ["Server_127.0.0.1_8098"])
    cluster.log.grow_topic("events", 3)
    cluster.log.grow_topic("others", 2)
    janitor = cluster.controller.janitor
    janitor.grow_tables()
    view = cluster.view_where(lambda view: len(view.tables["others"].partitions) == 2)
    assert len(view.tables["gold"].partitions) == 2, "two replicas need two servers"
    trimmed: list[str] = []
    cluster.log.delete_topic(epoch_topic("gold", view.tables["gold"].record.incarnation))
    monkeypatch.setattr("cremant.controller.housekeeping.trim_floor", lambda segments, visible, *, snapshots: 1)
    monkeypatch.setattr(
        cluster.log, "trim", lambda topic, partition, floor: trimmed.append(cluster.log.topic(topic).name)
    )
    janitor.trim_epoch_logs()
    assert trimmed == [epoch_topic("others", view.tables["others"].record.incarnation)] * 2


def test_a_stream_topic_that_was_made_anew_does_not_grow_the_table(cluster: Cluster) -> None:
    cluster.create(partitions=2)
    cluster.log.delete_topic("events")
    cluster.log.create_topic("events", 4)
    assert cluster.controller.tables.grow("gold") == 0


def test_everything_is_there_again_after_a_restart(cluster: Cluster) -> None:
    before = cluster.create(replication=2)
    cluster.restart()
    after = cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]
    assert (after.record, after.partitions) == (before.record, before.partitions)


def test_a_deposed_controller_changes_nothing_any_more_and_says_so(cluster: Cluster) -> None:
    old = cluster.controller
    cluster.create()
    deposed = threading.Event()
    old.on_deposed = deposed.set
    cluster.start()
    try:
        with pytest.raises(StoreConflict):
            old.tables.set_enabled("gold", enabled=False)
        assert cluster.controller.catalog.tables["gold"].enabled
        assert deposed.wait(20)
    finally:
        old.stop()


def test_a_disabled_table_says_so(cluster: Cluster) -> None:
    cluster.create()
    cluster.request("PUT", "/tables/gold/state?state=disable")
    assert cluster.get("/tables/gold/state") == {"state": "disabled"}
    assert not cluster.view_where(lambda view: not view.tables["gold"].record.enabled).tables["gold"].record.enabled


def test_table_configs_create_schema_and_table_together(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    document = {"tableName": "gold", "schema": schema(), "realtime": table()}
    assert cluster.post("/tableConfigs", document)["status"] == "TableConfigs gold successfully added"
    assert set(cluster.get("/tableConfigs/gold")) == {"tableName", "schema", "realtime"}
    assert cluster.request("DELETE", "/tableConfigs/gold").status_code == 200
    assert cluster.get("/schemas") == []


def test_table_configs_that_fail_leave_no_schema(cluster: Cluster) -> None:
    cluster.beat("Server_a_1")
    document = {"tableName": "gold", "schema": schema(), "realtime": table(topic="nowhere")}
    cluster.post("/tableConfigs", document, status=400)
    assert cluster.get("/schemas") == []


def test_table_configs_change_schema_and_table_both_or_none(cluster: Cluster) -> None:
    made = cluster.create()
    cluster.post("/topics", {"name": "other", "partitions": 1})
    wider = schema() | {"metricFieldSpecs": [*schema()["metricFieldSpecs"], {"name": "tax", "dataType": "DOUBLE"}]}
    elsewhere = {"tableName": "gold", "schema": wider, "realtime": table(topic="other")}
    refused = cluster.post("/tableConfigs/gold", elsewhere, method="PUT", status=409)
    assert "stream topic cannot change" in refused["error"]
    assert "already exists" in cluster.post("/tableConfigs", elsewhere, status=409)["error"]
    unknown = {"tableName": "iron", "schema": wider | {"schemaName": "iron"}, "realtime": table("iron")}
    cluster.post("/tableConfigs/iron", unknown, method="PUT", status=404)
    assert cluster.get("/schemas") == ["gold"]
    assert "tax" not in str(cluster.get("/schemas/gold"))
    narrower = schema() | {"metricFieldSpecs": []}
    refused = cluster.post(
        "/tableConfigs/gold", elsewhere | {"schema": narrower, "realtime": table()}, method="PUT", status=400
    )
    assert "column amount is missing" in refused["error"]
    assert cluster.controller.catalog.tables["gold"] == made.record
    cluster.post("/tableConfigs/gold", elsewhere | {"realtime": table()}, method="PUT")
    record = cluster.controller.catalog.tables["gold"]
    assert record.config_version == made.record.config_version + 1
    assert record.table_schema == cluster.controller.catalog.schemas["gold"]
    assert record.table_schema.field("tax") is not None


def test_a_schema_may_come_as_a_multipart_file(cluster: Cluster) -> None:
    import json

    files = {"schemaFile": ("schema.json", json.dumps(schema()), "application/json")}
    answer = cluster.request("POST", "/schemas", files=files)
    assert answer.json()["status"] == "gold successfully added"


def test_a_new_table_spreads_over_all_servers_and_odd_partitions_go_to_those_with_less(cluster: Cluster) -> None:
    """A server that started late is used by new tables."""
    cluster.create(partitions=2)
    cluster.beat("Server_127.0.0.1_7000", Role.SERVER)
    cluster.post("/topics", {"name": "one", "partitions": 1})
    for name, topic in (("second", "events"), ("third", "one")):
        cluster.post("/schemas", schema(name))
        cluster.post("/tables", table(name, topic=topic))
    view = cluster.view_where(lambda view: "third" in view.tables)
    assert {p.record.replicas for p in view.tables["second"].partitions} == {
        ("Server_127.0.0.1_7000",), ("Server_127.0.0.1_8098",),
    }  # fmt: skip
    assert [p.record.replicas for p in view.tables["third"].partitions] == [("Server_127.0.0.1_7000",)]


def _until(condition: object, timeout_s: float = 10) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
