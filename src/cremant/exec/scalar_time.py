# SPDX-License-Identifier: Apache-2.0
"""Calendars and date-time texts. Times are epoch milliseconds; zones are IANA names; weeks start on Monday.

Rounding in a zone is rounding of the local time: the result is the first instant that shows the rounded local time (if
a clock change skips it, the instant of the change). Rounding an hour that happens twice stays in its own occurrence.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.functions import Factory
from cremant.exec.kernels import by_distinct, constant, scalar
from cremant.model.errors import InvalidConfig
from cremant.model.timepattern import TimePattern, zone_of
from cremant.sql.times import CALENDAR_MS, FIXED_MS, MONTHS, WEEK_SHIFT_MS

_LONG, _TEXT = pa.int64(), pa.string()
_INT64_MIN = -(2**63)
#: Arrow's zones know no clock changes from 2038 on.
ARROW_ZONES_END_MS = 2_145_000_000_000
_UTC = frozenset({"UTC", "Z", "GMT", ""})


def _numbers(array: pa.Array) -> np.ndarray:
    numbers: np.ndarray = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    return numbers


def _array(numbers: np.ndarray, *like: pa.Array) -> pa.Array:
    """`numbers` as an array that is NULL where any of `like` is."""
    mask = np.zeros(len(numbers), dtype=bool)
    for array in like:
        if array.null_count:
            mask |= ~array.is_valid().to_numpy(zero_copy_only=False)
    return pa.array(numbers.astype(np.int64), _LONG, mask=mask if mask.any() else None)


def offsets_ms(times: np.ndarray, zone: str) -> np.ndarray:
    """How far the zone's clocks are ahead of UTC at each time."""
    if zone.upper() in _UTC:
        return np.zeros(len(times), dtype=np.int64)
    # Beyond years 1 to 9999 no rule is known: those of the first and the last year count.
    inside = np.clip(times, -62_135_596_800_000 + 2 * 86_400_000, 253_402_300_799_999 - 2 * 86_400_000)
    later = inside >= ARROW_ZONES_END_MS
    stamps = pa.array(np.where(later, 0, inside), pa.timestamp("ms", tz=zone))
    local: np.ndarray = pc.local_timestamp(stamps).cast(_LONG).to_numpy(zero_copy_only=False)
    offsets = local - np.where(later, 0, inside)
    if later.any():
        quarters, place = np.unique(inside[later] // 900_000, return_inverse=True)
        offsets[later] = np.array([_offset_ms(int(quarter) * 900, zone) for quarter in quarters])[place]
    return offsets


def _offset_ms(seconds: int, zone: str) -> int:
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=seconds)
    offset = moment.astimezone(zone_of(zone, "query")).utcoffset()
    return 0 if offset is None else round(offset.total_seconds() * 1000)


def to_utc(local: np.ndarray, before: np.ndarray, zone: str) -> np.ndarray:
    """Instants whose clocks show `local`, near instants whose offsets are `before`."""
    first = local - before
    offset = offsets_ms(first, zone)
    second = local - offset
    skipped = offsets_ms(second, zone) != offset
    instants: np.ndarray = np.where(offset == before, first, np.where(skipped, np.maximum(first, second), second))
    return instants


def _months(times: np.ndarray) -> np.ndarray:
    """Months since 1970-01."""
    shown = np.where(times == _INT64_MIN, _INT64_MIN + 1, times)
    months: np.ndarray = shown.view("M8[ms]").astype("M8[M]").astype(np.int64)
    return months


def _month_start_ms(months: np.ndarray) -> np.ndarray:
    starts: np.ndarray = months.view("M8[M]").astype("M8[ms]").astype(np.int64)
    return starts


