# SPDX-License-Identifier: Apache-2.0
"""Why a stream record did not become a row. The words are stable: they are counted, logged and dead-lettered."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

#: Bytes of a rejected message kept as a sample.
SAMPLE_BYTES = 256


class Cause(StrEnum):
    #: No value at all (a tombstone) or zero bytes.
    EMPTY_MESSAGE = "emptyMessage"
    #: Larger than limits.MESSAGE_BYTES_MAX.
    TOO_LARGE = "tooLarge"
    MALFORMED_JSON = "malformedJson"
    #: Quotes that do not match, more than one record, not UTF-8.
    MALFORMED_CSV = "malformedCsv"
    #: A CSV record with more or fewer fields than the header names.
    WRONG_FIELD_COUNT = "wrongFieldCount"
    #: Bytes that are not a record of the Avro schema, or not in the registry's wire format.
    MALFORMED_AVRO = "malformedAvro"
    #: Written with a schema that the registry does not know, or that is not a record of Avro.
    UNKNOWN_SCHEMA = "unknownSchema"
    #: Nested deeper than limits.MESSAGE_DEPTH_MAX.
    TOO_DEEP = "tooDeep"
    NOT_AN_OBJECT = "notAnObject"
    #: A value that Pinot's rules do not convert to the column's type.
    WRONG_TYPE = "wrongType"
    #: A number that the column's type cannot hold.
    OUT_OF_RANGE = "outOfRange"
    #: Longer than the column's maxLength, whose strategy says to fail.
    TOO_LONG = "tooLong"
    #: A transform or filter function could not be computed from non-null arguments.
    TRANSFORM_FAILED = "transformFailed"
    #: Upsert tables that reject them: a primary key column has no value.
    NULL_KEY = "nullKey"


class BadValue(ValueError):
    """A value or message that is refused, and why."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


class Refusal(NamedTuple):
    """Message number `at` of a batch is not a row. (Not the exception: thousands of kept tracebacks are slow.)"""

    at: int
    cause: Cause
    detail: str


def shorten(value: object, limit: int = 80) -> str:
    """The beginning of a value's text, for details."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
