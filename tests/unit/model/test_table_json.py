# SPDX-License-Identifier: Apache-2.0
"""Pinot's table config JSON: what is read, echoed, listed as unknown, refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cremant.model.errors import Conflict, InvalidConfig
from cremant.model.schema_json import parse_schema
from cremant.model.stream_json import ROWS_UNBOUNDED
from cremant.model.table import (
    ColumnPartitioning,
    ExpiredOffsets,
    FlushConfig,
    IndexConfig,
    PartitionFunction,
    StartFrom,
    TransformConfig,
)
from cremant.model.table_json import check_update, parse_table, table_to_json, validate_table

GOLDEN = Path(__file__).parents[2] / "golden" / "rest"
STREAM = {"streamType": "embedded", "stream.embedded.topic.name": "events"}


def _table(stream: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tableName": "t",
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts"},
        "tenants": {},
        "tableIndexConfig": {"streamConfigs": {**STREAM, **(stream or {})}},
        "metadata": {},
    }
    for key, value in more.items():
        merged = isinstance(document.get(key), dict) and isinstance(value, dict)
        document[key] = {**document[key], **value} if merged else value
    return document


def _golden(number: str, side: str) -> Any:
    [path] = GOLDEN.glob(f"{number}-*.json")
    text = path.read_text().replace("stream.kafka.", "stream.embedded.").replace('"kafka"', '"embedded"')
    return json.loads(text)[side]["body"]


def test_a_table_is_accepted_and_echoed_as_pinot_does() -> None:
    config = parse_table(_golden("026", "request"))
    assert config.unrecognized == _golden("026", "response")["unrecognizedProperties"]
    assert table_to_json(config) == _golden("035", "response")["REALTIME"]
    assert parse_table(table_to_json(config)).unrecognized == {}
    assert config.flush == FlushConfig(rows=1000, time_ms=24 * 3_600_000)
    assert config.stream.start_from is StartFrom.EARLIEST


def test_what_is_set_is_read() -> None:
    document = _table(
        {"stream.embedded.consumer.prop.auto.offset.reset": "earliest"},
        tableName="t_REALTIME",
        segmentsConfig={"replication": "2", "retentionTimeUnit": "DAYS", "retentionTimeValue": "3"},
        tableIndexConfig={"nullHandlingEnabled": True, "sortedColumn": ["a"]},
        ingestionConfig={
            "transformConfigs": [{"columnName": "a", "transformFunction": "lower(b)"}],
            "filterConfig": {"filterFunction": "n < 0"},
        },
        query={"timeoutMs": 1500},
        quota={"maxQueriesPerSecond": "300"},
        routing={"instanceSelectorType": "balanced"},
        cremant={"pipeline": {"minEpochMs": 20, "expiredOffsets": "stop", "function": "my.module:clean"}},
    )
    config = parse_table(document)
    assert (config.name, config.name_with_type, config.time_column) == ("t", "t_REALTIME", "ts")
    assert (config.replication, config.retention_ms, config.query_timeout_ms) == (2, 3 * 86_400_000, 1500)
    assert (config.null_handling, config.sorted_column, config.filter_function) == (True, "a", "n < 0")
    assert config.transforms == (TransformConfig(column="a", function="lower(b)"),)
    assert config.cremant.pipeline.min_epoch_ms == 20
    assert config.cremant.pipeline.expired_offsets is ExpiredOffsets.STOP
    assert config.stream.topic == "events"
    assert config.unrecognized == {}
    assert parse_table(table_to_json(config)).cremant == config.cremant


def test_indexes_are_read_from_all_places_where_pinot_takes_them() -> None:
    config = parse_table(
        _table(
            tableIndexConfig={
                "invertedIndexColumns": ["b", "a"], "rangeIndexColumns": None, "bloomFilterColumns": [],
                "bloomFilterConfigs": {"c": {"fpp": 0.01}},
            },
            fieldConfigList=[
                {"name": "d", "indexes": {"inverted": {}, "bloom": {"disabled": True}}},
                {"name": "e", "indexTypes": ["RANGE", "INVERTED"]},
                {"name": "f", "indexType": "inverted"},
                {"name": "a", "encodingType": "DICTIONARY", "indexes": {"inverted": {}}},
            ],
        )
    )  # fmt: skip
    assert config.indexes == IndexConfig(inverted=("a", "b", "d", "e", "f"), range=("e",), bloom=("c",))
    with pytest.raises(InvalidConfig, match="fieldConfigList"):
        parse_table(_table(fieldConfigList=[{"indexes": {}}]))


def _partitioned(**columns: Any) -> dict[str, Any]:
    return _table(tableIndexConfig={"segmentPartitionConfig": {"columnPartitionMap": columns}})


def test_partitions_of_columns_are_read_and_functions_that_prune_nothing_left_out() -> None:
    config = parse_table(
        _partitioned(
            a={"functionName": "Murmur", "numPartitions": 8},
            b={"functionName": "modulo", "numPartitions": "4"},
            c={"functionName": "HASHCODE", "numPartitions": 2},
            d={"functionName": "murmur2", "numPartitions": 1},
            e={"functionName": "BoundedColumnValue", "numPartitions": 3, "functionConfig": {"columnValues": "x|y"}},
        )
    )
    assert config.partitioning == {
        "a": ColumnPartitioning(function=PartitionFunction.MURMUR, partitions=8),
        "b": ColumnPartitioning(function=PartitionFunction.MODULO, partitions=4),
        "c": ColumnPartitioning(function=PartitionFunction.HASH_CODE, partitions=2),
        "d": ColumnPartitioning(function=PartitionFunction.MURMUR, partitions=1),
    }
    assert parse_table(_table()).partitioning == {}


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"functionName": "Murmurr", "numPartitions": 8}, "columnPartitionMap/a.*functionName, found 'Murmurr'"),
        ({"numPartitions": 8}, "functionName, found None"),
        ({"functionName": "Murmur"}, "numPartitions, found 'None'"),
        ({"functionName": "Murmur", "numPartitions": 0}, "1 or more as numPartitions, found '0'"),
        ({"functionName": "Murmur", "numPartitions": -8}, "1 or more"),
        ({"functionName": "Murmur", "numPartitions": 2**31}, "1 or more"),
        ("Murmur", "expected an object, found str"),
    ],
)
def test_partitions_of_a_column_that_cannot_be_meant_are_refused(item: Any, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        parse_table(_partitioned(a=item))


def test_empty_texts_of_old_configs_mean_not_set() -> None:
    document = _table(segmentsConfig={"retentionTimeUnit": "", "retentionTimeValue": "", "replication": ""})
    config = parse_table(document)
    assert (config.retention_ms, config.replication) == (None, 1)


def test_old_key_of_replication_counts_first() -> None:
    config = parse_table(_table(segmentsConfig={"replication": "1", "replicasPerPartition": "2"}))
    assert config.replication == 2


THRESHOLD = "realtime.segment.flush.threshold"


@pytest.mark.parametrize(
    ("stream", "flush"),
    [
        ({}, FlushConfig()),
        ({f"{THRESHOLD}.rows": "4000"}, FlushConfig(rows=4000)),
        ({f"{THRESHOLD}.size": "4000"}, FlushConfig(rows=4000)),
        ({f"{THRESHOLD}.rows": 4000}, FlushConfig(rows=4000)),
        ({f"{THRESHOLD}.segment.rows": "7", f"{THRESHOLD}.rows": "0"}, FlushConfig(rows=7)),
        ({f"{THRESHOLD}.rows": "0"}, FlushConfig(rows=ROWS_UNBOUNDED)),
        (
            {f"{THRESHOLD}.rows": "0", f"{THRESHOLD}.segment.size": "10M"},
            FlushConfig(rows=ROWS_UNBOUNDED, bytes=10 * 2**20),
        ),
        ({"realtime.segment.flush.desired.size": "1.5G"}, FlushConfig(bytes=3 * 2**29)),
        ({f"{THRESHOLD}.segment.size": "0"}, FlushConfig()),
        ({f"{THRESHOLD}.time": "24h"}, FlushConfig(time_ms=86_400_000)),
        ({f"{THRESHOLD}.time": "1d12h"}, FlushConfig(time_ms=129_600_000)),
        ({f"{THRESHOLD}.time": "3600000"}, FlushConfig(time_ms=3_600_000)),
    ],
)
def test_flush_thresholds_in_every_spelling(stream: dict[str, Any], flush: FlushConfig) -> None:
    assert parse_table(_table(stream)).flush == flush


def test_streams_stand_in_either_place_but_not_in_both() -> None:
    modern = {"streamIngestionConfig": {"streamConfigMaps": [STREAM]}}
    document = _table(ingestionConfig=modern)
    with pytest.raises(InvalidConfig, match="both at"):
        parse_table(document)
    del document["tableIndexConfig"]["streamConfigs"]
    assert parse_table(document).stream.topic == "events"


def test_unknown_keys_are_listed_and_not_echoed() -> None:
    document = _table(
        colour="red",
        segmentsConfig={"schemaName": "t"},
        ingestionConfig={"transformConfigs": [{"columnName": "a", "transformFunction": "1", "why": 1}]},
        metadata={"customConfigs": {"any": "thing"}},
        fieldConfigList=[{"name": "a", "anything": True}],
    )
    config = parse_table(document)
    assert config.unrecognized == {
        "/colour": "red",
        "/segmentsConfig/schemaName": "t",
        "/ingestionConfig/transformConfigs/0/why": 1,
    }
    echo = table_to_json(config)
    assert "colour" not in echo
    assert "schemaName" not in echo["segmentsConfig"]
    assert echo["fieldConfigList"] == document["fieldConfigList"]
    assert config.raw_json["colour"] == "red"


def test_our_own_block_refuses_unknown_keys() -> None:
    with pytest.raises(InvalidConfig, match="minEpoch"):
        parse_table(_table(cremant={"pipeline": {"minEpoch": 5}}))
    with pytest.raises(InvalidConfig, match="function"):
        parse_table(_table(cremant={"pipeline": {"function": "not a path"}}))
    with pytest.raises(InvalidConfig, match="maxRowsPerEpoch"):
        parse_table(_table(cremant={"pipeline": {"maxRowsPerEpoch": 0}}))


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "JSON object"),
        ({}, "'tableName' is mandatory"),
        ({"tableName": "t"}, "'tableType' is mandatory"),
        (_table(tableType="OFFLINE"), "OFFLINE is not supported by this version"),
        (_table(tableType="NEARLINE"), "unknown tableType"),
        (_table(tableName="t_OFFLINE"), "contradicts"),
        (_table(tableName="a__b"), "not allowed"),
        (_table(segmentsConfig={"timeColumnName": None}), "'timeColumnName' cannot be null"),
        (_table(segmentsConfig={"replication": "0"}), "replication"),
        (_table(segmentsConfig={"replication": "two"}), "replication"),
        (_table(segmentsConfig={"retentionTimeUnit": "DAYS", "retentionTimeValue": "x"}), "retentionTimeValue"),
        (_table(segmentsConfig={"retentionTimeUnit": "MOONS", "retentionTimeValue": "1"}), "unknown time unit"),
        (_table(tableIndexConfig={"streamConfigs": {}}), "needs stream properties"),
        (_table(tableIndexConfig={"streamConfigs": []}), "needs stream properties"),
        (_table({"streamType": "kinesis"}), "'kinesis' is not supported by this version.*embedded"),
        (_table({"streamType": ""}), "streamType is missing"),
        (_table({"stream.embedded.topic.name": ""}), "topic.name is missing"),
        (_table({"stream.embedded.topic.name": "a/b"}), "topic name"),
        (_table({"stream.embedded.decoder.class.name": "x.ProtoBufMessageDecoder"}), "decoder.*not supported"),
        (_table({"stream.embedded.consumer.prop.auto.offset.reset": "2d"}), "auto.offset.reset"),
        (_table({f"{THRESHOLD}.rows": "many"}), "number of rows"),
        (_table({f"{THRESHOLD}.time": "soon"}), "not a period"),
        (_table({f"{THRESHOLD}.time": "0"}), "must be positive"),
        (_table({f"{THRESHOLD}.segment.size": "big"}), "not a size"),
        (_table(dedupConfig={"dedupEnabled": True}), "dedupConfig"),
        (_table(isDimTable=True), "isDimTable"),
        (_table(tableIndexConfig={"aggregateMetrics": True}), "aggregateMetrics"),
        (_table(ingestionConfig={"aggregationConfigs": [{"columnName": "a"}]}), "aggregationConfigs"),
        (_table(ingestionConfig={"complexTypeConfig": {"fieldsToUnnest": ["a"]}}), "complexTypeConfig"),
        (_table(ingestionConfig={"rowTimeValueCheck": True}), "rowTimeValueCheck"),
        (_table(ingestionConfig={"streamIngestionConfig": {"pauselessConsumptionEnabled": True}}), "pauseless"),
        (_table(ingestionConfig={"transformConfigs": [{"columnName": "a"}]}), "transformConfigs/0"),
        (
            _table(ingestionConfig={"transformConfigs": [{"columnName": "a", "transformFunction": "1"}] * 2}),
            "Duplicate",
        ),
        (_table(tableIndexConfig={"sortedColumn": ["a", "b"]}), "at most one column"),
        (_table(query={"timeoutMs": "soon"}), "timeoutMs"),
        (_table(segmentsConfig=[]), "must be an object"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(document: Any, reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_table(document)
    assert re.search(reason, str(caught.value)), str(caught.value)


def test_several_streams_are_refused() -> None:
    document = _table(ingestionConfig={"streamIngestionConfig": {"streamConfigMaps": [STREAM, STREAM]}})
    del document["tableIndexConfig"]["streamConfigs"]
    with pytest.raises(InvalidConfig, match="2 streams"):
        parse_table(document)


@pytest.mark.parametrize(
    "more", [{"upsertConfig": {"mode": "NONE"}}, {"upsertConfig": None}, {"dedupConfig": {"dedupEnabled": False}}]
)
def test_features_that_are_named_but_off_are_tolerated(more: dict[str, Any]) -> None:
    assert parse_table(_table(**more)).unrecognized == {}


SCHEMA = parse_schema(
    {
        "schemaName": "t",
        "dimensionFieldSpecs": [
            {"name": "a", "dataType": "STRING"},
            {"name": "mv", "dataType": "STRING", "singleValueField": False},
        ],
        "dateTimeFieldSpecs": [{"name": "ts", "dataType": "LONG", "format": "EPOCH", "granularity": "1:DAYS"}],
    }
)[0]


def test_a_fitting_schema_is_accepted() -> None:
    transforms = [
        {"columnName": "a", "transformFunction": "lower(helper)"},
        {"columnName": "helper", "transformFunction": "concat(x, y)"},
    ]
    index = {"invertedIndexColumns": ["a", "mv"], "sortedColumn": ["a"], "bloomFilterColumns": []}
    validate_table(
        parse_table(_table(tableIndexConfig=index, ingestionConfig={"transformConfigs": transforms})), SCHEMA
    )


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (
            _table(segmentsConfig={"timeColumnName": "nocol"}),
            "Cannot find valid fieldSpec for timeColumn: nocol from the table config: t_REALTIME, in the schema: t",
        ),
        (_table(segmentsConfig={"timeColumnName": "a"}), "Cannot find valid fieldSpec for timeColumn: a"),
        (_table(tableName="other"), "does not match table name"),
        (_table(tableIndexConfig={"noDictionaryColumns": ["x"]}), "Column Name x defined in noDictionaryColumns"),
        (_table(tableIndexConfig={"sortedColumn": ["mv"]}), "sorted column mv must be single-value"),
        (_partitioned(x={"functionName": "Murmur", "numPartitions": 2}), "Column Name x defined in columnPartitionMap"),
        (_partitioned(mv={"functionName": "Murmur", "numPartitions": 2}), "mv has many values"),
        (_partitioned(a={"functionName": "Modulo", "numPartitions": 2}), "Modulo is of INT and LONG columns, a is STR"),
        (
            _table(ingestionConfig={"transformConfigs": [{"columnName": "x", "transformFunction": "1"}]}),
            "destination column 'x'",
        ),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(document: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        validate_table(parse_table(document), SCHEMA)


def test_a_live_table_keeps_its_stream_and_time_column() -> None:
    old = parse_table(_table())
    changed = copy.deepcopy(_table({f"{THRESHOLD}.rows": "9"}, tableIndexConfig={"invertedIndexColumns": ["a"]}))
    check_update(old, parse_table(changed))
    for other in (
        _table({"stream.embedded.topic.name": "elsewhere"}),
        _table(segmentsConfig={"timeColumnName": "other"}),
    ):
        with pytest.raises(Conflict, match="cannot change"):
            check_update(old, parse_table(other))
    with pytest.raises(InvalidConfig, match="does not match table name"):
        check_update(old, parse_table(_table(tableName="other")))
