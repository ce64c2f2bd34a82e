# SPDX-License-Identifier: Apache-2.0
"""Pinot's query error codes (Pinot: QueryErrorCode). Clients compare the numbers."""

from __future__ import annotations

from enum import IntEnum


class QueryCode(IntEnum):
    JSON_PARSING = 100
    SQL_PARSING = 150
    SQL_RUNTIME = 160
    TABLE_DOES_NOT_EXIST = 190
    TABLE_IS_DISABLED = 191
    QUERY_EXECUTION = 200
    SERVER_SHUTTING_DOWN = 210
    SERVER_OUT_OF_CAPACITY = 211
    SERVER_TABLE_MISSING = 230
    SERVER_SEGMENT_MISSING = 235
    QUERY_SCHEDULING_TIMEOUT = 240
    SERVER_RESOURCE_LIMIT = 245
    EXECUTION_TIMEOUT = 250
    BROKER_SEGMENT_UNAVAILABLE = 305
    BROKER_TIMEOUT = 400
    SERVER_NOT_RESPONDING = 427
    TOO_MANY_REQUESTS = 429
    INTERNAL = 450
    QUERY_CANCELLED = 503
    QUERY_VALIDATION = 700
    UNKNOWN_COLUMN = 710
    QUERY_PLANNING = 720
    UNKNOWN = 1000


#: HTTP status when the caller asks for it (`Pinot-Use-Http-Status-For-Errors: true`).
HTTP_STATUS: dict[int, int] = {
    100: 400, 150: 400, 160: 500, 190: 404, 191: 404, 200: 500, 210: 503, 211: 503, 230: 404, 235: 404, 240: 408,
    245: 503, 250: 408, 305: 503, 400: 408, 427: 503, 429: 429, 450: 500, 503: 503, 700: 400, 710: 400, 720: 400,
    1000: 500,
}  # fmt: skip
