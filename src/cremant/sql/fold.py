# SPDX-License-Identifier: Apache-2.0
"""Time functions of literals in a filter, computed once at the broker: `ts >= fromDateTime('2024-01-01', 'yyyy-MM-dd')`
then is a column against a literal, by which metadata can rule segments out.

What cannot be computed here stays a call: the engine gives the value, or the error.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from cremant.model.errors import InvalidConfig, QueryError
from cremant.model.timepattern import TimePattern
from cremant.sql.bound import timestamp_ms
from cremant.sql.ir import Call, Expr, Literal, fold_literals
from cremant.sql.times import FIXED_MS

_UNIT_MS = {"seconds": 1000, "minutes": 60_000, "hours": 3_600_000, "days": 86_400_000}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def fold_constants(expr: Expr) -> Expr:
    if not isinstance(expr, Call) or expr.name in ("in", "not_in"):
        return expr
    args = tuple(fold_constants(arg) for arg in expr.args)
    call = fold_literals(Call(expr.name, args))
    if not isinstance(call, Call) or not args or not all(isinstance(arg, Literal) for arg in args):
        return call
    compute = _FOLDED.get(call.name)
    values = [arg.value for arg in args if isinstance(arg, Literal)]
    if compute is None or any(value is None for value in values):
        return call
    try:
        number = compute(*values)
    except (InvalidConfig, QueryError, ValueError, TypeError, OverflowError, KeyError):
        return call
    return Literal(number, str(number)) if -(2**63) <= number < 2**63 else call


def _from_date_time(text: str, pattern: str, zone: str = "UTC") -> int:
    return TimePattern.compile(pattern, zone, "query").parse(text)


def _to_epoch(unit_ms: int) -> Callable[[int], int]:
    """Towards zero, as java.util.concurrent.TimeUnit."""
    return lambda ms: _whole(ms) // unit_ms if ms >= 0 else -(-_whole(ms) // unit_ms)


def _from_epoch(unit_ms: int) -> Callable[[int], int]:
    return lambda count: _whole(count) * unit_ms


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(value)
    return value


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _truncate(unit: str, ms: int) -> int:
    name = _word(unit).lower()
    if name in FIXED_MS and name != "week":
        return _whole(ms) // FIXED_MS[name] * FIXED_MS[name]
    moment = _EPOCH + datetime.timedelta(milliseconds=_whole(ms))
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    match name:
        case "week":
            day -= datetime.timedelta(days=day.weekday())
        case "month":
            day = day.replace(day=1)
        case "quarter":
            day = day.replace(month=(day.month - 1) // 3 * 3 + 1, day=1)
        case "year":
            day = day.replace(month=1, day=1)
        case _:
            raise KeyError(name)
    return (day - _EPOCH) // datetime.timedelta(milliseconds=1)


def _add(unit: str, count: int, ms: int) -> int:
    return _whole(ms) + _whole(count) * FIXED_MS[_word(unit).lower().removesuffix("s")]


_FOLDED: dict[str, Callable[..., int]] = {
    "fromdatetime": _from_date_time,
    "fromiso8601": lambda text: timestamp_ms(_word(text)),
    "datetrunc": _truncate,
    "dateadd": _add,
    "timestampadd": _add,
    **{f"toepoch{unit}": _to_epoch(unit_ms) for unit, unit_ms in _UNIT_MS.items()},
    **{f"fromepoch{unit}": _from_epoch(unit_ms) for unit, unit_ms in _UNIT_MS.items()},
}
