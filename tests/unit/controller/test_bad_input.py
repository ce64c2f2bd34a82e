# SPDX-License-Identifier: Apache-2.0
"""What people get wrong: each is refused with a message that says what, where, and what to do; nothing changes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from control import Cluster, schema, table

SECRET_KEY = "stream.embedded.consumer.prop.sasl.password"


@pytest.fixture
def cluster(still_cluster: Cluster) -> Cluster:
    """With a server, a stream and the schema `gold`."""
    still_cluster.beat("Server_a_1")
    still_cluster.post("/topics", {"name": "events", "partitions": 2})
    still_cluster.post("/schemas", schema())
    return still_cluster


def _schema(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(schema("other")), **changes}


def _column(name: str, data_type: str = "LONG", **more: Any) -> dict[str, Any]:
    return {"name": name, "dataType": data_type, **more}


def _table(text: tuple[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """`text`: what to replace anywhere in the document."""
    document = {**copy.deepcopy(table()), **changes}
    found: dict[str, Any] = json.loads(json.dumps(document).replace(*text)) if text else document
    return found


def _ingesting(**config: Any) -> dict[str, Any]:
    document = _table()
    document["ingestionConfig"].update(config)
    return document


def _transforms(*pairs: tuple[str, str]) -> dict[str, Any]:
    return _ingesting(
        transformConfigs=[{"columnName": column, "transformFunction": function} for column, function in pairs]
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the request body is empty"),
        (b'{\n "schemaName": "x",\n "tags": [1,,2]\n}', "Expecting value at line 3, column 13: '\"tags\": [1,,2]'"),
        (b'{\n "schemaName": "x"', "at line 2, column 19"),
        (b'{"schemaName": "\xff"}', "byte 16 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "not valid JSON"),
        (
            b'{"ok": "\\ud83d\\ude00",\n "schemaName": "\\ud800"}',
            "half of a surrogate pair, \\ud800, at line 2, column 17",
        ),
        (b'{"tableName": "x\\udc00y"}', "half of a surrogate pair, \\udc00, at line 1, column 17"),
        (b"[1]", "Cannot deserialize value of type Object from Array [1] (at /)"),
        (b"null", "Cannot deserialize value of type Object from null"),
    ],
    ids=["empty", "place", "truncated", "utf8", "deep", "nan", "half first", "half last", "array", "null"],
)
@pytest.mark.parametrize("path", ["/schemas", "/tables", "/tableConfigs", "/schemas/validate", "/tables/validate"])
def test_a_body_that_is_no_document_is_refused_with_its_place(
    cluster: Cluster, path: str, body: bytes, words: str
) -> None:
    answer = cluster.request("POST", path, content=body)
    assert answer.status_code == 400
    if "Cannot deserialize" not in words or path.startswith("/schemas"):
        assert words in answer.json()["error"]


def test_a_body_that_is_too_large_is_refused_by_its_bound(cluster: Cluster) -> None:
    answer = cluster.request("POST", "/schemas", content=b" " * (5 * 1024 * 1024))
    assert answer.status_code == 413
    assert "larger than 4194304 bytes" in answer.text


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (_schema(metricFieldSpecs=[_column("user_id")]), "column 'user_id' is declared twice"),
        (_schema(schemaName="../x"), "'../x' is not allowed"),
        (_schema(schemaName="a/b"), "'a/b' is not allowed"),
        (_schema(schemaName="a" * 300), "at most 128"),
        (_schema(schemaName=""), "is not allowed"),
        (_schema(dimensionFieldSpecs=[_column("$offset")]), "virtual columns"),
        (_schema(dimensionFieldSpecs=[_column("a", defaultNullValue="x")]), "'x' is not a value of type LONG"),
        (_schema(dimensionFieldSpecs=[_column("a", "NUMBER")]), "not one of the values accepted"),
        (_schema(metricFieldSpecs=[_column("a", "STRING")]), "metric column a cannot be of type STRING"),
        (_schema(dimensionFieldSpecs={}), "Cannot deserialize value of type Array from Object"),
    ],
)
def test_schemas_that_cannot_be(cluster: Cluster, document: Any, words: str) -> None:
    assert words in cluster.post("/schemas", document, status=400)["error"]
    assert cluster.get("/schemas") == ["gold"]


SEGMENTS = {"timeColumnName": "ts", "replication": "1"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (_table(tableName="silver"), "Failed to find schema for table: silver_REALTIME (POST /schemas named silver"),
        (_table(tableName="../x"), "table name '../x' is not allowed"),
        (_table(tableName="a" * 200), "at most 128"),
        (_table(tableName="gold_OFFLINE"), "contradicts tableType REALTIME"),
        (_table(tableType="SIDEWAYS"), "unknown tableType 'SIDEWAYS'"),
        (_table(segmentsConfig={"replication": "1"}), "'timeColumnName' cannot be null"),
        (
            _table(segmentsConfig=SEGMENTS | {"timeColumnName": "nope"}),
            "Cannot find valid fieldSpec for timeColumn: nope",
        ),
        (_table(segmentsConfig=SEGMENTS | {"timeColumnName": "amount"}), "timeColumn: amount"),
        (_table(segmentsConfig=SEGMENTS | {"replication": "0"}), "replication: expected a number of 1 or more"),
        (
            _table(segmentsConfig=SEGMENTS | {"replication": "3"}),
            "replication 3 needs 3 live servers, found 1: Server_a_1",
        ),
        (_table(segmentsConfig=[]), "/segmentsConfig must be an object"),
        (_table(("1000", "lots")), "flush.threshold.rows: expected a number of rows, found 'lots'"),
        (_table(("embedded", "carrier-pigeon")), "streamType 'carrier-pigeon' is not supported"),
        (_table(('"events"', '"event"')), "stream topic 'event' does not exist (did you mean 'events'?"),
        (_table(('"events"', '"zzz"')), "does not exist (create it first: cremant topic create zzz --partitions 2)"),
        (
            _table(tableIndexConfig={"streamConfigs": {"streamType": "embedded"}}),
            "streams are configured both at /tableIndexConfig/streamConfigs and at",
        ),
        (_table(tableIndexConfig={"sortedColumn": ["zzz"]}), "Column Name zzz defined in sortedColumn"),
        (_transforms(("zzz", "upper(country)")), "destination column 'zzz'"),
        (_transforms(("country", "upper(((country)")), "transform of column country: expected )"),
        (_transforms(("country", "upper(a)"), ("country", "lower(a)")), "Duplicate transform config"),
        (_transforms(("country", "upper(x)"), ("x", "lower(country)")), "cycle found in transforms"),
        (_ingesting(filterConfig={"filterFunction": "user_id >"}), "filterFunction: unexpected 'end' at character 10"),
        (_ingesting(filterConfig={"filterFunction": "frobnicate(a)"}), "'frobnicate' is not supported"),
        (_ingesting(filterConfig={"filterFunction": 5}), "filterFunction: expected text, found 5"),
        (_ingesting(streamIngestionConfig={}), "needs stream properties at"),
        (_table((SECRET_KEY, SECRET_KEY), ingestionConfig={"a": {"password": "*****"}}), "the value is hidden (*****)"),
    ],
)
def test_tables_that_cannot_be(cluster: Cluster, document: Any, words: str) -> None:
    assert words in cluster.post("/tables", document, status=400)["error"]
    assert cluster.get("/tables") == {"tables": []}
    assert {info.name for info in cluster.log.topics()} == {"events"}


def test_unknown_keys_are_kept_and_reported_with_their_place(cluster: Cluster) -> None:
    document = _table(segmentsConfig=SEGMENTS | {"replicaton": "2"}, shards=3)
    answer = cluster.post("/tables", document)
    assert answer["unrecognizedProperties"] == {"/segmentsConfig/replicaton": "2", "/shards": 3}


@pytest.mark.parametrize(
    ("method", "path", "document", "status", "words"),
    [
        ("POST", "/tables", _table(), 409, "already exists"),
        ("PUT", "/schemas/gold", _schema(schemaName="gold", metricFieldSpecs=[]), 400, "column amount is missing"),
        (
            "PUT", "/schemas/gold?force=true", _schema(schemaName="gold", metricFieldSpecs=[_column("amount")]), 400,
            "column amount was METRIC DOUBLE and would become METRIC LONG",
        ),
        ("PUT", "/schemas/gold", _schema(), 400, "Schema name mismatch"),
        ("PUT", "/schemas/silver", _schema(schemaName="silver"), 404, "does not exist"),
        ("DELETE", "/schemas/gold", None, 409, "associated with table gold_REALTIME"),
        ("PUT", "/tables/gold", _table(('"events"', '"others"')), 409, "stream topic cannot change"),
        ("PUT", "/tables/gold", _table(tableName="silver"), 400, "silver"),
        ("PUT", "/tables/gold", _table(segmentsConfig=SEGMENTS | {"timeColumnName": "x"}), 400, "timeColumn: x"),
        ("DELETE", "/topics/events", None, 409, "stream of table gold"),
        ("PATCH", "/schemas", None, 405, "405"),
        ("GET", "/tables/gold/../../etc/passwd", None, 404, "404"),
    ],
)  # fmt: skip
def test_changes_that_contradict_a_live_table(
    cluster: Cluster, method: str, path: str, document: Any, status: int, words: str
) -> None:
    cluster.post("/tables", _table())
    before = cluster.get("/tables/gold"), cluster.get("/schemas/gold")
    assert words in cluster.post(path, document, method=method, status=status)["error"]
    assert (cluster.get("/tables/gold"), cluster.get("/schemas/gold")) == before


# --- secrets ------------------------------------------------------------------------------------------------------


def _with_secret(value: str, name: str = "gold") -> dict[str, Any]:
    document = copy.deepcopy(table(name))
    document["ingestionConfig"]["streamIngestionConfig"]["streamConfigMaps"][0][SECRET_KEY] = value
    return document


def _stream_of(document: Any) -> dict[str, str]:
    stream: dict[str, str] = document["ingestionConfig"]["streamIngestionConfig"]["streamConfigMaps"][0]
    return stream


def test_a_secret_is_stored_and_never_shown(cluster: Cluster) -> None:
    cluster.post("/tables/validate", _with_secret("hunter2"))
    cluster.post("/tables", _with_secret("hunter2"))
    shown = [
        cluster.request(method, path, content=json.dumps(body).encode() if body else b"").text
        for method, path, body in (
            ("GET", "/tables/gold", None),
            ("GET", "/tableConfigs/gold", None),
            ("POST", "/tables/validate", _with_secret("hunter2")),
            ("POST", "/tables", _with_secret("hunter2")),
            ("GET", "/status", None),
        )
    ]
    assert not any("hunter2" in text for text in shown)
    assert _stream_of(cluster.get("/tables/gold")["REALTIME"])[SECRET_KEY] == "*****"
    stored = cluster.controller.catalog.tables["gold"].config.stream.properties
    assert stored[SECRET_KEY] == "hunter2"


def test_a_reference_is_shown_as_written(cluster: Cluster) -> None:
    cluster.post("/tables", _with_secret("${env:PASSWORD}"))
    assert _stream_of(cluster.get("/tables/gold")["REALTIME"])[SECRET_KEY] == "${env:PASSWORD}"


def test_a_document_that_comes_back_keeps_the_secrets_it_was_not_shown(cluster: Cluster) -> None:
    cluster.post("/tables", _with_secret("hunter2"))
    for path in ("/tables/gold", "/tableConfigs/gold"):
        document = cluster.get(path)
        document = document.get("REALTIME", document)
        cluster.post(path, document, method="PUT")
        assert cluster.controller.catalog.tables["gold"].config.stream.properties[SECRET_KEY] == "hunter2"
    cluster.post("/tables/gold", _with_secret("hunter3"), method="PUT")
    assert cluster.controller.catalog.tables["gold"].config.stream.properties[SECRET_KEY] == "hunter3"


def test_a_hidden_value_where_nothing_is_stored_is_refused(cluster: Cluster) -> None:
    error = cluster.post("/tables", _with_secret("*****"), status=400)["error"]
    assert SECRET_KEY in error
    assert "the value is hidden" in error
