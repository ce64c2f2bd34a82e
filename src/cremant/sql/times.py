# SPDX-License-Identifier: Apache-2.0
"""Time functions: truncation, parts, units, `ago`. Times are epoch numbers; weeks start on Monday; UTC unless a zone
is given (IANA name). Units of fixed length are truncated with integer arithmetic, which is far cheaper than calendars.
"""

from __future__ import annotations

import re
from fractions import Fraction

from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType
from cremant.model.timepattern import zone_of
from cremant.sql.bound import FLOATS, INTEGERS, Bound, as_type, invalid, text_sql
from cremant.sql.scalar import SHORT_SQL_CHARS, Args, word

DAY_MS = 86_400_000
#: Milliseconds of units of fixed length (in UTC). Epoch day 0 was a Thursday, so weeks are shifted.
FIXED_MS = {
    "millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000, "day": DAY_MS, "week": 7 * DAY_MS,
}  # fmt: skip
WEEK_SHIFT_MS = 4 * DAY_MS
#: Calendars of the engine end in the years -262143 and 262142; beyond, its parts of a time are NULL.
CALENDAR_MS = (-8_334_600_000_000_000, 8_210_266_000_000_000)
#: Months of units of the calendar.
MONTHS = {"month": 1, "quarter": 3, "year": 12}

#: java.util.concurrent.TimeUnit, as far as epoch numbers are counted in it. Ratio to a millisecond.
TIME_UNITS: dict[str, tuple[int, int]] = {
    "NANOSECONDS": (1, 1_000_000), "MICROSECONDS": (1, 1000), "MILLISECONDS": (1, 1), "SECONDS": (1000, 1),
    "MINUTES": (60_000, 1), "HOURS": (3_600_000, 1), "DAYS": (DAY_MS, 1),
}  # fmt: skip

#: Pinot's function -> part of DataFusion's date_part.
PARTS = {
    "year": "year", "quarter": "quarter", "month": "month", "week": "week", "weekofyear": "week", "day": "day",
    "dayofmonth": "day", "dayofyear": "doy", "doy": "doy", "dayofweek": "isodow", "dow": "isodow", "hour": "hour",
    "minute": "minute", "second": "second", "millisecond": "millisecond", "yearofweek": "isoyear", "yow": "isoyear",
    "monthofyear": "month",
}  # fmt: skip


def time_zone(bound: Bound, what: str) -> str:
    """The name of a zone; UTC by any of its names is `UTC`."""
    name = word(bound, what)
    if name.upper() in ("UTC", "Z", "GMT", "ETC/UTC"):
        return "UTC"
    try:
        zone_of(name, what)
    except InvalidConfig as error:
        raise invalid(f"unknown time zone {name!r}", hint="use an IANA name such as Europe/Berlin") from error
    return name


def time_unit(bound: Bound) -> tuple[int, int]:
    name = word(bound, "time unit").upper()
    if name not in TIME_UNITS:
        raise invalid(f"unknown time unit {name!r}", hint=", ".join(TIME_UNITS))
    return TIME_UNITS[name]


def time_value(bound: Bound, function: str) -> str:
    """SQL of an epoch number."""
    if bound.type in FLOATS or bound.type is DataType.BIG_DECIMAL:
        if bound.multi:
            raise invalid(f"{function} on a multi-value column is not supported")
        return f"fn_to_long(CAST({bound.sql} AS DOUBLE))"
    if bound.type is None:
        return "CAST(NULL AS BIGINT)"
    if bound.multi or (bound.type not in INTEGERS and bound.literal is None):
        raise invalid(f"{function} takes a time as a number or TIMESTAMP, found {bound.type}")
    if bound.literal is None and bound.type is not DataType.INT:
        return bound.sql
    return as_type(bound, DataType.TIMESTAMP if bound.type is DataType.STRING else DataType.LONG)


def _floor(sql: str, unit: str) -> str:
    """The beginning of a unit in UTC. Short SQL is repeated: integer arithmetic is the cheapest way."""
    size_ms = FIXED_MS.get(unit)
    if size_ms == 1:
        return sql
    if size_ms is None or len(sql) > SHORT_SQL_CHARS:
        return f"fn_floor_{unit}({sql})"
    moved = f"({sql} - {WEEK_SHIFT_MS})" if unit == "week" else f"({sql})"
    return f"({sql} - (({moved} % {size_ms} + {size_ms}) % {size_ms}))"


def scale(sql: str, ratio: tuple[int, int]) -> str:
    """Multiplies by a ratio, cutting towards zero as java.util.concurrent.TimeUnit does."""
    up, down = ratio
    if up != 1:
        return f"({sql} * {up})"
    return sql if down == 1 else f"({sql} / {down})"


