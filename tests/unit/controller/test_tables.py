# SPDX-License-Identifier: Apache-2.0
"""Life of a table: created, changed, paused, grown, dropped; and what a controller that died in between leaves."""

from __future__ import annotations

import threading
import time

import pytest
from control import Cluster, heartbeat_of, schema, table, tail

from cremant.controller.tables import is_internal_topic
from cremant.log.api import Message
from cremant.model.cluster import InstanceReport, Role
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
    _until(lambda: cluster.store.list("/drops/") == [])
    assert _topics(cluster) == {"events"}
    assert cluster.deep_store.list("") == []
    assert [e.key for e in cluster.store.list("/") if "gold" in e.key] == ["/schemas/gold"]


def test_a_drop_is_finished_by_the_next_controller(cluster: Cluster) -> None:
    made = cluster.create()
    cluster.controller.stop()
    cluster.controller.tables.drop("gold")
    cluster.restart()
    _until(lambda: epoch_topic("gold", made.record.incarnation) not in _topics(cluster))


def test_topics_of_a_creation_that_died_are_swept(cluster: Cluster) -> None:
    made = cluster.create()
    orphans = {epoch_topic("dead", "0" * 16), dead_letter_topic("dead", "0" * 16)}
    for topic in orphans:
        cluster.log.create_topic(topic, 2)
    assert cluster.controller.tables.sweep_topics() == 2
    assert epoch_topic("gold", made.record.incarnation) in _topics(cluster)
    assert not orphans & _topics(cluster)


def test_a_creation_that_fails_to_commit_takes_its_topics_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.beat("Server_a_1")
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())

    def refuse(*_: object, **__: object) -> None:
        raise StoreConflict("/terms/controller", 1, 2)

    monkeypatch.setattr(cluster.controller.catalog, "commit", refuse)
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


def test_a_schema_may_come_as_a_multipart_file(cluster: Cluster) -> None:
    import json

    files = {"schemaFile": ("schema.json", json.dumps(schema()), "application/json")}
    answer = cluster.request("POST", "/schemas", files=files)
    assert answer.json()["status"] == "gold successfully added"


def test_new_tables_go_to_the_servers_with_less(cluster: Cluster) -> None:
    cluster.create(partitions=2)
    cluster.beat("Server_127.0.0.1_7000", Role.SERVER)
    cluster.post("/schemas", schema("second"))
    cluster.post("/tables", table("second"))
    view = cluster.view_where(lambda view: "second" in view.tables)
    assert {p.record.replicas for p in view.tables["second"].partitions} == {("Server_127.0.0.1_7000",)}


def _until(condition: object, timeout_s: float = 10) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
