# SPDX-License-Identifier: Apache-2.0
"""Time functions of the table: epochs in other units, date-time texts, adding and differences, buckets."""

from __future__ import annotations

import re

from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType
from cremant.model.timeformat import TimeFormat, parse_time_format
from cremant.model.timepattern import TimePattern
from cremant.sql import times
from cremant.sql.bound import INTEGERS, TEXTS, Bound, as_type, invalid, text_sql
from cremant.sql.casts import cast_to
from cremant.sql.scalar import Args, Bind, Scalar, integer_arg, is_null_literal, text_arg, typed, word
from cremant.sql.times import FIXED_MS, MONTHS, TIME_UNITS, scale, time_value, time_zone, unit_name

_LONG, _STRING, _TIMESTAMP = DataType.LONG, DataType.STRING, DataType.TIMESTAMP
_UNITS = ("SECONDS", "MINUTES", "HOURS", "DAYS")
_ISO = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"


def _count(bound: Bound, function: str) -> int:
    """A bucket's size."""
    value = bound.literal.value if bound.literal is not None else None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise invalid(f"the size of {function} must be a positive whole number")
    return value


def _to_epoch(unit: str, kind: str) -> Bind:
    """TOEPOCHSECONDS(ms), TOEPOCHSECONDSBUCKET(ms, n), TOEPOCHSECONDSROUNDED(ms, n)."""
    up, down = TIME_UNITS[unit]
    name = f"TOEPOCH{unit}{kind}"

    def bind(args: Args) -> Bound:
        sql = scale(time_value(args[0], name), (down, up))
        if kind:
            size = _count(args[1], name)
            sql = f"({sql} / {size})"
            sql = f"({sql} * {size})" if kind == "ROUNDED" else sql
        return Bound(sql, _LONG)

    return bind


def _from_epoch(unit: str, kind: str) -> Bind:
    name = f"FROMEPOCH{unit}{kind}"

    def bind(args: Args) -> Bound:
        up, down = TIME_UNITS[unit]
        size = _count(args[1], name) if kind else 1
        return Bound(scale(time_value(args[0], name), (up * size, down)), _LONG)

    return bind


def _pattern(text: str, zone: str, function: str) -> TimePattern:
    try:
        return TimePattern.compile(text, zone, function)
    except InvalidConfig as error:
        raise invalid(error.message, hint=error.hint) from error


def _to_date_time(args: Args) -> Bound:
    """TODATETIME(ms, pattern[, zone])."""
    zone = time_zone(args[2], "the zone of TODATETIME") if len(args) > 2 else "UTC"
    pattern = _pattern(word(args[1], "the pattern of TODATETIME"), zone, "TODATETIME")
    return Bound(
        f"fn_format_time({_long(args[0], 'TODATETIME')}, {text_sql(pattern.source)}, {text_sql(zone)})", _STRING
    )


def _from_date_time(args: Args) -> Bound:
    """FROMDATETIME(text, pattern[, zone[, default]]): ms."""
    zone = time_zone(args[2], "the zone of FROMDATETIME") if len(args) > 2 else "UTC"
    pattern = _pattern(word(args[1], "the pattern of FROMDATETIME"), zone, "FROMDATETIME")
    default = typed(args[3], _LONG) if len(args) > 3 and not is_null_literal(args[3]) else "NULL"
    text = text_arg(args[0], "FROMDATETIME")
    return Bound(f"fn_parse_time({text}, {text_sql(pattern.source)}, {text_sql(zone)}, {default})", _LONG)


def _long(bound: Bound, function: str) -> str:
    """A time as exactly Int64."""
    return (
        f"CAST({time_value(bound, function)} AS BIGINT)" if bound.literal is not None else time_value(bound, function)
    )


def _format(bound: Bound, what: str) -> TimeFormat:
    try:
        return parse_time_format(word(bound, what), what)
    except InvalidConfig as error:
        raise invalid(error.message, hint=error.hint) from error


def _granularity(bound: Bound) -> tuple[int, str]:
    """(size, unit) of `1:HOURS`, `HOURS|1` or `HOURS`."""
    text = word(bound, "the granularity of DATETIMECONVERT")
    parts = [part.strip().upper() for part in re.split(r"[:|]", text)]
    sizes = [part for part in parts if part.isdigit()]
    units = [part for part in parts if part in TIME_UNITS]
    if len(units) != 1 or len(sizes) > 1 or len(parts) != len(sizes) + 1 or "0" in sizes or len(sizes[:1] or "") > 9:
        raise invalid(f"{text!r} is not a granularity", hint="write 1:HOURS")
    return int(sizes[0]) if sizes else 1, units[0]


def _ratio(size_ms: float) -> tuple[int, int]:
    """Milliseconds of a unit as a ratio of whole numbers."""
    return (round(size_ms), 1) if size_ms >= 1 else (1, round(1 / size_ms))


def _date_time_convert(args: Args) -> Bound:
    """DATETIMECONVERT(t, inFormat, outFormat, granularity[, zone]).

    Buckets of an epoch count from the epoch; those of a text, or with a zone, count inside the next larger unit of the
    calendar (`15:MINUTES` inside the hour)."""
    source, target = _format(args[1], "the input format"), _format(args[2], "the output format")
    size, unit = _granularity(args[3])
    zone = time_zone(args[4], "the zone of DATETIMECONVERT") if len(args) > 4 else None
    sql = _milliseconds(args[0], source)
    up, down = TIME_UNITS[unit]
    if down != 1:
        pass  # buckets below a millisecond
    elif target.pattern is not None or zone is not None:
        where = zone or (target.pattern.zone_name if target.pattern is not None else "UTC")
        sql = f"fn_time_bucket({sql}, {size}, '{unit.lower().removesuffix('s')}', {text_sql(where)})"
    elif up * size != 1:
        sql = f"(({sql} / {up * size}) * {up * size})"
    if target.pattern is not None:
        pattern = target.pattern
        return Bound(f"fn_format_time({sql}, {text_sql(pattern.source)}, {text_sql(pattern.zone_name)})", _STRING)
    if "TIMESTAMP" in word(args[2], "the output format").upper():
        return Bound(sql, _TIMESTAMP)
    outgoing = _ratio(target.size_ms)
    return Bound(scale(sql, (outgoing[1], outgoing[0])), _LONG)


