# SPDX-License-Identifier: Apache-2.0
"""What makes a table an upsert table: Pinot's `upsertConfig` read, checked against the schema, and compared when it
changes.

Every key of Pinot's `upsertConfig` is either read, or accepted without effect because it only says how Pinot stores
or repairs what is always so here (snapshots, hash functions, consistency modes), or refused with the reason because
ignoring it would change answers. The synonyms `updateSemantic: append | upsert` (table and schema) are those of the
key-coordinator design. For users: docs/upsert.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cremant.model.errors import Conflict, InvalidConfig
from cremant.model.names import KAFKA_OFFSET
from cremant.model.schema import DataType, Schema
from cremant.model.table import CremantConfig, TableConfig, TransformConfig, UpsertTuning
from cremant.model.table_keys import UPSERT_CHOICES
from cremant.model.timeformat import parse_period_ms, parse_time_format
from cremant.model.upsert import CompactionConfig, NullKeyPolicy, UpsertConfig

#: Where users find what is meant.
DOCUMENT = "docs/upsert.md"
HISTORY_MIN_MS = 1_000
HISTORY_MAX_MS = 24 * 3_600_000
#: Pinot's task that lets go of replaced rows, and its keys.
COMPACTION_TASK = "UpsertCompactionTask"
_PERCENT, _COUNT, _BUFFER = "invalidRecordsThresholdPercent", "invalidRecordsThresholdCount", "bufferTimePeriod"
#: Where a schema says it, in `Schema.extra`.
SEMANTIC = "updateSemantic"

_TRUE = (True, "true", "TRUE", "True")
_NUMERIC = (DataType.INT, DataType.LONG, DataType.FLOAT, DataType.DOUBLE, DataType.TIMESTAMP)
#: The order of BIG_DECIMAL is not that of its stored texts; JSON has none.
_UNORDERED = (DataType.BIG_DECIMAL, DataType.JSON)
_DELETE_TYPES = (*_NUMERIC[:4], DataType.BOOLEAN, DataType.STRING)


def parse_semantic(value: Any, where: str) -> bool | None:
    """`updateSemantic`: whether rows of a key supersede each other; None if nothing is said. Raises InvalidConfig."""
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in ("append", "upsert"):
        return value.lower() == "upsert"
    raise InvalidConfig(f"{where}: expected append or upsert, found {value!r}")


def parse_upsert(document: dict[str, Any], time_column: str, cremant: CremantConfig) -> UpsertConfig | None:
    """Of a table config; None for an append table. Raises InvalidConfig."""
    section, semantic = document.get("upsertConfig"), parse_semantic(document.get(SEMANTIC), f"/{SEMANTIC}")
    if section is not None and not isinstance(section, dict):
        raise InvalidConfig(f"table config: /upsertConfig must be an object, found {type(section).__name__}")
    mode = "NONE" if section is None else str(section.get("mode") or "FULL").upper()
    if mode == "PARTIAL":
        raise InvalidConfig(
            "/upsertConfig/mode: PARTIAL (rows that carry some columns only) is not supported by this version",
            hint=f"send whole rows and use FULL; {DOCUMENT}, 'Partial upsert'",
        )
    if mode not in ("FULL", "NONE"):
        raise InvalidConfig(f"/upsertConfig/mode: expected FULL or NONE, found {section and section.get('mode')!r}")
    if section is not None and semantic is not None and semantic != (mode == "FULL"):
        raise InvalidConfig(
            f"/{SEMANTIC} is {document[SEMANTIC]!r}, but /upsertConfig/mode is {mode}",
            hint="say it once, or say the same twice",
        )
    if mode == "NONE" and not semantic:
        if cremant.upsert != UpsertTuning():
            raise InvalidConfig(
                "cremant.upsert is set, but this is no upsert table", hint='add "upsertConfig": {"mode": "FULL"}'
            )
        return None
    return _upsert(section or {}, time_column, cremant, parse_compaction(document))


def parse_compaction(document: dict[str, Any]) -> CompactionConfig | None:
    """Of a table config's `task`, Pinot's UpsertCompactionTask; None without one. Other keys of it say when and where
    Pinot runs the task, and have no effect. Raises InvalidConfig."""
    where = f"/task/taskTypeConfigsMap/{COMPACTION_TASK}"
    task = document.get("task")
    tasks = task.get("taskTypeConfigsMap") if isinstance(task, dict) else None
    section = tasks.get(COMPACTION_TASK) if isinstance(tasks, dict) else None
    if section is None:
        return None
    if not isinstance(section, dict):
        raise InvalidConfig(f"{where}: expected an object, found {type(section).__name__}")
    percent, count = section.get(_PERCENT), section.get(_COUNT)
    if percent is None and count is None:
        raise InvalidConfig(
            f"{where}: says of no segment that it is to be compacted", hint=f"set {_PERCENT} or {_COUNT}, or both"
        )
    found = CompactionConfig()
    if percent is not None:
        found = msgspec.structs.replace(found, percent=_number(percent, f"{where}/{_PERCENT}", 0, 100))
    if count is not None:
        whole = _number(count, f"{where}/{_COUNT}", 1, 2**62)
        if whole != int(whole):
            raise InvalidConfig(f"{where}/{_COUNT}: expected a whole number of rows, found {count!r}")
        found = msgspec.structs.replace(found, count=int(whole))
    if (buffer := section.get(_BUFFER)) is not None:
        found = msgspec.structs.replace(found, buffer_ms=parse_period_ms(buffer, f"{where}/{_BUFFER}"))
    return found


def _number(value: Any, where: str, least: int, most: int) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not least <= number <= most:
        limits = f"{least} to {most}" if most < 2**62 else f"{least} or more"
        raise InvalidConfig(f"{where}: expected a number of {limits}, found {value!r}")
    return number


def _upsert(
    section: dict[str, Any], time_column: str, cremant: CremantConfig, compaction: CompactionConfig | None
) -> UpsertConfig:
    _refuse_unsupported(section)
    comparison = _columns(section, "comparisonColumns") or _columns(section, "comparisonColumn") or (time_column,)
    if len(set(comparison)) != len(comparison):
        raise InvalidConfig(f"/upsertConfig/comparisonColumns: a column is named twice: {', '.join(comparison)}")
    delete_column = section.get("deleteRecordColumn") or None
    if delete_column is not None and not isinstance(delete_column, str):
        raise InvalidConfig(f"/upsertConfig/deleteRecordColumn: expected the name of a column, found {delete_column!r}")
    deleted_ttl = _ttl(section, "deletedKeysTTL")
    if deleted_ttl is not None and delete_column is None:
        raise InvalidConfig(
            "/upsertConfig/deletedKeysTTL: says when deleted keys are forgotten, but no key can be deleted",
            hint="set upsertConfig.deleteRecordColumn too",
        )
    tuning = cremant.upsert
    if not HISTORY_MIN_MS <= tuning.history_ms <= HISTORY_MAX_MS:
        raise InvalidConfig(
            f"cremant.upsert.historyMs: expected {HISTORY_MIN_MS} to {HISTORY_MAX_MS} ms, found {tuning.history_ms}"
        )
    return UpsertConfig(
        comparison_columns=comparison,
        delete_column=delete_column,
        null_key=tuning.null_key,
        ttl=_ttl(section, "metadataTTL"),
        deleted_ttl=deleted_ttl,
        history_ms=tuning.history_ms,
        compaction=compaction,
    )


def _refuse_unsupported(section: dict[str, Any]) -> None:
    """What would change answers, and values that Pinot refuses too. Raises InvalidConfig."""
    if section.get("partialUpsertStrategies") or section.get("partialUpsertMergerClass"):
        raise InvalidConfig(
            "/upsertConfig: partialUpsertStrategies and partialUpsertMergerClass are of mode PARTIAL",
            hint=f"remove them: mode FULL replaces whole rows; {DOCUMENT}, 'Partial upsert'",
        )
    if section.get("postPartialUpsertTransformConfigs"):
        raise InvalidConfig(
            "/upsertConfig/postPartialUpsertTransformConfigs: is of mode PARTIAL",
            hint="derive columns by ingestionConfig.transformConfigs",
        )
    if section.get("outOfOrderRecordColumn"):
        raise InvalidConfig(
            "/upsertConfig/outOfOrderRecordColumn: is not supported by this version",
            hint="remove it; with SET skipUpsert = true a row that never won has equal $validFrom and $validUntil",
        )
    for key, choices in UPSERT_CHOICES.items():
        value = section.get(key)
        if value is not None and str(value).upper() not in choices:
            raise InvalidConfig(f"/upsertConfig/{key}: expected one of {', '.join(choices)}, found {value!r}")


def _columns(section: dict[str, Any], key: str) -> tuple[str, ...]:
    value = section.get(key)
    columns = [value] if isinstance(value, str) and value else value or []
    if not isinstance(columns, list) or not all(isinstance(column, str) and column for column in columns):
        raise InvalidConfig(f"/upsertConfig/{key}: expected names of columns, found {value!r}")
    return tuple(columns)


def _ttl(section: dict[str, Any], key: str) -> float | None:
    """In units of the comparison column; 0, as in Pinot, is none."""
    value = section.get(key)
    try:
        ttl = float(value) if value is not None and not isinstance(value, bool) else 0.0
    except (TypeError, ValueError):
        ttl = -1.0
    if isinstance(value, bool) or not 0 <= ttl < float("inf"):
        raise InvalidConfig(f"/upsertConfig/{key}: expected 0 (off) or a positive number, found {value!r}")
    return ttl or None


def completed_by(schema: Schema, config: TableConfig) -> TableConfig:
    """The config with what its schema adds: an upsert table if only the schema says so, the TTL of its keys, and
    offsets for a column `KafkaOffset`. Raises InvalidConfig where the two contradict."""
    config = _with_semantic_of(schema, config)
    return config if config.upsert is None else _with_offsets(schema, _with_retention(schema, config, config.upsert))


def _with_retention(schema: Schema, config: TableConfig, upsert: UpsertConfig) -> TableConfig:
    """Keys live as long as the table's rows, unless `metadataTTL` says how long (0: as long as their segments)."""
    section, field = config.raw_json.get("upsertConfig") or {}, schema.field(config.time_column)
    if (
        config.retention_ms is None
        or section.get("metadataTTL") is not None
        or upsert.comparison_columns != (config.time_column,)
        or field is None
        or field.data_type not in _NUMERIC
        or field.format is None
        or parse_time_format(field.format, field.name).pattern is not None
    ):
        return config
    kept = msgspec.structs.replace(upsert, retained_ms=config.retention_ms)
    return msgspec.structs.replace(config, upsert=kept)