def _as_timestamp(milliseconds: str, zone: str) -> str:
    kind = "Timestamp(Millisecond, None)" if zone == "UTC" else f'Timestamp(Millisecond, Some("{zone}"))'
    return f"arrow_cast({milliseconds}, {text_sql(kind)})"


def _in_calendar(milliseconds: str) -> str:
    """Times before and after all calendars (the default of a LONG is one) are their first and last."""
    if len(milliseconds) > SHORT_SQL_CHARS:
        return f"fn_in_calendar({milliseconds})"
    first, last = CALENDAR_MS
    early, late = f"{milliseconds} < {first} THEN {first}", f"{milliseconds} > {last} THEN {last}"
    return f"CASE WHEN {early} WHEN {late} ELSE {milliseconds} END"


def unit_name(bound: Bound, function: str) -> str:
    """`DAY`, `day` or `days` as `day`."""
    name = word(bound, f"the unit of {function}").lower()
    unit = name if name in FIXED_MS or name in MONTHS else name.removesuffix("s")
    if unit not in FIXED_MS and unit not in MONTHS:
        raise invalid(f"{function}: unknown unit {name!r}", hint=", ".join((*FIXED_MS, *MONTHS)))
    return unit


def truncate(args: Args) -> Bound:
    """DATETRUNC(unit, t[, inUnit[, zone[, outUnit]]]): LONG in outUnit (default: inUnit, default: milliseconds)."""
    unit = unit_name(args[0], "DATETRUNC")
    incoming = time_unit(args[2]) if len(args) > 2 else (1, 1)
    zone = time_zone(args[3], "the zone of DATETRUNC") if len(args) > 3 else "UTC"
    outgoing = time_unit(args[4]) if len(args) > 4 else incoming
    milliseconds = scale(time_value(args[1], "DATETRUNC"), incoming)
    if zone == "UTC" or unit in ("millisecond", "second"):
        sql = _floor(milliseconds, unit)
    else:
        sql = f"fn_time_truncate('{unit}', {milliseconds}, {text_sql(zone)})"
    return Bound(scale(sql, (outgoing[1], outgoing[0])), DataType.LONG)


def part(name: str, args: Args) -> Bound:
    """YEAR(t[, zone]) and its like: INT."""
    zone = time_zone(args[1], f"the zone of {name.upper()}") if len(args) > 1 else "UTC"
    stamp = _as_timestamp(_in_calendar(time_value(args[0], name.upper())), zone)
    sql = f"date_part('{PARTS[name]}', {stamp})"
    return Bound(f"CAST({sql} % 1000 AS INT)" if name == "millisecond" else f"CAST({sql} AS INT)", DataType.INT)


def extract(args: Args) -> Bound:
    name = word(args[0], "the unit of EXTRACT").lower()
    if name not in PARTS:
        raise invalid(f"EXTRACT: unknown unit {name!r}", hint=", ".join(sorted(PARTS)))
    return part(name, args[1:])


def convert(args: Args) -> Bound:
    """TIMECONVERT(t, inUnit, outUnit)."""
    incoming, outgoing = time_unit(args[1]), time_unit(args[2])
    ratio = Fraction(*incoming) / Fraction(*outgoing)
    return Bound(scale(time_value(args[0], "TIMECONVERT"), ratio.as_integer_ratio()), DataType.LONG)


def floor_to_multiple(args: Args) -> Bound:
    """ROUND(t, bucket): Pinot's two-argument ROUND is for times."""
    bucket = args[1].literal
    if bucket is None or not isinstance(bucket.value, int) or isinstance(bucket.value, bool) or bucket.value <= 0:
        raise invalid("the second argument of ROUND must be a positive whole number", hint="ROUNDDECIMAL rounds digits")
    sql = time_value(args[0], "ROUND")
    return Bound(f"(({sql} / {bucket.value}) * {bucket.value})", DataType.LONG)


_PERIOD = re.compile(
    r"^([+-])?P(?:([+-]?\d+)D)?(?:T(?:([+-]?\d+)H)?(?:([+-]?\d+)M)?(?:([+-]?\d+(?:\.\d{1,9})?)S)?)?$", re.IGNORECASE
)


def period_ms(text: str) -> int:
    """Milliseconds of an ISO 8601 duration of days, hours, minutes, seconds (java.time.Duration)."""
    match = _PERIOD.match(text.strip())
    if match is None or not any(match.groups()[1:]):
        raise invalid(f"{text!r} is not a duration", hint="for example PT1H, P1D or P1DT12H")
    sign, days, hours, minutes, seconds = match.groups()
    total = int(days or 0) * DAY_MS + int(hours or 0) * 3_600_000 + int(minutes or 0) * 60_000
    total += round(float(seconds or 0) * 1000)
    return -total if sign == "-" else total