def _floor_local(local: np.ndarray, unit: str) -> np.ndarray:
    if unit in MONTHS:
        size = MONTHS[unit]
        return _month_start_ms(_months(local) // size * size)
    shift = WEEK_SHIFT_MS if unit == "week" else 0
    size_ms = FIXED_MS[unit]
    return (local - shift) // size_ms * size_ms + shift


def _truncate(unit: pa.Array, times: pa.Array, zone: pa.Array) -> pa.Array:
    """DATETRUNC: the beginning of the unit in the zone."""
    name, where, values = constant(unit), constant(zone) or "UTC", _numbers(times)
    if where.upper() in _UTC:
        return _array(_floor_local(values, name), times)
    offset = offsets_ms(values, where)
    return _array(to_utc(_floor_local(values + offset, name), offset, where), times)


def _bucket(times: pa.Array, size: pa.Array, unit: pa.Array, zone: pa.Array) -> pa.Array:
    """DATETIMECONVERT's buckets in a zone: multiples of `size` inside the next larger unit (minutes of the hour)."""
    count, name, where, values = constant(size) or 1, constant(unit), constant(zone) or "UTC", _numbers(times)
    offset = offsets_ms(values, where)
    local = values + offset
    larger = {"millisecond": "second", "second": "minute", "minute": "hour", "hour": "day", "day": "month"}[name]
    start = _floor_local(local, larger)
    size_ms = FIXED_MS[name] * count
    return _array(to_utc(start + (local - start) // size_ms * size_ms, offset, where), times)


def _add_months(times: pa.Array, count: pa.Array) -> pa.Array:
    """Months later; a day that the month has not becomes its last."""
    values, added = _numbers(times), _numbers(count)
    months = _months(values)
    begin, target = _month_start_ms(months), months + added
    length = _month_start_ms(target + 1) - _month_start_ms(target)
    day_ms = (values - begin) // 86_400_000 * 86_400_000
    time_ms = (values - begin) - day_ms
    return _array(_month_start_ms(target) + np.minimum(day_ms, length - 86_400_000) + time_ms, times, count)


def _between(by_years: bool) -> Callable[[pa.Array, pa.Array], pa.Array]:
    """Whole months (years) from the first to the second time, cut towards zero. As in Joda the last day of a month
    counts as the day that the month has not."""

    def compute(first: pa.Array, second: pa.Array) -> pa.Array:
        one, other = _numbers(first), _numbers(second)
        early, late = np.minimum(one, other), np.maximum(one, other)
        months_early, months_late = _months(early), _months(late)
        count = months_late - months_early
        rest_early, rest_late = early - _month_start_ms(months_early), late - _month_start_ms(months_late)
        if not by_years:
            length_ms = _month_start_ms(months_late + 1) - _month_start_ms(months_late)
            last_day = rest_late >= length_ms - 86_400_000
            rest_early = np.where(
                last_day & (rest_early >= length_ms), rest_early % 86_400_000 + length_ms - 86_400_000, rest_early
            )
        count = count - (rest_late < rest_early)
        count = count // 12 if by_years else count
        return _array(np.where(other < one, -count, count), first, second)

    return compute


@functools.lru_cache(maxsize=256)
def _pattern(text: str, zone: str) -> TimePattern:
    try:
        return TimePattern.compile(text, zone, "query")
    except InvalidConfig as error:
        raise ValueError(str(error)) from error


def _format(times: pa.Array, pattern: pa.Array, zone: pa.Array) -> pa.Array:
    """TODATETIME."""
    compiled, where = _pattern(constant(pattern), constant(zone)), constant(zone)
    values = _numbers(times)
    strftime = compiled.strftime()
    known_until_ms = 250_000_000_000_000 if where.upper() in _UTC else ARROW_ZONES_END_MS
    usual = values.min() >= -30_000_000_000_000 and values.max() < known_until_ms
    if strftime is None or not usual:
        return by_distinct(compiled.format_any, times, _TEXT)
    named = "UTC" if where.upper() in _UTC else where
    unit = "ms" if compiled.shows_millis else "s"
    seconds = values if unit == "ms" else values // 1000
    texts = pc.strftime(pa.array(seconds, pa.timestamp(unit, tz=named)), format=strftime)
    return texts if not times.null_count else pc.if_else(times.is_valid(), texts, pa.scalar(None, _TEXT))


def _parse(texts: pa.Array, pattern: pa.Array, zone: pa.Array, default: pa.Array) -> pa.Array:
    """FROMDATETIME. What does not fit ends the query, unless there is a default."""
    compiled, must = _pattern(constant(pattern), constant(zone)), default.null_count == len(default)

    def one(text: str) -> int | None:
        try:
            return compiled.parse(text)
        except (ValueError, OverflowError):
            if must:
                raise
            return None

    parsed = by_distinct(one, texts, _LONG)
    return parsed if must else pc.if_else(texts.is_valid(), pc.coalesce(parsed, default), parsed)


def _of_times(compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[pa.Array], pa.Array]:
    return lambda times: _array(compute(_numbers(times)), times)


FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("fn_time_truncate", _truncate, [_TEXT, _LONG, _TEXT], _LONG),
        scalar("fn_time_bucket", _bucket, [_LONG, _LONG, _TEXT, _TEXT], _LONG),
        scalar("fn_add_months", _add_months, [_LONG, _LONG], _LONG),
        scalar("fn_in_calendar", _of_times(lambda times: np.clip(times, *CALENDAR_MS)), [_LONG], _LONG),
        scalar("fn_months_between", _between(False), [_LONG, _LONG], _LONG),
        scalar("fn_years_between", _between(True), [_LONG, _LONG], _LONG),
        scalar("fn_format_time", _format, [_LONG, _TEXT, _TEXT], _TEXT),
        scalar("fn_parse_time", _parse, [_TEXT, _TEXT, _TEXT, _LONG], _LONG),
        *(
            scalar(f"fn_floor_{name}", _of_times(functools.partial(_floor_local, unit=name)), [_LONG], _LONG)
            for name in (*FIXED_MS, *MONTHS)
        ),
    ]
)