def _with_offsets(schema: Schema, config: TableConfig) -> TableConfig:
    field = schema.field(KAFKA_OFFSET)
    filled = any(transform.column == KAFKA_OFFSET for transform in config.transforms)
    if field is None or field.data_type is not DataType.LONG or filled:
        return config
    stream, offset = config.stream, TransformConfig(column=KAFKA_OFFSET, function='"__metadata$offset"')
    properties = stream.properties | {f"stream.{stream.stream_type}.metadata.populate": "true"}
    stream = msgspec.structs.replace(stream, properties=properties)
    return msgspec.structs.replace(config, stream=stream, transforms=(*config.transforms, offset))


def _with_semantic_of(schema: Schema, config: TableConfig) -> TableConfig:
    semantic = parse_semantic(schema.extra.get(SEMANTIC), f"schema {schema.name}: /{SEMANTIC}")
    if semantic is None or semantic == (config.upsert is not None):
        return config
    if not semantic:
        raise InvalidConfig(
            f"schema {schema.name}: /{SEMANTIC} is append, but the table config makes {config.name} an upsert table",
            hint=f"change the schema's {SEMANTIC} to upsert, or remove the table's upsertConfig",
        )
    document = config.raw_json
    if document.get(SEMANTIC) is not None or document.get("upsertConfig") is not None:
        raise InvalidConfig(
            f"schema {schema.name}: /{SEMANTIC} is upsert, but the table config says that {config.name} is an append "
            "table",
            hint=f"remove {SEMANTIC} and upsertConfig of the table config, or change the schema's {SEMANTIC}",
        )
    document = {**document, SEMANTIC: "upsert"}
    upsert = parse_upsert(document, config.time_column, config.cremant)
    return msgspec.structs.replace(config, upsert=upsert, raw_json=document)


