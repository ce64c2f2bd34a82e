# SPDX-License-Identifier: Apache-2.0
"""Schema: columns, their Pinot types, their default values for missing cells.

The stored (Arrow) form of each type is fixed here and nowhere else:

    INT int32 · LONG int64 · FLOAT float32 · DOUBLE float64 · BIG_DECIMAL utf8 (decimals.py) · BOOLEAN bool
    TIMESTAMP int64 (epoch ms; formatted only in answers) · STRING, JSON utf8 · BYTES binary
    multi-value = list of the same (dimensions only)

Missing cells are stored as the default value (Pinot's rule). A table with null handling on additionally stores a
boolean column `$isNull.<column>`, so that nothing is lost.
"""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgspec
import pyarrow as pa

from cremant.model.decimals import stored_decimal
from cremant.model.errors import InvalidConfig
from cremant.model.names import check_table_name


class DataType(StrEnum):
    INT = "INT"
    LONG = "LONG"
    FLOAT = "FLOAT"
    DOUBLE = "DOUBLE"
    BIG_DECIMAL = "BIG_DECIMAL"
    BOOLEAN = "BOOLEAN"
    TIMESTAMP = "TIMESTAMP"
    STRING = "STRING"
    JSON = "JSON"
    BYTES = "BYTES"


class FieldType(StrEnum):
    DIMENSION = "DIMENSION"
    METRIC = "METRIC"
    DATE_TIME = "DATE_TIME"


ARROW_TYPES: dict[DataType, pa.DataType] = {
    DataType.INT: pa.int32(),
    DataType.LONG: pa.int64(),
    DataType.FLOAT: pa.float32(),
    DataType.DOUBLE: pa.float64(),
    DataType.BIG_DECIMAL: pa.string(),
    DataType.BOOLEAN: pa.bool_(),
    DataType.TIMESTAMP: pa.int64(),
    DataType.STRING: pa.string(),
    DataType.JSON: pa.string(),
    DataType.BYTES: pa.binary(),
}

METRIC_TYPES = frozenset(
    {DataType.INT, DataType.LONG, DataType.FLOAT, DataType.DOUBLE, DataType.BIG_DECIMAL, DataType.BYTES}
)

_DIMENSION_DEFAULTS: dict[DataType, Any] = {
    DataType.INT: -(2**31),
    DataType.LONG: -(2**63),
    DataType.FLOAT: float("-inf"),
    DataType.DOUBLE: float("-inf"),
    DataType.BIG_DECIMAL: "0",
    DataType.BOOLEAN: False,
    DataType.TIMESTAMP: 0,
    DataType.STRING: "null",
    DataType.JSON: "null",
    DataType.BYTES: b"",
}
_METRIC_DEFAULTS: dict[DataType, Any] = {
    DataType.INT: 0,
    DataType.LONG: 0,
    DataType.FLOAT: 0.0,
    DataType.DOUBLE: 0.0,
    DataType.BIG_DECIMAL: "0",
    DataType.BYTES: b"",
}


class FieldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One column. `default` is the stored value of a missing cell (of one element, for multi-value columns)."""

    name: str
    data_type: DataType
    field_type: FieldType
    single_value: bool = True
    not_null: bool = False
    #: As the user wrote it (JSON value), or None for Pinot's default.
    default_null_value: Any = None
    max_length: int | None = None
    #: Date-time columns only, in the user's spelling.
    format: str | None = None
    granularity: str | None = None
    #: Keys we keep and echo but do not interpret.
    extra: dict[str, Any] = {}

    @property
    def arrow_type(self) -> pa.DataType:
        base = ARROW_TYPES[self.data_type]
        return base if self.single_value else pa.list_(pa.field("item", base, nullable=False))

    @property
    def default(self) -> Any:
        if self.default_null_value is not None:
            return parse_default(self, self.default_null_value)
        table = _METRIC_DEFAULTS if self.field_type is FieldType.METRIC else _DIMENSION_DEFAULTS
        return table[self.data_type]


def parse_default(field: FieldSpec, value: Any) -> Any:
    """The stored form of a user's `defaultNullValue` (Pinot allows a string for every type)."""
    try:
        match field.data_type:
            case DataType.INT | DataType.LONG | DataType.TIMESTAMP:
                return int(value)
            case DataType.FLOAT | DataType.DOUBLE:
                return float(value)
            case DataType.BIG_DECIMAL:
                return stored_decimal(Decimal(str(value)))
            case DataType.BOOLEAN:
                return value is True or str(value).lower() in ("true", "1")
            case DataType.BYTES:
                return bytes.fromhex(str(value))
            case DataType.STRING | DataType.JSON:
                return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except (ValueError, ArithmeticError) as error:
        raise InvalidConfig(
            f"column {field.name}: defaultNullValue {value!r} is not a value of type {field.data_type}"
        ) from error


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table, in the order the user wrote them."""

    name: str
    fields: tuple[FieldSpec, ...]
    primary_key_columns: tuple[str, ...] = ()
    enable_column_based_null_handling: bool = False
    extra: dict[str, Any] = {}

    def field(self, name: str) -> FieldSpec | None:
        for spec in self.fields:
            if spec.name == name:
                return spec
        return None

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.fields)

    def arrow_schema(self) -> pa.Schema:
        """The stored form of the user's columns (no `$` columns)."""
        return pa.schema([pa.field(spec.name, spec.arrow_type, nullable=False) for spec in self.fields])

    def validate(self) -> None:
        """Raises InvalidConfig with what is wrong. Called once, when a schema enters the system."""
        check_table_name(self.name)
        seen: set[str] = set()
        if not self.fields:
            raise InvalidConfig(f"schema {self.name} has no columns", hint="add at least one dimension field spec")
        for spec in self.fields:
            if spec.name in seen:
                raise InvalidConfig(f"schema {self.name}: column {spec.name!r} is declared twice")
            seen.add(spec.name)
            if not spec.name or spec.name.startswith("$"):
                raise InvalidConfig(
                    f"schema {self.name}: column name {spec.name!r} is not allowed",
                    hint="names that begin with '$' are virtual columns",
                )
            if spec.field_type is FieldType.METRIC and spec.data_type not in METRIC_TYPES:
                raise InvalidConfig(
                    f"schema {self.name}: metric column {spec.name} cannot be of type {spec.data_type}",
                    hint="metrics are numeric or BYTES; make it a dimension",
                )
            if not spec.single_value and spec.field_type is not FieldType.DIMENSION:
                raise InvalidConfig(f"schema {self.name}: only dimensions can be multi-value, not {spec.name}")
            if spec.field_type is FieldType.DATE_TIME and not (spec.format and spec.granularity):
                raise InvalidConfig(f"schema {self.name}: date-time column {spec.name} needs format and granularity")
            _ = spec.default
        for key in self.primary_key_columns:
            spec_of_key = self.field(key)
            if spec_of_key is None:
                raise InvalidConfig(f"schema {self.name}: primary key column {key!r} is not in the schema")
            if not spec_of_key.single_value:
                raise InvalidConfig(f"schema {self.name}: primary key column {key} must be single-value")
