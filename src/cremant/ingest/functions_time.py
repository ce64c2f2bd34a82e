# SPDX-License-Identifier: Apache-2.0
"""Time functions of the expression language. Times are epoch ms (LONG); divisions cut towards zero, as in Java."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.evaluate import Body, Function, Kind, Value, by_value, either, literal_number, literal_text, truth
from cremant.ingest.functions import function
from cremant.model.errors import InvalidConfig
from cremant.model.timeformat import TimeFormat, parse_time_format, parse_unit_ms
from cremant.model.timepattern import TimePattern, zone_of

_UNITS_MS = {"seconds": 1_000, "minutes": 60_000, "hours": 3_600_000, "days": 86_400_000}
_TRUNC_UNITS = ("millisecond", "second", "minute", "hour", "day", "week", "month", "quarter", "year")
_LONG_LIMIT = float(2**63)


def _divided(array: pa.Array, divisor: int) -> pa.Array:
    return array if divisor == 1 else pc.divide(array, pa.scalar(divisor, pa.int64()))


def _multiplied(array: pa.Array, factor: int) -> Value:
    if factor == 1:
        return Value(array)
    over = pc.greater_equal(pc.abs(pc.multiply(array.cast(pa.float64(), safe=False), float(factor))), _LONG_LIMIT)
    failed = truth(over) if pc.any(over).as_py() else None
    return Value(pc.multiply(array, pa.scalar(factor, pa.int64())), failed)


def _to_epoch(unit_ms: int, *, back: bool = False) -> Callable[[dict[int, Any], str], Body]:
    """toEpochSeconds(ms); with a bucket of n units: the number of the bucket, or (Rounded) where it begins."""

    def make(literals: dict[int, Any], where: str) -> Body:
        bucket = _positive(literals, 1, where)

        def body(args: list[Value], count: int) -> Value:
            buckets = _divided(_divided(args[0].array, unit_ms), bucket)
            result = _multiplied(buckets, bucket) if back else Value(buckets)
            return Value(result.array, either(args[0].failed, result.failed))

        return body

    return make


def _from_epoch(unit_ms: int) -> Callable[[dict[int, Any], str], Body]:
    def make(literals: dict[int, Any], where: str) -> Body:
        bucket = _positive(literals, 1, where)

        def body(args: list[Value], count: int) -> Value:
            result = _multiplied(args[0].array, unit_ms * bucket)
            return Value(result.array, either(args[0].failed, result.failed))

        return body

    return make


def _positive(literals: dict[int, Any], at: int, where: str) -> int:
    number = literal_number(literals, at, where, 1)
    if number <= 0:
        raise InvalidConfig(f"{where}: argument {at + 1} must be positive, found {number}")
    return number


def _date_trunc(literals: dict[int, Any], where: str) -> Body:
    """dateTrunc(unit, time[, inUnit[, zone[, outUnit]]]); weeks begin on Monday."""
    unit = literal_text(literals, 0, where).lower()
    if unit not in _TRUNC_UNITS:
        raise InvalidConfig(f"{where}: cannot truncate to {unit!r}", hint=f"one of {', '.join(_TRUNC_UNITS)}")
    in_text = literal_text(literals, 2, where, "MILLISECONDS")
    in_ms = _unit(in_text, where)
    out_ms = _unit(literal_text(literals, 4, where, in_text), where)
    zone = _zone(literals, 3, where)

    def body(args: list[Value], count: int) -> Value:
        scaled = _multiplied(args[1].array, in_ms)
        floored = pc.floor_temporal(scaled.array.cast(pa.timestamp("ms", zone)), unit=unit, week_starts_monday=True)
        return Value(_divided(floored.cast(pa.int64()), out_ms), either(args[1].failed, scaled.failed))

    return body


def _unit(text: str, where: str) -> int:
    unit_ms = parse_unit_ms(text, where)
    if unit_ms < 1:
        raise InvalidConfig(f"{where}: units below a millisecond are not supported by this version, found {text!r}")
    return int(unit_ms)


def _zone(literals: dict[int, Any], at: int, where: str) -> str:
    name = literal_text(literals, at, where, "UTC")
    zone_of(name, where)
    try:
        pc.floor_temporal(pa.array([0]).cast(pa.timestamp("ms", name)), unit="day")
    except pa.ArrowInvalid as error:
        raise InvalidConfig(f"{where}: unknown time zone {name!r}", hint="for example Europe/Berlin") from error
    return name


def _part(compute: Callable[[pa.Array], pa.Array]) -> Callable[[dict[int, Any], str], Body]:
    def make(literals: dict[int, Any], where: str) -> Body:
        zone = _zone(literals, 1, where)

        def body(args: list[Value], count: int) -> Value:
            return Value(compute(args[0].array.cast(pa.timestamp("ms", zone))).cast(pa.int64()), args[0].failed)

        return body

    return make


def _pattern(literals: dict[int, Any], where: str) -> TimePattern:
    return TimePattern.compile(literal_text(literals, 1, where), literal_text(literals, 2, where, "UTC"), where)


def _to_date_time(literals: dict[int, Any], where: str) -> Body:
    pattern = _pattern(literals, where)

    def body(args: list[Value], count: int) -> Value:
        result = by_value(lambda ms: None if ms is None else pattern.format(ms), args[0].array, Kind.STRING)
        return Value(result.array, either(args[0].failed, result.failed))

    return body


def _from_date_time(literals: dict[int, Any], where: str) -> Body:
    pattern = _pattern(literals, where)

    def body(args: list[Value], count: int) -> Value:
        result = by_value(lambda text: None if text is None else pattern.parse(text), args[0].array, Kind.LONG)
        return Value(result.array, either(args[0].failed, result.failed))

    return body


def _time_convert(literals: dict[int, Any], where: str) -> Body:
    in_ms = _unit(literal_text(literals, 1, where), where)
    out_ms = _unit(literal_text(literals, 2, where), where)

    def body(args: list[Value], count: int) -> Value:
        scaled = _multiplied(args[0].array, in_ms)
        return Value(_divided(scaled.array, out_ms), either(args[0].failed, scaled.failed))

    return body


def _date_time_convert(literals: dict[int, Any], where: str) -> Body:
    """dateTimeConvert(value, inFormat, outFormat, granularity): buckets count from the epoch."""
    source, target = (parse_time_format(literal_text(literals, at, where), where) for at in (1, 2))
    size, _, unit = literal_text(literals, 3, where).partition(":")
    if not size.isdigit() or int(size) <= 0:
        raise InvalidConfig(f"{where}: granularity must be like 1:HOURS, found {literals.get(3)!r}")
    bucket_ms = int(size) * _unit(unit, where)

    def one(value: Any) -> Any:
        return None if value is None else _converted(value, source, target, bucket_ms)

    kind = _date_time_kind(literals, where)

    def body(args: list[Value], count: int) -> Value:
        result = by_value(one, args[0].array, kind)
        return Value(result.array, either(args[0].failed, result.failed))

    return body


def _converted(value: Any, source: TimeFormat, target: TimeFormat, bucket_ms: int) -> Any:
    ms = source.to_ms(value if source.pattern is not None else int(value))
    ms = ms // bucket_ms * bucket_ms
    return target.pattern.format(ms) if target.pattern is not None else int(ms / target.size_ms)


def _date_time_kind(literals: dict[int, Any], where: str) -> Kind:
    target = parse_time_format(literal_text(literals, 2, where), where)
    return Kind.LONG if target.pattern is None else Kind.STRING


def _same(literals: dict[int, Any], where: str) -> Body:
    return lambda args, count: args[0]


_L, _S, _ANY = Kind.LONG, Kind.STRING, None

_PARTS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "year": pc.year,
    "quarter": pc.quarter,
    "month": pc.month,
    "week": pc.iso_week,
    "dayofyear": pc.day_of_year,
    "dayofmonth": pc.day,
    "dayofweek": lambda moments: pc.day_of_week(moments, count_from_zero=False, week_start=1),
    "hour": pc.hour,
    "minute": pc.minute,
    "second": pc.second,
    "millisecond": pc.millisecond,
}

TIME_FUNCTIONS: tuple[Function, ...] = (
    *(function(f"toepoch{unit}", (_L,), _L, _to_epoch(ms)) for unit, ms in _UNITS_MS.items()),
    *(function(f"toepoch{unit}bucket", (_L, _L), _L, _to_epoch(ms), literals=(1,)) for unit, ms in _UNITS_MS.items()),
    *(
        function(f"toepoch{unit}rounded", (_L, _L), _L, _to_epoch(ms, back=True), literals=(1,))
        for unit, ms in _UNITS_MS.items()
    ),
    *(function(f"fromepoch{unit}", (_L,), _L, _from_epoch(ms)) for unit, ms in _UNITS_MS.items()),
    *(
        function(f"fromepoch{unit}bucket", (_L, _L), _L, _from_epoch(ms), literals=(1,))
        for unit, ms in _UNITS_MS.items()
    ),
    function("todatetime", (_L, _S, _S), _S, _to_date_time, 2, 3, (1, 2)),
    function("fromdatetime", (_S, _S, _S), _L, _from_date_time, 2, 3, (1, 2)),
    function("totimestamp", (_L,), _L, _same),
    function("fromtimestamp", (_L,), _L, _same),
    function("datetrunc", (_S, _L, _S, _S, _S), _L, _date_trunc, 2, 5, (0, 2, 3, 4)),
    function("timeconvert", (_L, _S, _S), _L, _time_convert, literals=(1, 2)),
    function("datetimeconvert", (_ANY, _S, _S, _S), _date_time_kind, _date_time_convert, literals=(1, 2, 3)),
    *(function(name, (_L, _S), _L, _part(compute), 1, 2, (1,)) for name, compute in _PARTS.items()),
)
TIME_ALIASES = {
    "day": "dayofmonth",
    "dow": "dayofweek",
    "doy": "dayofyear",
    "monthofyear": "month",
    "weekofyear": "week",
}