def validate_upsert(config: TableConfig, schema: Schema) -> None:
    """Names everything at once that an upsert table needs and this one lacks. Raises InvalidConfig."""
    semantic = parse_semantic(schema.extra.get(SEMANTIC), f"schema {schema.name}: /{SEMANTIC}")
    if config.upsert is None:
        if semantic:
            raise InvalidConfig(
                f"schema {schema.name}: /{SEMANTIC} is upsert, but {config.name} is an append table",
                hint='change the table config first: "upsertConfig": {"mode": "FULL"}',
            )
        if parse_compaction(config.raw_json) is not None:
            raise InvalidConfig(
                f"table {config.name}: task {COMPACTION_TASK} is of upsert tables, this is an append table",
                hint='remove it, or add "upsertConfig": {"mode": "FULL"}',
            )
        return
    problems = [] if semantic is not False else [f"the schema's {SEMANTIC} is append"]
    problems += _key_problems(schema) + _column_problems(config.upsert, schema)
    if config.upsert.null_key is NullKeyPolicy.APPEND and not _stores_nulls(config, schema):
        # Which rows have a null key must be seen in the stored rows: the keys are rebuilt from them.
        problems.append(
            "cremant.upsert.nullKey append needs stored nulls (tableIndexConfig.nullHandlingEnabled true, or "
            "enableColumnBasedNullHandling in the schema)"
        )
    if problems:
        listed = "; ".join(problems)
        raise InvalidConfig(
            f"table {config.name}: an upsert table needs more than its config and schema say: {listed}", hint=DOCUMENT
        )


