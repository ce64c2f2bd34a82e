# SPDX-License-Identifier: Apache-2.0
"""Pinot's schema JSON, read and written. Unknown keys are kept and listed; what cannot be stored is refused.

Differences from Pinot: a legacy `timeFieldSpec` is read as the date-time column that it means, and answered as such.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cremant.model.errors import InvalidConfig
from cremant.model.names import VALID_FROM, VALID_UNTIL
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.timeformat import check_granularity, parse_time_format

_LISTS = {
    "dimensionFieldSpecs": FieldType.DIMENSION,
    "metricFieldSpecs": FieldType.METRIC,
    "dateTimeFieldSpecs": FieldType.DATE_TIME,
}
_SCHEMA_EXTRA = ("description", "tags", "updateSemantic")
_SCHEMA_KEYS = frozenset(
    (*_LISTS, *_SCHEMA_EXTRA, "schemaName", "enableColumnBasedNullHandling", "primaryKeyColumns", "primaryKey",
     "timeFieldSpec", "complexFieldSpecs")
)  # fmt: skip
_FIELD_EXTRA = (
    "maxLengthExceedStrategy", "allowTrailingZeros", "transformFunction", "virtualColumnProvider", "sampleValue",
    "description", "tags",
)  # fmt: skip
_FIELD_KEYS = frozenset(
    (*_FIELD_EXTRA, "name", "dataType", "fieldType", "singleValueField", "notNull", "defaultNullValue", "maxLength")
)
_DATE_TIME_KEYS = _FIELD_KEYS | {"format", "granularity"}
_UNSUPPORTED_TYPES = frozenset(("MAP", "STRUCT", "LIST", "UUID", "OPEN_STRUCT", "UNKNOWN"))
_STRATEGIES = ("TRIM_LENGTH", "SUBSTITUTE_DEFAULT_VALUE", "FAIL_INGESTION", "ERROR", "NO_ACTION")
#: Every upsert table has these. A schema may declare them, as the key-coordinator design has it: nothing changes.
_DECLARED_IN_VAIN = frozenset((VALID_FROM.lower(), VALID_UNTIL.lower()))
_JSON_NAMES = {dict: "Object", list: "Array", str: "String", bool: "Boolean", int: "Integer", float: "Number"}


class _Bad(Exception):
    """Something is wrong at a JSON pointer."""

    def __init__(self, reason: str, pointer: str) -> None:
        super().__init__(f"{reason} (at {pointer or '/'})")


def parse_schema(document: Any) -> tuple[Schema, dict[str, Any]]:
    """The schema, validated, and the keys Pinot does not know by JSON pointer. Raises InvalidConfig naming where."""
    unrecognized: dict[str, Any] = {}
    try:
        schema = _schema(document, unrecognized)
    except _Bad as bad:
        raise InvalidConfig(f"Invalid schema config json string: {_short(document)}. Reason: {bad}") from bad
    schema.validate()
    return schema, unrecognized


def _schema(document: Any, unrecognized: dict[str, Any]) -> Schema:
    _expect(document, dict, "")
    name = _required(document, "schemaName", str, "")
    for key in document.keys() - _SCHEMA_KEYS:
        unrecognized[f"/{_escape(key)}"] = document[key]
    if document.get("complexFieldSpecs"):
        raise _Bad("complexFieldSpecs (MAP, STRUCT, LIST) are not supported by this version", "/complexFieldSpecs")
    fields: list[FieldSpec] = []
    for key, kind in _LISTS.items():
        for at, spec in enumerate(_optional(document, key, list, "", [])):
            field = _field(spec, kind, f"/{key}/{at}", unrecognized)
            if field.name.lower() not in _DECLARED_IN_VAIN:
                fields.append(field)
            elif field.data_type is not DataType.LONG or not field.single_value:
                raise _Bad(f"virtual column {field.name} is a single LONG", f"/{key}/{at}")
    if document.get("timeFieldSpec"):
        fields.append(_time_field(document["timeFieldSpec"], "/timeFieldSpec"))
    keys = _primary_key(document)
    semantic = _optional(document, "updateSemantic", str, "", None)
    if semantic is not None and semantic.lower() not in ("append", "upsert"):
        raise _Bad(f"expected append or upsert, found {semantic!r}", "/updateSemantic")
    if semantic is not None and semantic.lower() == "upsert" and not keys:
        raise _Bad("an upsert table needs a primary key: Missing required property 'primaryKeyColumns'", "")
    return Schema(
        name=name,
        fields=tuple(fields),
        primary_key_columns=keys,
        enable_column_based_null_handling=_optional(document, "enableColumnBasedNullHandling", bool, "", False),
        extra={key: document[key] for key in _SCHEMA_EXTRA if document.get(key) is not None},
    )


def _primary_key(document: dict[str, Any]) -> tuple[str, ...]:
    """`primaryKeyColumns`, or the same as `primaryKey`: one name or a list."""
    keys = _optional(document, "primaryKeyColumns", list, "", [])
    other = document.get("primaryKey")
    others = [other] if isinstance(other, str) and other else _optional(document, "primaryKey", list, "", [])
    for name, columns in (("primaryKeyColumns", keys), ("primaryKey", others)):
        for at, column in enumerate(columns):
            _expect(column, str, f"/{name}/{at}")
    if keys and others and keys != others:
        raise _Bad(f"primaryKey and primaryKeyColumns differ: {others} and {keys}; say it once", "/primaryKey")
    return tuple(keys or others)


def _field(spec: Any, kind: FieldType, pointer: str, unrecognized: dict[str, Any]) -> FieldSpec:
    _expect(spec, dict, pointer)
    for key in spec.keys() - (_DATE_TIME_KEYS if kind is FieldType.DATE_TIME else _FIELD_KEYS):
        unrecognized[f"{pointer}/{_escape(key)}"] = spec[key]
    max_length = _optional(spec, "maxLength", int, pointer, None)
    if max_length is not None and max_length <= 0:
        raise _Bad(f"maxLength must be positive, found {max_length}", f"{pointer}/maxLength")
    strategy = spec.get("maxLengthExceedStrategy")
    if strategy is not None and strategy not in _STRATEGIES:
        raise _Bad(
            f"{strategy!r} is not one of the values accepted: {list(_STRATEGIES)}", f"{pointer}/maxLengthExceedStrategy"
        )
    time_format = granularity = None
    if kind is FieldType.DATE_TIME:
        time_format = _required(spec, "format", str, pointer)
        granularity = _required(spec, "granularity", str, pointer)
        parse_time_format(time_format, f"{pointer}/format")
        check_granularity(granularity, f"{pointer}/granularity")
    return FieldSpec(
        name=_required(spec, "name", str, pointer),
        data_type=_data_type(spec, pointer),
        field_type=kind,
        single_value=_optional(spec, "singleValueField", bool, pointer, True),
        not_null=_optional(spec, "notNull", bool, pointer, False),
        default_null_value=spec.get("defaultNullValue"),
        max_length=max_length,
        format=time_format,
        granularity=granularity,
        extra={key: spec[key] for key in _FIELD_EXTRA if spec.get(key) is not None},
    )


def _data_type(spec: dict[str, Any], pointer: str) -> DataType:
    text = _required(spec, "dataType", str, pointer)
    if text in DataType.__members__:
        return DataType(text)
    if text in _UNSUPPORTED_TYPES:
        raise _Bad(f"data type {text} is not supported by this version", f"{pointer}/dataType")
    raise _Bad(
        f'Cannot deserialize value of type DataType from String "{text}": not one of the values accepted: '
        f"[{', '.join(DataType)}]",
        f"{pointer}/dataType",
    )


def _time_field(spec: Any, pointer: str) -> FieldSpec:
    """A legacy time column; one whose incoming and outgoing form differ needs a transform today."""
    _expect(spec, dict, pointer)
    incoming = _required(spec, "incomingGranularitySpec", dict, pointer)
    outgoing = _optional(spec, "outgoingGranularitySpec", dict, pointer, incoming)
    if _granularity(incoming, pointer) != _granularity(outgoing, pointer):
        raise _Bad(
            "incomingGranularitySpec and outgoingGranularitySpec differ; use dateTimeFieldSpecs and transformConfigs",
            pointer,
        )
    name, data_type, size, unit, time_format = _granularity(incoming, f"{pointer}/incomingGranularitySpec")
    written = f"{size}:{unit}:{time_format}"
    parse_time_format(written, pointer)
    return FieldSpec(
        name=name,
        data_type=data_type,
        field_type=FieldType.DATE_TIME,
        default_null_value=spec.get("defaultNullValue"),
        format=written,
        granularity=f"{size}:{unit}",
    )


def _granularity(spec: dict[str, Any], pointer: str) -> tuple[str, DataType, int, str, str]:
    size = spec.get("timeUnitSize", spec.get("timeunitSize", 1))
    _expect(size, int, f"{pointer}/timeUnitSize")
    return (
        _required(spec, "name", str, pointer),
        _data_type(spec, pointer),
        size,
        _required(spec, "timeType", str, pointer),
        _optional(spec, "timeFormat", str, pointer, "EPOCH"),
    )


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """As Pinot answers it: `fieldType` included, defaults left out, order of columns kept."""
    document: dict[str, Any] = {"schemaName": schema.name, **schema.extra}
    document["enableColumnBasedNullHandling"] = schema.enable_column_based_null_handling
    for key, kind in _LISTS.items():
        specs = [_field_to_json(spec) for spec in schema.fields if spec.field_type is kind]
        if specs:
            document[key] = specs
    if schema.primary_key_columns:
        document["primaryKeyColumns"] = list(schema.primary_key_columns)
    return document


def _field_to_json(spec: FieldSpec) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": spec.name,
        "dataType": spec.data_type.value,
        "fieldType": spec.field_type.value,
    }
    if not spec.single_value:
        document["singleValueField"] = False
    if spec.not_null:
        document["notNull"] = True
    if spec.default_null_value is not None and spec.default != _without_default(spec).default:
        document["defaultNullValue"] = spec.default_null_value
    if spec.max_length is not None:
        document["maxLength"] = spec.max_length
    if spec.format is not None:
        document["format"] = spec.format
        document["granularity"] = spec.granularity
    return document | spec.extra


def _without_default(spec: FieldSpec) -> FieldSpec:
    return FieldSpec(name=spec.name, data_type=spec.data_type, field_type=spec.field_type)


def check_compatible(old: Schema, new: Schema, *, force: bool = False) -> None:
    """A schema may gain columns; raises InvalidConfig if one is removed or changes its type (unless `force`)."""
    if force:
        return
    problems = []
    for spec in old.fields:
        other = new.field(spec.name)
        if other is None:
            problems.append(f"column {spec.name} is missing")
        elif _shape(other) != _shape(spec):
            problems.append(f"column {spec.name} was {_shape(spec)} and would become {_shape(other)}")
    if problems:
        raise InvalidConfig(
            f"New schema: {new.name} is not backward-compatible with the existing schema: {'; '.join(problems)}",
            hint="columns may be added, not removed or changed; force=true overrides",
        )


def _shape(spec: FieldSpec) -> str:
    return f"{'' if spec.single_value else 'multi-value '}{spec.field_type} {spec.data_type}"


def _required(document: dict[str, Any], key: str, kind: type, pointer: str) -> Any:
    if document.get(key) is None:
        raise _Bad(f"Missing required property '{key}'", pointer)
    _expect(document[key], kind, f"{pointer}/{key}")
    return document[key]


def _optional(document: dict[str, Any], key: str, kind: type, pointer: str, default: Any) -> Any:
    if document.get(key) is None:
        return default
    _expect(document[key], kind, f"{pointer}/{key}")
    return document[key]


def _expect(value: Any, kind: type, pointer: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "null" if value is None else _JSON_NAMES.get(type(value), type(value).__name__)
        raise _Bad(f"Cannot deserialize value of type {_JSON_NAMES[kind]} from {found} {_short(value, 80)}", pointer)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _short(value: Any, limit: int = 2000) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= limit else f"{text[:limit]}…"
