# SPDX-License-Identifier: Apache-2.0
"""Pinot's table config JSON, read and written. Unknown keys are kept and listed.

What is known but would change answers and is not built (dedup, roll-up, unnesting, ...) is refused by name;
what only changes how Pinot stores data (indexes, tenants, tiers) is tolerated. Lists: `cremant.model.table_keys`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cremant.model.completion import parse_completion
from cremant.model.errors import Conflict, InvalidConfig
from cremant.model.freshness_json import parse_freshness_sla
from cremant.model.names import check_table_name, raw_table_name
from cremant.model.schema import DataType, FieldType, Schema
from cremant.model.stream_json import find_stream, parse_flush, parse_stream
from cremant.model.table import (
    ColumnPartitioning,
    CremantConfig,
    IndexConfig,
    PartitionFunction,
    TableConfig,
    TransformConfig,
)
from cremant.model.table_keys import (
    ECHO_DEFAULTS,
    INDEX_COLUMN_LISTS,
    UNUSED_PARTITION_FUNCTIONS,
    find_unrecognized,
    without_unrecognized,
)
from cremant.model.timeformat import parse_unit_ms
from cremant.model.upsert_json import parse_upsert, validate_upsert

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_TRUE = (True, "true", "TRUE", "True")


def parse_table(document: Any) -> TableConfig:
    """The typed config; `unrecognized` lists by JSON pointer what Pinot does not know. Raises InvalidConfig."""
    if not isinstance(document, dict):
        raise InvalidConfig(f"a table config is a JSON object, found {type(document).__name__}")
    written = document.get("tableName")
    if not isinstance(written, str) or not written:
        raise InvalidConfig("table config: 'tableName' is mandatory")
    name = check_table_name(raw_table_name(written))
    for section in ("segmentsConfig", "tenants", "tableIndexConfig", "ingestionConfig", "metadata", "query"):
        _section(document, section)
    _check_type(document, name)
    _refuse_unsupported(document)
    segments = _section(document, "segmentsConfig")
    time_column = segments.get("timeColumnName")
    if not isinstance(time_column, str) or not time_column:
        raise InvalidConfig(
            f"table {name}: 'timeColumnName' cannot be null in a REALTIME table config",
            hint="set segmentsConfig.timeColumnName to a dateTimeFieldSpecs column of the schema",
        )
    properties, stream_at = find_stream(document)
    index = _section(document, "tableIndexConfig")
    ingestion = _section(document, "ingestionConfig")
    replication = _replication(segments)
    cremant = _cremant(document)
    return TableConfig(
        name=name,
        time_column=time_column,
        replication=replication,
        stream=parse_stream(properties, stream_at),
        flush=parse_flush(properties, stream_at),
        completion=parse_completion(segments, replication),
        retention_ms=_retention_ms(segments),
        null_handling=index.get("nullHandlingEnabled") in _TRUE,
        filter_function=_filter(ingestion),
        transforms=_transforms(ingestion),
        sorted_column=_sorted_column(index),
        indexes=_indexes(document),
        partitioning=_partitioning(index),
        query_timeout_ms=_query_timeout_ms(document),
        upsert=parse_upsert(document, time_column, cremant),
        cremant=cremant,
        freshness_sla=parse_freshness_sla(document),
        raw_json={**document, "tableName": f"{name}_REALTIME", "tableType": "REALTIME"},
        unrecognized=find_unrecognized(document),
    )


def _section(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidConfig(f"table config: /{key} must be an object, found {type(value).__name__}")
    return value


def _check_type(document: dict[str, Any], name: str) -> None:
    kind = document.get("tableType")
    if kind is None:
        raise InvalidConfig(f"table {name}: 'tableType' is mandatory", hint="REALTIME")
    text = str(kind).upper()
    if text == "OFFLINE":
        raise InvalidConfig(f"table {name}: tableType OFFLINE is not supported by this version", hint="use REALTIME")
    if text != "REALTIME":
        raise InvalidConfig(f"table {name}: unknown tableType {kind!r}", hint="REALTIME")
    suffix = str(document["tableName"]).rpartition("_")[2]
    if suffix == "OFFLINE":
        raise InvalidConfig(f"table name {document['tableName']!r} contradicts tableType REALTIME")


def _refuse_unsupported(document: dict[str, Any]) -> None:
    """What would change answers and is not built; silence would be a wrong answer later."""
    ingestion = _section(document, "ingestionConfig")
    stream = _section(ingestion, "streamIngestionConfig")
    index = _section(document, "tableIndexConfig")
    dedup = _section(document, "dedupConfig")
    refused = {
        "/dedupConfig": bool(dedup) and dedup.get("dedupEnabled", True) in _TRUE,
        "/dimensionTableConfig": bool(document.get("dimensionTableConfig")),
        "/isDimTable": document.get("isDimTable") in _TRUE,
        "/tableIndexConfig/aggregateMetrics": index.get("aggregateMetrics") in _TRUE,
        "/ingestionConfig/aggregationConfigs": bool(ingestion.get("aggregationConfigs")),
        "/ingestionConfig/complexTypeConfig": bool(ingestion.get("complexTypeConfig")),
        "/ingestionConfig/enrichmentConfigs": bool(ingestion.get("enrichmentConfigs")),
        "/ingestionConfig/schemaConformingTransformerConfig": bool(ingestion.get("schemaConformingTransformerConfig")),
        "/ingestionConfig/schemaConformingTransformerV2Config": bool(
            ingestion.get("schemaConformingTransformerV2Config")
        ),
        "/ingestionConfig/rowTimeValueCheck": ingestion.get("rowTimeValueCheck") in _TRUE,
        "/ingestionConfig/streamIngestionConfig/pauselessConsumptionEnabled": stream.get("pauselessConsumptionEnabled")
        in _TRUE,
    }
    for pointer, is_refused in refused.items():
        if is_refused:
            raise InvalidConfig(
                f"table {document.get('tableName')}: {pointer.rpartition('/')[2]} is not supported by this version "
                f"(at {pointer})",
                hint="remove it: ignoring it would change what queries answer",
            )


def _replication(segments: dict[str, Any]) -> int:
    for key in ("replicasPerPartition", "replication"):
        text = str(segments.get(key) or "").strip()
        if text:
            if not text.isdigit() or not 1 <= int(text) <= 100:
                raise InvalidConfig(f"/segmentsConfig/{key}: expected a number of 1 or more, found {text!r}")
            return int(text)
    return 1


def _retention_ms(segments: dict[str, Any]) -> int | None:
    unit, value = (str(segments.get(f"retentionTime{part}") or "").strip() for part in ("Unit", "Value"))
    if not unit or not value:
        return None
    unit_ms = parse_unit_ms(unit, "/segmentsConfig/retentionTimeUnit")
    if not value.isdigit() or int(value) == 0:
        raise InvalidConfig(f"/segmentsConfig/retentionTimeValue: expected a positive number, found {value!r}")
    return int(int(value) * unit_ms)


def _filter(ingestion: dict[str, Any]) -> str | None:
    text = _section(ingestion, "filterConfig").get("filterFunction")
    if text is not None and not isinstance(text, str):
        raise InvalidConfig(f"/ingestionConfig/filterConfig/filterFunction: expected text, found {text!r}")
    return text or None


def _transforms(ingestion: dict[str, Any]) -> tuple[TransformConfig, ...]:
    transforms: list[TransformConfig] = []
    for at, item in enumerate(ingestion.get("transformConfigs") or []):
        column, function = (
            (item.get("columnName"), item.get("transformFunction")) if isinstance(item, dict) else (None, None)
        )
        if not isinstance(column, str) or not column or not isinstance(function, str) or not function:
            raise InvalidConfig(
                f"/ingestionConfig/transformConfigs/{at}: columnName and transformFunction are both needed"
            )
        if any(other.column == column for other in transforms):
            raise InvalidConfig(f"Duplicate transform config found for column '{column}'")
        transforms.append(TransformConfig(column=column, function=function))
    return tuple(transforms)


def _sorted_column(index: dict[str, Any]) -> str | None:
    value = index.get("sortedColumn")
    columns = [value] if isinstance(value, str) else list(value or [])
    if len(columns) > 1:
        raise InvalidConfig(f"/tableIndexConfig/sortedColumn: at most one column, found {columns}")
    return columns[0] if columns and columns[0] else None


def _indexes(document: dict[str, Any]) -> IndexConfig:
    """From the lists of `tableIndexConfig` and from `fieldConfigList` (`indexes`, and the older `indexTypes`)."""
    index = _section(document, "tableIndexConfig")
    lists = {"inverted": "invertedIndexColumns", "range": "rangeIndexColumns", "bloom": "bloomFilterColumns"}
    wanted = {kind: list(index.get(key) or []) for kind, key in lists.items()}
    wanted["bloom"] += list(_section(index, "bloomFilterConfigs"))
    for field in document.get("fieldConfigList") or []:
        name = field.get("name") if isinstance(field, dict) else None
        if not isinstance(name, str):
            raise InvalidConfig(f"/fieldConfigList: every entry needs a 'name', found {field!r}")
        older = [*(field.get("indexTypes") or []), field.get("indexType")]
        named = {str(kind).lower(): {} for kind in older if kind} | _section(field, "indexes")
        for kind, columns in wanted.items():
            if kind in named and (named[kind] or {}).get("disabled") not in _TRUE:
                columns.append(name)
    # In one order: equal wishes are equal configs, and need no other index files.
    return IndexConfig(**{kind: tuple(sorted(set(columns))) for kind, columns in wanted.items()})


def _partitioning(index: dict[str, Any]) -> dict[str, ColumnPartitioning]:
    """Of `segmentPartitionConfig`; columns by a function that we do not prune by are left out."""
    config = _section(index, "segmentPartitionConfig")
    columns = _section(config, "columnPartitionMap")
    functions = {function.lower(): function for function in PartitionFunction} | {"murmur2": PartitionFunction.MURMUR}
    found: dict[str, ColumnPartitioning] = {}
    for column, item in columns.items():
        place = f"/tableIndexConfig/segmentPartitionConfig/columnPartitionMap/{column}"
        if not isinstance(item, dict):
            raise InvalidConfig(f"{place}: expected an object, found {type(item).__name__}")
        name, partitions = item.get("functionName"), str(item.get("numPartitions"))
        if not isinstance(name, str) or name.lower() not in {*functions, *UNUSED_PARTITION_FUNCTIONS}:
            raise InvalidConfig(
                f"{place}: expected a partition function as functionName, found {name!r}",
                hint=f"one of {', '.join(PartitionFunction)}; Pinot's others are accepted and prune nothing",
            )
        if not partitions.isdecimal() or not 1 <= int(partitions) < 2**31:
            raise InvalidConfig(f"{place}: expected a number of 1 or more as numPartitions, found {partitions!r}")
        if name.lower() in functions:
            found[column] = ColumnPartitioning(function=functions[name.lower()], partitions=int(partitions))
    return found


def _query_timeout_ms(document: dict[str, Any]) -> int | None:
    value = _section(document, "query").get("timeoutMs")
    if value is None:
        return None
    if not str(value).isdigit() or int(value) <= 0:
        raise InvalidConfig(f"/query/timeoutMs: expected a positive number of ms, found {value!r}")
    return int(value)


def _cremant(document: dict[str, Any]) -> CremantConfig:
    try:
        config = msgspec.convert(document.get("cremant") or {}, CremantConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"table config, block 'cremant': {error}") from error
    pipeline = config.pipeline
    if pipeline.min_epoch_ms < 0 or pipeline.max_rows_per_epoch < 1:
        raise InvalidConfig("cremant.pipeline: minEpochMs must be 0 or more and maxRowsPerEpoch 1 or more")
    if pipeline.function is not None and not _FUNCTION.fullmatch(pipeline.function):
        raise InvalidConfig(f"cremant.pipeline.function: {pipeline.function!r} is not of the form package.module:name")
    return config


def table_to_json(config: TableConfig) -> dict[str, Any]:
    """As Pinot echoes it: the user's keys, with the defaults Pinot adds, without unrecognized ones."""
    known = without_unrecognized(config.raw_json)
    document: dict[str, Any] = {"tableName": config.name_with_type, "tableType": "REALTIME"}
    for section in ("segmentsConfig", "tenants", "tableIndexConfig"):
        document[section] = ECHO_DEFAULTS[section] | known.get(section, {})
    document["metadata"] = known.get("metadata", {})
    document["ingestionConfig"] = ECHO_DEFAULTS["ingestionConfig"] | known.get("ingestionConfig", {})
    if "streamIngestionConfig" in document["ingestionConfig"]:
        document["ingestionConfig"] |= {
            "streamIngestionConfig": ECHO_DEFAULTS["streamIngestionConfig"]
            | document["ingestionConfig"]["streamIngestionConfig"]
        }
    if "ingestionConfig" not in known:
        del document["ingestionConfig"]
    if config.upsert is not None:
        document["upsertConfig"] = {"mode": "FULL"} | known.get("upsertConfig", {})
    return document | {"isDimTable": False} | {key: value for key, value in known.items() if key not in document}


