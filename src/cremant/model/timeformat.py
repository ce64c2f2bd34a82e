# SPDX-License-Identifier: Apache-2.0
"""Time as configs write it: periods (`1d12h`, `30m`, ms), time units, sizes, and the formats of date-time columns."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from cremant.model.errors import InvalidConfig
from cremant.model.timepattern import TimePattern

UNIT_MS: dict[str, float] = {
    "NANOSECONDS": 1e-6,
    "MICROSECONDS": 1e-3,
    "MILLISECONDS": 1,
    "SECONDS": 1_000,
    "MINUTES": 60_000,
    "HOURS": 3_600_000,
    "DAYS": 86_400_000,
}

_PERIOD = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+)s)?(?:(\d+)ms)?")
_PERIOD_MS = (86_400_000, 3_600_000, 60_000, 1_000, 1)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?")
#: Of a period or size as text, and of what it stands for.
_CHARS_MAX, _NUMBER_MAX = 60, 2**63 - 1
_SIZE_BYTES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_period_ms(value: Any, where: str) -> int:
    """`1d`, `1d12h30m`, `45s`, `500ms`, or a number of ms. Raises InvalidConfig naming `where`."""
    text = str(value).strip().lower()
    if text.isdecimal() and len(text) <= _CHARS_MAX:
        return _bounded(int(text), value, where)
    found = _PERIOD.fullmatch(text) if 0 < len(text) <= _CHARS_MAX else None
    if found is None:
        raise InvalidConfig(
            f"{where}: {value!r} is not a period", hint="write 1d, 12h, 30m, 1d12h30m or a number of milliseconds"
        )
    parts = zip(found.groups(), _PERIOD_MS, strict=True)
    return _bounded(sum(int(part) * unit_ms for part, unit_ms in parts if part), value, where)


def parse_size_bytes(value: Any, where: str) -> int:
    """`200M`, `1.5G`, or a number of bytes. Raises InvalidConfig naming `where`."""
    text = str(value).strip().upper()
    found = _SIZE.fullmatch(text) if len(text) <= _CHARS_MAX else None
    if found is None:
        raise InvalidConfig(f"{where}: {value!r} is not a size", hint="write 200M, 1G or a number of bytes")
    return _bounded(int(float(found[1]) * _SIZE_BYTES[found[2]]), value, where)


def _bounded(number: int, value: Any, where: str) -> int:
    if number > _NUMBER_MAX:
        raise InvalidConfig(f"{where}: {value!r} is more than {_NUMBER_MAX}")
    return number


def parse_unit_ms(value: Any, where: str) -> float:
    """Milliseconds of one of Java's TimeUnit names."""
    unit = UNIT_MS.get(str(value).strip().upper())
    if unit is None:
        raise InvalidConfig(f"{where}: unknown time unit {value!r}", hint=f"one of {', '.join(UNIT_MS)}")
    return unit


class TimeFormat(NamedTuple):
    """The format of a date-time column. `pattern` is set for formatted text, otherwise a value counts units of
    `size_ms` since the epoch."""

    size_ms: float
    pattern: TimePattern | None = None

    def to_ms(self, value: Any) -> int:
        """Epoch ms of a stored value. Raises ValueError if text does not fit the pattern."""
        if self.pattern is not None:
            return self.pattern.parse(str(value))
        return int(value * self.size_ms)


def parse_time_format(text: str, where: str) -> TimeFormat:
    """Both spellings: `EPOCH|MILLISECONDS|1`, `SIMPLE_DATE_FORMAT|yyyyMMdd|UTC`, `TIMESTAMP`, and
    `1:DAYS:EPOCH`, `1:DAYS:SIMPLE_DATE_FORMAT:yyyyMMdd tz(UTC)`, `1:MILLISECONDS:TIMESTAMP`."""
    head = text.split("|", 1)[0].split(":", 1)[0].strip().upper()
    if head in ("EPOCH", "SIMPLE_DATE_FORMAT", "TIMESTAMP"):
        return _pipe_format(text, where)
    parts = text.split(":", 3)
    if len(parts) < 3 or not parts[0].strip().isdigit() or int(parts[0]) <= 0:
        raise InvalidConfig(
            f"{where}: {text!r} is not a date-time format",
            hint="write EPOCH|MILLISECONDS|1, SIMPLE_DATE_FORMAT|yyyy-MM-dd|UTC, TIMESTAMP or 1:DAYS:EPOCH",
        )
    size_ms = int(parts[0]) * parse_unit_ms(parts[1], where)
    match parts[2].strip().upper():
        case "EPOCH":
            return TimeFormat(size_ms)
        case "TIMESTAMP":
            return TimeFormat(1)
        case "SIMPLE_DATE_FORMAT" if len(parts) == 4:
            pattern, zone = _split_zone(parts[3])
            return TimeFormat(1, TimePattern.compile(pattern, zone, where))
        case other:
            raise InvalidConfig(
                f"{where}: unknown time format {other!r} in {text!r}",
                hint="one of EPOCH, TIMESTAMP, SIMPLE_DATE_FORMAT:pattern",
            )


def _pipe_format(text: str, where: str) -> TimeFormat:
    parts = [part.strip() for part in text.split("|")]
    match parts[0].upper():
        case "TIMESTAMP":
            return TimeFormat(1)
        case "EPOCH":
            unit_ms = parse_unit_ms(parts[1], where) if len(parts) > 1 else 1
            size = parts[2] if len(parts) > 2 else "1"
            if not size.isdigit() or int(size) <= 0:
                raise InvalidConfig(f"{where}: size {size!r} of {text!r} is not a positive number")
            return TimeFormat(unit_ms * int(size))
        case _:
            pattern = parts[1] if len(parts) > 1 else "yyyy-MM-dd'T'HH:mm:ss.SSSZZ"
            zone = parts[2] if len(parts) > 2 else "UTC"
            return TimeFormat(1, TimePattern.compile(pattern, zone, where))


def _split_zone(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"(.*?)\s+tz\s*\(\s*(.+?)\s*\)\s*", text)
    return (found[1], found[2]) if found else (text, "UTC")


def check_granularity(text: str, where: str) -> None:
    """`1:MILLISECONDS`, `MILLISECONDS|1` or `DAYS`. Raises InvalidConfig."""
    parts = [part.strip() for part in re.split(r"[:|]", text)]
    numbers = [part for part in parts if part.isdigit()]
    units = [part for part in parts if not part.isdigit()]
    if len(numbers) > 1 or len(units) != 1 or len(parts) > 2:
        raise InvalidConfig(f"{where}: {text!r} is not a granularity", hint="write 1:MILLISECONDS or MILLISECONDS|1")
    parse_unit_ms(units[0], where)