def _milliseconds(bound: Bound, source: TimeFormat) -> str:
    """SQL of a value of the format, as ms."""
    if source.pattern is None:
        if bound.type in TEXTS and bound.literal is None:
            bound = cast_to(bound, _LONG)
        return f"CAST({scale(time_value(bound, 'DATETIMECONVERT'), _ratio(source.size_ms))} AS BIGINT)"
    pattern = source.pattern
    if bound.type in INTEGERS and bound.literal is None:
        bound = Bound(f"CAST({bound.sql} AS VARCHAR)", _STRING)
    text = text_arg(bound, "DATETIMECONVERT")
    return f"fn_parse_time({text}, {text_sql(pattern.source)}, {text_sql(pattern.zone_name)}, NULL)"


def _add(args: Args) -> Bound:
    """DATEADD(unit, n, t): ms."""
    unit = unit_name(args[0], "DATEADD")
    count, moment = integer_arg(args[1], "DATEADD"), _long(args[2], "DATEADD")
    if unit in MONTHS:
        return Bound(f"fn_add_months({moment}, {count} * {MONTHS[unit]})", _LONG)
    return Bound(f"({moment} + {count} * {FIXED_MS[unit]})", _LONG)


def _difference(args: Args) -> Bound:
    """DATEDIFF(unit, first, second): whole units from first to second, cut towards zero."""
    unit = unit_name(args[0], "DATEDIFF")
    first, second = _long(args[1], "DATEDIFF"), _long(args[2], "DATEDIFF")
    if unit == "year":
        return Bound(f"fn_years_between({first}, {second})", _LONG)
    if unit in MONTHS:
        return Bound(scale(f"fn_months_between({first}, {second})", (1, MONTHS[unit])), _LONG)
    return Bound(scale(f"({second} - {first})", (1, FIXED_MS[unit])), _LONG)


def _bin(args: Args) -> Bound:
    """DATEBIN('15 minutes', t, origin): the beginning of the bin."""
    text = word(args[0], "the width of DATEBIN")
    found = re.fullmatch(r"\s*(\d{1,9})\s+([A-Za-z]+)\s*", text)
    unit = found[2].lower().removesuffix("s") if found else ""
    if found is None or unit not in FIXED_MS or int(found[1]) == 0:
        raise invalid(f"DATEBIN: {text!r} is not a width", hint="for example '15 minutes' or '1 day'")
    width_ms = int(found[1]) * FIXED_MS[unit]
    moment, origin = _long(args[1], "DATEBIN"), _long(args[2], "DATEBIN")
    floored = f"fn_to_long(floor(CAST(({moment} - {origin}) AS DOUBLE) / {float(width_ms)}))"
    return Bound(f"({floored} * {width_ms} + {origin})", _TIMESTAMP)


def _to_timestamp(args: Args) -> Bound:
    if args[0].literal is not None and args[0].type is _STRING:
        return Bound(as_type(args[0], _TIMESTAMP), _TIMESTAMP)
    return Bound(_long(args[0], "TOTIMESTAMP"), _TIMESTAMP)


def _from_timestamp(args: Args) -> Bound:
    return Bound(_long(args[0], "FROMTIMESTAMP"), _LONG)


def _to_iso(args: Args) -> Bound:
    return Bound(f"fn_format_time({_long(args[0], 'TOISO8601')}, {text_sql(_ISO)}, 'UTC')", _STRING)


def _from_iso(args: Args) -> Bound:
    return Bound(f"fn_parse_timestamp({text_arg(args[0], 'FROMISO8601')})", _LONG)


def _part(name: str) -> Bind:
    return lambda args: times.part(name, args)


DATE_TIMES: tuple[Scalar, ...] = (
    Scalar(("datetrunc",), (2, 5), times.truncate),
    Scalar(("timeconvert",), (3, 3), times.convert),
    Scalar(("datetimeconvert",), (4, 5), _date_time_convert),
    Scalar(("extract",), (2, 2), times.extract),
    Scalar(("round",), (2, 2), times.floor_to_multiple),
    Scalar(("todatetime",), (2, 3), _to_date_time),
    Scalar(("fromdatetime",), (2, 4), _from_date_time),
    Scalar(("totimestamp",), (1, 1), _to_timestamp),
    Scalar(("fromtimestamp",), (1, 1), _from_timestamp),
    Scalar(("toiso8601",), (1, 1), _to_iso),
    Scalar(("fromiso8601",), (1, 1), _from_iso),
    Scalar(("dateadd", "timestampadd"), (3, 3), _add),
    Scalar(("datediff", "timestampdiff"), (3, 3), _difference),
    Scalar(("datebin",), (3, 3), _bin),
    *(Scalar((name,), (1, 2), _part(name)) for name in times.PARTS),
    *(
        Scalar((f"toepoch{unit}{kind}".lower(),), (2, 2) if kind else (1, 1), _to_epoch(unit, kind))
        for unit in _UNITS
        for kind in ("", "BUCKET", "ROUNDED")
    ),
    *(
        Scalar((f"fromepoch{unit}{kind}".lower(),), (2, 2) if kind else (1, 1), _from_epoch(unit, kind))
        for unit in _UNITS
        for kind in ("", "BUCKET")
    ),
)