def validate_table(config: TableConfig, schema: Schema) -> None:
    """Checks the config against its schema (time column, index and transform columns). Raises InvalidConfig. Whether
    transform and filter expressions can run is checked by `cremant.ingest.plan.compile_ingest`."""
    if schema.name != config.name:
        raise InvalidConfig(f"Schema name: {schema.name} does not match table name: {config.name}")
    time_field = schema.field(config.time_column)
    if time_field is None or time_field.field_type is not FieldType.DATE_TIME:
        raise InvalidConfig(
            f"Cannot find valid fieldSpec for timeColumn: {config.time_column} from the table config: "
            f"{config.name_with_type}, in the schema: {schema.name}"
        )
    index = _section(config.raw_json, "tableIndexConfig")
    for key in INDEX_COLUMN_LISTS:
        value = index.get(key) or []
        for column in [value] if isinstance(value, str) else value:
            if column and schema.field(column) is None:
                raise InvalidConfig(
                    f"Column Name {column} defined in {key} must be a valid column defined in the schema"
                )
    for column in {*config.indexes.inverted, *config.indexes.range, *config.indexes.bloom}:
        if schema.field(column) is None:
            raise InvalidConfig(f"Column Name {column} defined in field config list must be a valid column")
    _check_partitioning(config, schema)
    validate_upsert(config, schema)
    if config.sorted_column is not None:
        sorted_field = schema.field(config.sorted_column)
        if sorted_field is not None and not sorted_field.single_value:
            raise InvalidConfig(f"sorted column {config.sorted_column} must be single-value")
    for transform in config.transforms:
        if schema.field(transform.column) is None and not _feeds_another(transform, config.transforms):
            raise InvalidConfig(
                f"The destination column '{transform.column}' of the transform function must be present in the schema "
                "or as a source column for another transform function"
            )


