# SPDX-License-Identifier: Apache-2.0
"""What makes a table an upsert table: `upsertConfig` and its synonyms, what is verified, what may change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cremant.model.errors import Conflict, InvalidConfig
from cremant.model.schema import Schema
from cremant.model.schema_json import parse_schema, schema_to_json
from cremant.model.table import TableConfig, TransformConfig
from cremant.model.table_json import parse_table, table_to_json, validate_table
from cremant.model.table_keys import TABLE_KEYS
from cremant.model.upsert import CompactionConfig, NullKeyPolicy, UpsertConfig
from cremant.model.upsert_json import check_upsert_change, completed_by

FULL = {"mode": "FULL"}
NULLS = {"nullHandlingEnabled": True}
APPEND = {"upsert": {"nullKey": "append", "historyMs": 9000}}


def document(upsert: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "tableName": "accounts",
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts"},
        "tenants": {},
        "tableIndexConfig": {
            "streamConfigs": {"streamType": "embedded", "stream.embedded.topic.name": "accounts"},
        },
        "metadata": {},
    }
    return made | ({} if upsert is None else {"upsertConfig": upsert}) | more


def schema(**more: Any) -> Schema:
    made: dict[str, Any] = {
        "schemaName": "accounts",
        "dimensionFieldSpecs": [
            {"name": "UserId", "dataType": "STRING"},
            {"name": "region", "dataType": "INT"},
            {"name": "tags", "dataType": "STRING", "singleValueField": False},
            {"name": "payload", "dataType": "JSON"},
            {"name": "exact", "dataType": "BIG_DECIMAL"},
            {"name": "raw", "dataType": "BYTES"},
            {"name": "gone", "dataType": "BOOLEAN"},
            {"name": "version", "dataType": "LONG"},
        ],
        "metricFieldSpecs": [{"name": "AccountBalance", "dataType": "DOUBLE"}],
        "dateTimeFieldSpecs": [{"name": "ts", "dataType": "LONG", "format": "EPOCH", "granularity": "1:MILLISECONDS"}],
        "primaryKeyColumns": ["UserId"],
    }
    return parse_schema({key: value for key, value in (made | more).items() if value is not None})[0]


def checked(upsert: dict[str, Any] | None, of: Schema | None = None, **more: Any) -> TableConfig:
    of = of or schema()
    config = completed_by(of, parse_table(document(upsert, **more)))
    validate_table(config, of)
    return config


RETENTION = {"timeColumnName": "ts", "retentionTimeUnit": "DAYS", "retentionTimeValue": "2"}


def test_keys_live_as_long_as_rows_unless_their_ttl_is_named() -> None:
    def retained(upsert: dict[str, Any], of: Schema | None = None) -> int | None:
        found = checked(upsert, of, segmentsConfig=RETENTION).upsert
        assert found is not None
        return found.retained_ms

    assert retained(FULL) == 2 * 86_400_000
    assert retained(FULL | {"metadataTTL": 5}) is None
    assert retained(FULL | {"metadataTTL": 0}) is None, "for as long as their segments"
    assert retained(FULL | {"comparisonColumns": ["version"]}) is None, "no time"
    text = {"name": "ts", "dataType": "STRING", "format": "SIMPLE_DATE_FORMAT|yyyyMMdd", "granularity": "1:DAYS"}
    assert retained(FULL, schema(dateTimeFieldSpecs=[text])) is None
    without = checked(FULL).upsert
    assert without is not None
    assert without.retained_ms is None, "rows are kept for ever"


def test_rows_are_compared_by_the_time_column_unless_others_are_named() -> None:
    assert checked(FULL).upsert == UpsertConfig(comparison_columns=("ts",))
    assert checked({}).upsert == checked({"mode": "full"}).upsert == checked(FULL).upsert
    assert checked({"comparisonColumns": ["version", "ts"]}).upsert == UpsertConfig(
        comparison_columns=("version", "ts")
    )
    assert checked({"comparisonColumn": "version"}).upsert == UpsertConfig(comparison_columns=("version",))


def test_everything_that_is_read_is_read() -> None:
    upsert = {"mode": "FULL", "comparisonColumns": ["version"], "deleteRecordColumn": "gone", "metadataTTL": 3600}
    config = checked(
        upsert | {"deletedKeysTTL": "60.5"},
        schema(enableColumnBasedNullHandling=True),
        cremant={"upsert": {"nullKey": "append", "historyMs": 5000}},
    )
    assert config.upsert == UpsertConfig(
        comparison_columns=("version",), delete_column="gone", ttl=3600.0, deleted_ttl=60.5,
        null_key=NullKeyPolicy.APPEND, history_ms=5000,
    )  # fmt: skip
    assert checked(FULL | {"metadataTTL": 0, "deleteRecordColumn": "", "deletedKeysTTL": 0}).upsert == UpsertConfig(
        comparison_columns=("ts",)
    )


def test_what_pinot_needs_said_and_is_always_so_here_is_accepted_without_effect() -> None:
    said = {
        "hashFunction": "MURMUR3", "consistencyMode": "SNAPSHOT", "snapshot": "ENABLE", "preload": "DISABLE",
        "enableSnapshot": True, "enablePreload": False, "upsertViewRefreshIntervalMs": 3000,
        "dropOutOfOrderRecord": True, "newSegmentTrackingTimeMs": 10_000, "metadataManagerClass": "x.Y",
        "metadataManagerConfigs": {"a": "b"},
        "enableDeletedKeysCompactionConsistency": True, "enableCommitTimeCompaction": True,
        "defaultPartialUpsertStrategy": "OVERWRITE", "allowPartialUpsertConsumptionDuringCommit": False,
    }  # fmt: skip
    config = checked(FULL | said, routing={"instanceSelectorType": "strictReplicaGroup"})
    assert config.upsert == checked(FULL).upsert
    assert config.unrecognized == {}
    assert table_to_json(config)["upsertConfig"] == FULL | said
    assert said.keys() <= TABLE_KEYS["upsertConfig"].keys()


def test_a_key_that_pinot_does_not_know_is_reported() -> None:
    assert checked(FULL | {"comparisonColum": "x"}).unrecognized == {"/upsertConfig/comparisonColum": "x"}


@pytest.mark.parametrize(
    ("upsert", "more", "reason"),
    [
        ({"mode": "PARTIAL"}, {}, "PARTIAL.*not supported.*docs/upsert.md, 'Partial upsert'"),
        ({"mode": "SOME"}, {}, "expected FULL or NONE, found 'SOME'"),
        ([], {}, "/upsertConfig must be an object"),
        (FULL | {"partialUpsertStrategies": {"a": "MAX"}}, {}, "of mode PARTIAL"),
        (FULL | {"postPartialUpsertTransformConfigs": [1]}, {}, "transformConfigs"),
        (FULL | {"outOfOrderRecordColumn": "late"}, {}, "outOfOrderRecordColumn"),
        (FULL | {"hashFunction": "CRC"}, {}, "hashFunction: expected one of NONE, MD5"),
        (FULL | {"consistencyMode": "SOMETIMES"}, {}, "consistencyMode"),
        (FULL | {"comparisonColumns": ["ts", 1]}, {}, "comparisonColumns: expected names"),
        (FULL | {"comparisonColumns": ["ts", "ts"]}, {}, "named twice"),
        (FULL | {"deleteRecordColumn": 7}, {}, "deleteRecordColumn: expected the name"),
        (FULL | {"metadataTTL": -1}, {}, "metadataTTL: expected 0 .off. or a positive number"),
        (FULL | {"metadataTTL": "long"}, {}, "metadataTTL"),
        (FULL | {"metadataTTL": True}, {}, "metadataTTL"),
        (FULL | {"deletedKeysTTL": 5}, {}, "deleteRecordColumn"),
        (FULL, {"cremant": {"upsert": {"nullKey": "ignore"}}}, "nullKey"),
        (FULL, {"cremant": {"upsert": {"historyMs": 10}}}, "historyMs: expected 1000 to 86400000 ms, found 10"),
        (None, {"cremant": {"upsert": {"historyMs": 5000}}}, "no upsert table"),
        ({"mode": "NONE"}, {"updateSemantic": "upsert"}, "mode is NONE"),
        (FULL, {"updateSemantic": "append"}, "mode is FULL"),
        (None, {"updateSemantic": "merge"}, "/updateSemantic: expected append or upsert, found 'merge'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(upsert: Any, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_table(document(upsert, **more))
    assert re.search(reason, str(caught.value)), str(caught.value)


def test_everything_that_is_missing_is_named_at_once() -> None:
    upsert = {"comparisonColumns": ["when", "payload"], "deleteRecordColumn": "raw", "metadataTTL": 5}
    with pytest.raises(InvalidConfig) as caught:
        checked(upsert, schema(primaryKeyColumns=None))
    for part in (
        "the schema names no primary key (primaryKeyColumns)",
        "comparison column when is not in the schema",
        "comparison column payload is JSON, which rows cannot be ordered by",
        "metadataTTL and deletedKeysTTL need exactly one comparison column",
        "deleteRecordColumn raw must be BOOLEAN, STRING or a number, not BYTES",
        "docs/upsert.md",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("upsert", "keys", "reason"),
    [
        (FULL, ["UserId", "UserId"], "names a column twice"),
        (FULL, ["payload"], "primary key column payload is JSON"),
        ({"comparisonColumns": ["tags"]}, ["UserId"], "comparison column tags must be single-value"),
        ({"comparisonColumns": ["exact"]}, ["UserId"], "exact is BIG_DECIMAL"),
        (
            {"comparisonColumns": ["raw"], "metadataTTL": 1},
            ["UserId"],
            "need a numeric comparison column, raw is BYTES",
        ),
        ({"deleteRecordColumn": "tags"}, ["UserId"], "deleteRecordColumn tags must be single-value"),
        ({"deleteRecordColumn": "no"}, ["UserId"], "deleteRecordColumn no is not in the schema"),
        ({"deleteRecordColumn": "UserId"}, ["region", "UserId"], "UserId cannot be part of the primary key"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(upsert: dict[str, Any], keys: list[str], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        checked(upsert, schema(primaryKeyColumns=keys))


def test_rows_without_a_key_can_be_kept_where_nulls_are_stored() -> None:
    with pytest.raises(InvalidConfig, match="nullKey append needs stored nulls"):
        checked(FULL, cremant=APPEND)
    of_table = document()["tableIndexConfig"] | {"nullHandlingEnabled": True}
    for config in (
        checked(FULL, schema(enableColumnBasedNullHandling=True), cremant=APPEND),
        checked(FULL, tableIndexConfig=of_table, cremant=APPEND),
    ):
        assert config.upsert is not None
        assert config.upsert.null_key is NullKeyPolicy.APPEND


def test_primary_keys_of_every_type_with_one_text_per_value_are_accepted() -> None:
    assert checked(
        FULL, schema(primaryKeyColumns=["UserId", "region", "exact", "raw", "gone", "AccountBalance"])
    ).upsert


def test_the_example_of_the_document_is_accepted() -> None:
    text = (Path(__file__).parents[3] / "docs" / "upsert.md").read_text(encoding="utf-8")
    of_schema, of_table = (
        json.loads(block) for block in re.findall(r"^(    \{.*?\n)\n", text, re.MULTILINE | re.DOTALL)[:2]
    )
    of = parse_schema(of_schema)[0]
    config = completed_by(of, parse_table(of_table))
    validate_table(config, of)
    assert (config.unrecognized, config.upsert is not None) == ({}, True)


# --- the synonyms of the key-coordinator design ---


def test_update_semantic_of_the_table_is_another_word_for_mode_full() -> None:
    config = checked(None, updateSemantic="upsert")
    assert config.upsert == checked(FULL).upsert
    assert table_to_json(config)["upsertConfig"] == FULL
    assert parse_table(table_to_json(config)).upsert == config.upsert
    assert checked(None, updateSemantic="append").upsert is None
    assert checked(FULL, updateSemantic="UPSERT").upsert == config.upsert


def test_update_semantic_of_the_schema_makes_its_table_an_upsert_table() -> None:
    of = schema(updateSemantic="upsert", primaryKeyColumns=None, primaryKey="UserId")
    assert of.primary_key_columns == ("UserId",)
    config = checked(None, of)
    assert config.upsert == checked(FULL).upsert
    assert parse_table(table_to_json(config)).upsert == config.upsert
    shown = schema_to_json(of)
    assert (shown["updateSemantic"], shown["primaryKeyColumns"]) == ("upsert", ["UserId"])
    assert parse_schema(shown) == (of, {})


@pytest.mark.parametrize(
    ("semantic", "upsert", "more", "reason"),
    [
        ("append", FULL, {}, "updateSemantic is append, but the table config makes accounts an upsert table"),
        ("upsert", {"mode": "NONE"}, {}, "says that accounts is an append table"),
        ("upsert", None, {"updateSemantic": "append"}, "says that accounts is an append table"),
    ],
)
def test_schema_and_table_may_not_contradict_each_other(
    semantic: str, upsert: Any, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        checked(upsert, schema(updateSemantic=semantic), **more)


def test_a_schema_that_becomes_one_of_an_upsert_table_does_not_change_an_append_table() -> None:
    with pytest.raises(InvalidConfig, match="change the table config first"):
        validate_table(parse_table(document()), schema(updateSemantic="upsert"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"primaryKey": ["region"]}, "primaryKey and primaryKeyColumns differ"),
        ({"primaryKeyColumns": None, "primaryKey": 7}, "/primaryKey"),
        ({"primaryKeyColumns": None, "primaryKey": [7]}, "/primaryKey/0"),
        ({"updateSemantic": "merge"}, "expected append or upsert, found 'merge'"),
        ({"updateSemantic": "upsert", "primaryKeyColumns": None}, "needs a primary key"),
        (
            {"metricFieldSpecs": [{"name": "$ValidFrom", "dataType": "INT"}]},
            "virtual column \\$ValidFrom is a single LONG",
        ),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        schema(**more)


def test_the_virtual_columns_of_the_design_may_be_declared_and_are_not_stored() -> None:
    declared = [{"name": name, "dataType": "LONG"} for name in ("$ValidFrom", "$ValidUntil")]
    assert schema(metricFieldSpecs=declared) == schema(metricFieldSpecs=[])


def test_a_column_kafka_offset_of_an_upsert_table_is_the_offset() -> None:
    of = schema(metricFieldSpecs=[{"name": "KafkaOffset", "dataType": "LONG"}])
    config = checked(FULL, of)
    assert config.transforms == (TransformConfig(column="KafkaOffset", function='"__metadata$offset"'),)
    assert config.stream.properties["stream.embedded.metadata.populate"] == "true"
    own = {"transformConfigs": [{"columnName": "KafkaOffset", "transformFunction": "plus(version, 1)"}]}
    assert len(checked(FULL, of, ingestionConfig=own).transforms) == 1
    assert checked(None, of).transforms == ()


# --- compaction ---


def task(**keys: Any) -> dict[str, Any]:
    return {"task": {"taskTypeConfigsMap": {"UpsertCompactionTask": keys}}}


def test_compaction_is_said_as_in_pinot() -> None:
    def compaction(**keys: Any) -> CompactionConfig | None:
        found = checked(FULL, **task(**keys)).upsert
        assert found is not None
        return found.compaction

    week_ms = 7 * 24 * 3_600_000
    assert compaction(invalidRecordsThresholdCount="100000") == CompactionConfig(buffer_ms=week_ms, count=100_000)
    assert compaction(
        schedule="0 */5 * ? * *", bufferTimePeriod="1d12h", invalidRecordsThresholdPercent="30.5",
        invalidRecordsThresholdCount=7, tableMaxNumTasks="4", validDocIdsType="SNAPSHOT",
    ) == CompactionConfig(buffer_ms=36 * 3_600_000, percent=30.5, count=7)  # fmt: skip
    assert compaction(bufferTimePeriod="0d", invalidRecordsThresholdPercent=0) == CompactionConfig(buffer_ms=0)
    others = {"task": {"taskTypeConfigsMap": {"RealtimeToOfflineSegmentsTask": {}}}}
    assert checked(FULL, **others).upsert == checked(FULL).upsert == checked(FULL, task=None).upsert


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"bufferTimePeriod": "7d"}, "set invalidRecordsThresholdPercent or invalidRecordsThresholdCount"),
        ({"invalidRecordsThresholdPercent": 101}, "ThresholdPercent: expected a number of 0 to 100, found 101"),
        ({"invalidRecordsThresholdPercent": "many"}, "ThresholdPercent: expected a number"),
        ({"invalidRecordsThresholdCount": 0}, "ThresholdCount: expected a number of 1 or more, found 0"),
        ({"invalidRecordsThresholdCount": True}, "ThresholdCount: expected a number"),
        ({"invalidRecordsThresholdCount": "1.5"}, "ThresholdCount: expected a whole number of rows"),
        ({"invalidRecordsThresholdCount": 9, "bufferTimePeriod": "soon"}, "bufferTimePeriod: 'soon' is not a period"),
    ],
)
def test_a_compaction_that_cannot_be_is_refused_with_the_reason(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        parse_table(document(FULL, **task(**keys)))


def test_only_upsert_tables_are_compacted_and_that_may_change() -> None:
    with pytest.raises(InvalidConfig, match="UpsertCompactionTask is of upsert tables"):
        checked(None, **task(invalidRecordsThresholdCount=9))
    config, of = checked(FULL, **task(invalidRecordsThresholdCount=9)), schema()
    check_upsert_change(checked(FULL), of, config, of)
    check_upsert_change(config, of, checked(FULL), of)


# --- what may change of a live table ---


def test_what_decided_which_rows_are_in_force_cannot_change() -> None:
    old, of = checked(FULL | {"deleteRecordColumn": "gone"}), schema()
    fine = FULL | {"deleteRecordColumn": "gone", "metadataTTL": 9, "deletedKeysTTL": 3}
    tuned = checked(fine, schema(enableColumnBasedNullHandling=True), cremant=APPEND)
    check_upsert_change(old, of, tuned, of)
    check_upsert_change(checked(None), of, checked(None), schema(primaryKeyColumns=["region"]))
    check_upsert_change(checked(None), schema(primaryKeyColumns=None), checked(FULL), of)
    for new, new_schema, reason in (
        (checked(FULL), of, "deleteRecordColumn cannot change from gone to none"),
        (checked({"deleteRecordColumn": "gone", "comparisonColumns": ["version"]}), of, "comparison columns cannot"),
        (
            old,
            schema(primaryKeyColumns=["UserId", "region"]),
            "primary key cannot change from UserId to UserId, region",
        ),
        (checked(None), of, "upsert cannot change to append"),
    ):
        with pytest.raises(Conflict, match=reason):
            check_upsert_change(old, of, new, new_schema)


def test_null_handling_may_be_turned_on_but_not_off() -> None:
    """A null is less than every value, its default is not."""
    without, stored = checked(FULL), checked(FULL, tableIndexConfig=document()["tableIndexConfig"] | NULLS)
    by_column = schema(enableColumnBasedNullHandling=True)
    check_upsert_change(without, schema(), stored, schema())
    check_upsert_change(stored, schema(), without, by_column)
    for old, of in ((stored, schema()), (without, by_column)):
        with pytest.raises(Conflict, match="null handling cannot be turned off"):
            check_upsert_change(old, of, without, schema())
