# SPDX-License-Identifier: Apache-2.0
"""Time functions: truncation, parts, units, `ago`. Times are epoch numbers; weeks start on Monday; UTC unless a zone
is given (IANA name). Units of fixed length are truncated with integer arithmetic, which is far cheaper than calendars.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Sequence

from cremant.model.schema import DataType
from cremant.sql.bound import INTEGERS, Bound, as_type, invalid, text_sql

_DAY_MS = 86_400_000
#: Milliseconds of units of fixed length (in UTC). Epoch day 0 was a Thursday, so weeks are shifted.
_FIXED_MS = {
    "millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000, "day": _DAY_MS, "week": 7 * _DAY_MS,
}  # fmt: skip
_WEEK_SHIFT_MS = 4 * _DAY_MS
_CALENDAR = ("month", "quarter", "year")

#: java.util.concurrent.TimeUnit, as far as epoch numbers are counted in it. Ratio to a millisecond.
_TIME_UNITS: dict[str, tuple[int, int]] = {
    "NANOSECONDS": (1, 1_000_000), "MICROSECONDS": (1, 1000), "MILLISECONDS": (1, 1), "SECONDS": (1000, 1),
    "MINUTES": (60_000, 1), "HOURS": (3_600_000, 1), "DAYS": (_DAY_MS, 1),
}  # fmt: skip

#: Pinot's function -> part of DataFusion's date_part.
PARTS = {
    "year": "year", "quarter": "quarter", "month": "month", "week": "week", "weekofyear": "week", "day": "day",
    "dayofmonth": "day", "dayofyear": "doy", "doy": "doy", "dayofweek": "isodow", "dow": "isodow", "hour": "hour",
    "minute": "minute", "second": "second", "millisecond": "millisecond",
}  # fmt: skip


def _word(bound: Bound, what: str) -> str:
    if bound.literal is None or not isinstance(bound.literal.value, str):
        raise invalid(f"{what} must be a string literal")
    return bound.literal.value


def _zone(bound: Bound, what: str) -> str | None:
    name = _word(bound, what)
    if name.upper() in ("UTC", "Z", "GMT", "ETC/UTC"):
        return None
    if name not in zoneinfo.available_timezones():
        raise invalid(f"unknown time zone {name!r}", hint="use an IANA name such as Europe/Berlin")
    return name


def _time_unit(bound: Bound) -> tuple[int, int]:
    name = _word(bound, "time unit").upper()
    if name not in _TIME_UNITS:
        raise invalid(f"unknown time unit {name!r}", hint=", ".join(_TIME_UNITS))
    return _TIME_UNITS[name]


def _integer(bound: Bound, function: str) -> str:
    if bound.multi or (bound.type not in INTEGERS and bound.literal is None):
        raise invalid(f"{function} takes a time as a number or TIMESTAMP, found {bound.type}")
    if bound.literal is None and bound.type is not DataType.INT:
        return bound.sql
    return as_type(bound, DataType.TIMESTAMP if bound.type is DataType.STRING else DataType.LONG)


def _floor(sql: str, unit: int, shift: int = 0) -> str:
    """Largest multiple of `unit` (plus shift) not above `sql`, also for negative numbers."""
    if unit == 1:
        return sql
    moved = f"({sql} - {shift})" if shift else f"({sql})"
    floored = f"{sql} - (({moved} % {unit} + {unit}) % {unit})"
    return f"({floored})"


def _scale(sql: str, ratio: tuple[int, int], *, whole: bool = False) -> str:
    """Multiplies by a ratio, rounding down. `whole`: nothing is left over."""
    up, down = ratio
    if up != 1:
        return f"({sql} * {up})"
    if down == 1:
        return sql
    return f"({sql if whole else _floor(sql, down)} / {down})"


def _as_timestamp(milliseconds: str, zone: str | None) -> str:
    kind = f'Timestamp(Millisecond, Some("{zone}"))' if zone else "Timestamp(Millisecond, None)"
    return f"arrow_cast({milliseconds}, {text_sql(kind)})"


def truncate(args: Sequence[Bound]) -> Bound:
    """DATETRUNC(unit, t[, inUnit[, zone[, outUnit]]]): LONG in outUnit (default: inUnit, default: milliseconds)."""
    unit = _word(args[0], "the unit of DATETRUNC").lower()
    incoming = _time_unit(args[2]) if len(args) > 2 else (1, 1)
    zone = _zone(args[3], "the zone of DATETRUNC") if len(args) > 3 else None
    outgoing = _time_unit(args[4]) if len(args) > 4 else incoming
    if unit not in _FIXED_MS and unit not in _CALENDAR:
        raise invalid(f"DATETRUNC: unknown unit {unit!r}", hint=", ".join((*_FIXED_MS, *_CALENDAR)))
    milliseconds = _scale(_integer(args[1], "DATETRUNC"), incoming)
    if unit in _FIXED_MS and (zone is None or _FIXED_MS[unit] < 60_000):
        sql = _floor(milliseconds, _FIXED_MS[unit], _WEEK_SHIFT_MS if unit == "week" else 0)
    else:
        sql = f"CAST(date_trunc('{unit}', {_as_timestamp(milliseconds, zone)}) AS BIGINT)"
    whole = zone is None and (unit in _CALENDAR or _FIXED_MS[unit] % outgoing[0] == 0)
    return Bound(_scale(sql, (outgoing[1], outgoing[0]), whole=whole), DataType.LONG)


def part(name: str, args: Sequence[Bound]) -> Bound:
    """YEAR(t[, zone]) and its like: INT."""
    zone = _zone(args[1], f"the zone of {name.upper()}") if len(args) > 1 else None
    stamp = _as_timestamp(_integer(args[0], name.upper()), zone)
    sql = f"date_part('{PARTS[name]}', {stamp})"
    return Bound(f"CAST({sql} % 1000 AS INT)" if name == "millisecond" else f"CAST({sql} AS INT)", DataType.INT)


def extract(args: Sequence[Bound]) -> Bound:
    name = _word(args[0], "the unit of EXTRACT").lower()
    if name not in PARTS:
        raise invalid(f"EXTRACT: unknown unit {name!r}", hint=", ".join(sorted(PARTS)))
    return part(name, args[1:])


def convert(args: Sequence[Bound]) -> Bound:
    """TIMECONVERT(t, inUnit, outUnit)."""
    incoming, outgoing = _time_unit(args[1]), _time_unit(args[2])
    milliseconds = _scale(_integer(args[0], "TIMECONVERT"), incoming)
    return Bound(_scale(milliseconds, (outgoing[1], outgoing[0])), DataType.LONG)


def to_epoch(unit: str, args: Sequence[Bound]) -> Bound:
    up, down = _TIME_UNITS[unit]
    return Bound(_scale(_integer(args[0], f"TOEPOCH{unit}"), (down, up)), DataType.LONG)


def from_epoch(unit: str, args: Sequence[Bound]) -> Bound:
    return Bound(_scale(_integer(args[0], f"FROMEPOCH{unit}"), _TIME_UNITS[unit]), DataType.LONG)


def floor_to_multiple(args: Sequence[Bound]) -> Bound:
    """ROUND(t, bucket): Pinot's two-argument ROUND is for times."""
    bucket = args[1].literal
    if bucket is None or not isinstance(bucket.value, int) or isinstance(bucket.value, bool) or bucket.value <= 0:
        raise invalid("the second argument of ROUND must be a positive whole number", hint="ROUNDDECIMAL rounds digits")
    sql = _integer(args[0], "ROUND")
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
    total = int(days or 0) * _DAY_MS + int(hours or 0) * 3_600_000 + int(minutes or 0) * 60_000
    total += round(float(seconds or 0) * 1000)
    return -total if sign == "-" else total