def _check_partitioning(config: TableConfig, schema: Schema) -> None:
    for column, how in config.partitioning.items():
        field = schema.field(column)
        if field is None:
            raise InvalidConfig(f"Column Name {column} defined in columnPartitionMap must be a valid column")
        if not field.single_value:
            raise InvalidConfig(f"columnPartitionMap: column {column} has many values and no one partition")
        if how.function is PartitionFunction.MODULO and field.data_type not in (DataType.INT, DataType.LONG):
            raise InvalidConfig(
                f"columnPartitionMap: Modulo is of INT and LONG columns, {column} is {field.data_type}",
                hint="Murmur is what Kafka clients partition keys by",
            )


def _feeds_another(transform: TransformConfig, others: tuple[TransformConfig, ...]) -> bool:
    word = re.compile(rf"(?<![\w$]){re.escape(transform.column)}(?![\w$])")
    return any(word.search(other.function) for other in others if other is not transform)


def check_update(old: TableConfig, new: TableConfig) -> None:
    """What may change on a live table. Raises Conflict (the stream and its topic may not) or InvalidConfig."""
    if old.name != new.name:
        raise InvalidConfig(f"Request table {old.name} does not match table name in the body {new.name}")
    fixed = (
        ("stream type", old.stream.stream_type, new.stream.stream_type),
        ("stream topic", old.stream.topic, new.stream.topic),
        ("time column", old.time_column, new.time_column),
    )
    for what, before, after in fixed:
        if before != after:
            raise Conflict(
                f"table {old.name}: {what} cannot change from {before!r} to {after!r} while the table exists",
                hint="create another table, or drop this one first",
            )
