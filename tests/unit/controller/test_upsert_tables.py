# SPDX-License-Identifier: Apache-2.0
"""Upsert tables at the controller: created and changed over REST, and what their reports add up to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from control import Cluster, schema, table, tail

from cremant.ingest.plan import compile_ingest
from cremant.model.cluster import InstanceReport, PipelineReport, TableView, VersionsReport

S1, S2 = "Server_127.0.0.1_8098", "Server_127.0.0.1_8097"
KEYED = {**schema(), "primaryKeyColumns": ["user_id"]}
FULL = {"mode": "FULL"}


def create(cluster: Cluster, *, partitions: int = 2, replication: int = 2, **more: Any) -> TableView:
    for server in (S1, S2):
        cluster.beat(server)
    cluster.post("/topics", {"name": "events", "partitions": partitions})
    cluster.post("/schemas", KEYED)
    cluster.post("/tables", table(replication=replication) | {"upsertConfig": FULL} | more)
    return cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]


def report(closed: int, *, rows: int, in_force: int, tombstones: int = 0, horizon: int = 0) -> VersionsReport:
    return VersionsReport(
        closed=closed, horizon=horizon, rows=rows, in_force=in_force, tombstones=tombstones, size_bytes=8 * rows
    )


def say(cluster: Cluster, server: str, made: TableView, versions: dict[int, VersionsReport | None]) -> None:
    tails = tuple(msgspec.structs.replace(tail(made, partition), versions=said) for partition, said in versions.items())
    cluster.beat(server, report=InstanceReport(tails=tails))


# --- configuration over REST ---


def test_a_table_with_keys_is_created_and_echoed(cluster: Cluster) -> None:
    made = create(cluster, cremant={"upsert": {"historyMs": 5000}})
    assert made.record.config.upsert is not None
    assert made.record.config.upsert.comparison_columns == ("ts",)
    shown = cluster.get("/tables/gold")["REALTIME"]
    assert (shown["upsertConfig"], shown["cremant"]) == (FULL, {"upsert": {"historyMs": 5000}})
    cluster.post("/tables/gold", shown, method="PUT")


def test_a_table_without_a_primary_key_is_refused_with_what_it_lacks(cluster: Cluster) -> None:
    cluster.beat(S1)
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema())
    upsert = FULL | {"deleteRecordColumn": "gone"}
    said = cluster.post("/tables", table() | {"upsertConfig": upsert}, status=400)["error"]
    assert "names no primary key (primaryKeyColumns); deleteRecordColumn gone is not in the schema" in said


def test_the_schema_alone_makes_an_upsert_table_and_its_offset_column_is_filled(cluster: Cluster) -> None:
    """As the key-coordinator design declares one: updateSemantic, primaryKey, $ValidFrom, $ValidUntil, KafkaOffset."""
    virtual = [{"name": name, "dataType": "LONG"} for name in ("$ValidFrom", "$ValidUntil", "KafkaOffset")]
    declared = {**schema(), "updateSemantic": "upsert", "primaryKey": "user_id"}
    declared["dimensionFieldSpecs"] = [*declared["dimensionFieldSpecs"], *virtual]
    cluster.beat(S1)
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", declared)
    cluster.post("/tables", table() | {"updateSemantic": "upsert"})
    made = cluster.view_where(lambda view: "gold" in view.tables).tables["gold"].record
    assert made.config.upsert is not None
    assert made.table_schema.primary_key_columns == ("user_id",)
    assert "$ValidFrom" not in made.table_schema.column_names
    assert [transform.column for transform in made.config.transforms] == ["KafkaOffset"]
    cluster.post("/schemas/gold", cluster.get("/schemas/gold"), method="PUT")


def test_an_offset_column_that_a_schema_gains_later_is_filled(cluster: Cluster) -> None:
    create(cluster)
    grown = {
        **KEYED,
        "dimensionFieldSpecs": [*KEYED["dimensionFieldSpecs"], {"name": "KafkaOffset", "dataType": "LONG"}],
    }
    cluster.post("/schemas/gold", grown, method="PUT")
    view = cluster.view_where(lambda view: view.tables["gold"].record.config_version == 2)
    config = view.tables["gold"].record.config
    assert [transform.column for transform in config.transforms] == ["KafkaOffset"]
    assert compile_ingest(view.tables["gold"].record.table_schema, config) is not None
    assert "ingestionConfig" not in cluster.get("/tables/gold")["REALTIME"] or "KafkaOffset" not in str(
        cluster.get("/tables/gold")["REALTIME"]["ingestionConfig"]
    ), "what is shown is what was written"


@pytest.mark.parametrize(
    ("path", "document", "words"),
    [
        ("/tables/gold", table(replication=2), "upsert cannot change to append"),
        (
            "/tables/gold",
            table(replication=2) | {"upsertConfig": FULL | {"comparisonColumns": ["amount"]}},
            "comparison columns cannot change from ts to amount",
        ),
        ("/schemas/gold", {**KEYED, "primaryKeyColumns": ["country"]}, "primary key cannot change from user_id to cou"),
        ("/schemas/gold", schema(), "primary key cannot change from user_id to none"),
    ],
)
def test_what_its_rows_are_in_force_by_stays(cluster: Cluster, path: str, document: Any, words: str) -> None:
    create(cluster)
    assert words in cluster.post(path, document, method="PUT", status=409)["error"]


def test_what_may_change_changes(cluster: Cluster) -> None:
    create(cluster)
    changed = table(replication=2) | {"upsertConfig": FULL | {"metadataTTL": 60}}
    cluster.post("/tables/gold", changed | {"cremant": {"upsert": {"historyMs": 5000}}}, method="PUT")
    view = cluster.view_where(lambda view: view.tables["gold"].record.config_version == 2)
    upsert = view.tables["gold"].record.config.upsert
    assert upsert is not None
    assert (upsert.ttl, upsert.history_ms) == (60.0, 5000)


def test_an_append_table_may_get_keys_once_its_schema_names_them(cluster: Cluster) -> None:
    cluster.create()
    said = cluster.post("/tables/gold", table() | {"upsertConfig": FULL}, method="PUT", status=400)["error"]
    assert "names no primary key" in said
    cluster.post("/schemas/gold", KEYED, method="PUT")
    cluster.post("/tables/gold", table() | {"upsertConfig": FULL}, method="PUT")
    view = cluster.view_where(lambda view: view.tables["gold"].record.config.upsert is not None)
    assert view.tables["gold"].record.table_schema.primary_key_columns == ("user_id",)


# --- state ---


def test_an_append_table_has_no_such_state(cluster: Cluster) -> None:
    cluster.create()
    assert "append table" in cluster.post("/tables/gold/upsert", method="GET", status=400)["error"]
    assert cluster.get("/status")["tables"][0]["upsert"] is None
    assert "cremant_upsert_keys{" not in cluster.request("GET", "/metrics").text


def test_low_water_marks_are_the_least_of_partitions_and_servers(cluster: Cluster) -> None:
    """LWM(t, i) = min over j of LWM(t, i, j); LWM(t) = min over i."""
    made = create(cluster)
    say(cluster, S1, made, {0: report(1200, rows=10, in_force=6, tombstones=1), 1: report(1100, rows=5, in_force=5)})
    say(cluster, S2, made, {0: report(900, rows=9, in_force=6, horizon=700), 1: report(1300, rows=5, in_force=5)})
    state = cluster.get("/tables/gold/upsert")
    assert {server: said["lowWaterMark"] for server, said in state["servers"].items()} == {S1: 1100, S2: 900}
    assert state["servers"][S2]["partitions"]["0"] == {
        "lowWaterMark": 900, "horizon": 700, "rows": 9, "inForce": 6, "tombstones": 0, "sizeBytes": 72,
        "snapshotEpoch": None, "keys": 6, "superseded": 3,
    }  # fmt: skip
    assert (state["epoch"], state["lowWaterMark"], state["horizon"]) == (1300, 900, 700)
    # Of each partition the copy that has most.
    assert [state[key] for key in ("rows", "keys", "superseded", "tombstones", "sizeBytes")] == [15, 10, 4, 1, 120]
    assert cluster.get("/status")["tables"][0]["upsert"] == {
        "epoch": 1300, "lowWaterMark": 900, "horizon": 700, "rows": 15, "keys": 10, "superseded": 4, "tombstones": 1,
        "sizeBytes": 120, "rebuilding": False,
    }  # fmt: skip
    metrics = cluster.request("GET", "/metrics").text
    assert 'cremant_upsert_low_water_mark{table="gold"} 900.0' in metrics
    assert 'cremant_upsert_keys{table="gold"} 10.0' in metrics
    assert "cremant_coordinator_keys{" not in metrics


def test_a_low_water_mark_that_leaves_somebody_out_is_none(cluster: Cluster) -> None:
    made = create(cluster)
    say(cluster, S1, made, {0: report(7, rows=1, in_force=1), 1: report(7, rows=1, in_force=1)})
    say(cluster, S2, made, {0: report(7, rows=1, in_force=1)})
    state = cluster.get("/tables/gold/upsert")
    assert (state["epoch"], state["lowWaterMark"]) == (7, None)
    assert (state["servers"][S1]["lowWaterMark"], state["servers"][S2]["lowWaterMark"]) == (7, None)
    assert state["servers"][S2]["partitions"] == {"0": state["servers"][S1]["partitions"]["0"], "1": None}


def test_before_anything_is_known_nothing_is_claimed(cluster: Cluster) -> None:
    create(cluster)
    state = cluster.get("/tables/gold/upsert")
    assert [state[key] for key in ("epoch", "lowWaterMark", "horizon", "keys", "superseded")] == [None] * 5
    assert state["config"] == {
        "primaryKeyColumns": ["user_id"], "comparisonColumns": ["ts"], "deleteRecordColumn": None, "nullKey": "reject",
        "metadataTTL": None, "deletedKeysTTL": None, "retentionMs": None, "historyMs": 60_000,
    }  # fmt: skip
    assert state["coordinator"]["rebuilding"] is False


def test_the_coordinator_says_what_its_state_costs(cluster: Cluster) -> None:
    made = create(cluster)
    said = PipelineReport(
        table="gold", incarnation=made.record.incarnation, state="running", generation=3, epoch=41, keys=1000,
        state_bytes=64_500, rebuilding=True,
    )  # fmt: skip
    cluster.beat("Pipeline_127.0.0.1_1", report=InstanceReport(pipelines=(said,)))
    found = cluster.get("/tables/gold/upsert")["coordinator"]
    assert (found["state"], found["epoch"], found["keys"], found["stateBytesPerKey"]) == ("running", 41, 1000, 64.5)
    assert found["rebuilding"] is True
    assert 'cremant_coordinator_state_bytes{table="gold"} 64500.0' in cluster.request("GET", "/metrics").text