def _stores_nulls(config: TableConfig, schema: Schema) -> bool:
    return config.null_handling or schema.enable_column_based_null_handling


def _key_problems(schema: Schema) -> list[str]:
    if not schema.primary_key_columns:
        return ["the schema names no primary key (primaryKeyColumns)"]
    problems = []
    for column in schema.primary_key_columns:
        spec = schema.field(column)
        if spec is None:
            problems.append(f"primary key column {column} is not in the schema")
        elif not spec.single_value:
            problems.append(f"primary key column {column} must be single-value")
        elif spec.data_type is DataType.JSON:
            problems.append(f"primary key column {column} is JSON, of which equal values have several texts")
    if len(set(schema.primary_key_columns)) != len(schema.primary_key_columns):
        problems.append(f"primaryKeyColumns names a column twice: {', '.join(schema.primary_key_columns)}")
    return problems


def _column_problems(upsert: UpsertConfig, schema: Schema) -> list[str]:
    problems = []
    for column in upsert.comparison_columns:
        spec = schema.field(column)
        if spec is None:
            problems.append(f"comparison column {column} is not in the schema")
        elif not spec.single_value:
            problems.append(f"comparison column {column} must be single-value")
        elif spec.data_type in _UNORDERED:
            problems.append(f"comparison column {column} is {spec.data_type}, which rows cannot be ordered by")
    if upsert.ttl is not None or upsert.deleted_ttl is not None:
        first = schema.field(upsert.comparison_columns[0])
        if len(upsert.comparison_columns) > 1:
            problems.append("metadataTTL and deletedKeysTTL need exactly one comparison column")
        elif first is not None and first.data_type not in _NUMERIC:
            problems.append(
                f"metadataTTL and deletedKeysTTL need a numeric comparison column, {first.name} is {first.data_type}"
            )
    if upsert.delete_column is not None:
        spec = schema.field(upsert.delete_column)
        if spec is None:
            problems.append(f"deleteRecordColumn {upsert.delete_column} is not in the schema")
        elif not spec.single_value:
            problems.append(f"deleteRecordColumn {upsert.delete_column} must be single-value")
        elif spec.data_type not in _DELETE_TYPES:
            problems.append(
                f"deleteRecordColumn {upsert.delete_column} must be BOOLEAN, STRING or a number, not {spec.data_type}"
            )
        if upsert.delete_column in schema.primary_key_columns:
            problems.append(f"deleteRecordColumn {upsert.delete_column} cannot be part of the primary key")
    return problems


def check_upsert_change(old: TableConfig, old_schema: Schema, new: TableConfig, new_schema: Schema) -> None:
    """What may change of a live table: TTLs, null keys, history, compaction; what decided which rows are in force may
    not. Raises Conflict."""
    if old.upsert is None:
        return  # keys may be given to a table of any rows: the pipeline looks at all of them first
    if new.upsert is None:
        raise Conflict(
            f"table {old.name}: upsert cannot change to append while the table exists",
            hint="create another table on the same topic, or drop this one first",
        )
    fixed = (
        ("primary key", old_schema.primary_key_columns, new_schema.primary_key_columns),
        ("comparison columns", old.upsert.comparison_columns, new.upsert.comparison_columns),
        ("deleteRecordColumn", (old.upsert.delete_column or "none",), (new.upsert.delete_column or "none",)),
    )
    for what, before_columns, after_columns in fixed:
        if before_columns != after_columns:
            raise Conflict(
                f"table {old.name}: {what} cannot change from {', '.join(before_columns) or 'none'} to "
                f"{', '.join(after_columns) or 'none'} while the table exists: rows are in force by it",
                hint="create another table on the same topic, or drop this one first",
            )
    if _stores_nulls(old, old_schema) and not _stores_nulls(new, new_schema):
        raise Conflict(
            f"table {old.name}: null handling cannot be turned off while the table exists: nulls compare as less than "
            "every value, and would become defaults, so other rows would be in force",
            hint="create another table on the same topic, or drop this one first",
        )
