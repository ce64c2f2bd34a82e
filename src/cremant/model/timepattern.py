# SPDX-License-Identifier: Apache-2.0
"""Joda-style date-time patterns (`yyyy-MM-dd'T'HH:mm:ss.SSSZ`): text to epoch ms and back.

Known letters: y and Y year, M month (MMM, MMMM names), d, D day of year, H k hour, K h with a, m, s, S fraction,
E weekday name (ignored when parsing), a AM/PM, Z offset (`+0000`; ZZ `+00:00`, ZZZ zone id), z zone name, quoted text.
Texts without an offset are in the pattern's zone. Names are English.
"""

from __future__ import annotations

import datetime
import re
import zoneinfo
from typing import NamedTuple

from cremant.model.errors import InvalidConfig

_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
#: Within it `datetime` works, whatever the zone; and the length of 400 years.
_PLAIN_MS = (-62_135_596_800_000 + 172_800_000, 253_402_300_799_999 - 172_800_000)
_CYCLE_MS = 146_097 * 86_400_000
_STRFTIME = {
    ("y", 4): "%Y", ("Y", 4): "%Y", ("M", 2): "%m", ("d", 2): "%d", ("H", 2): "%H", ("m", 2): "%M", ("s", 2): "%S",
}  # fmt: skip
_OFFSET = re.compile(r"([+-])(\d{2}):?(\d{2})(?::?(\d{2}))?")
_TOKEN = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|[^A-Za-z']+")
_LETTERS = frozenset("yYMdDHkKhmsSEaZz")
#: Letters whose width, when the next token is also a number, is exact (`yyyyMMdd`).
_NUMERIC = frozenset("yYdDHkKhmsS")


class _Field(NamedTuple):
    letter: str
    width: int
    #: Literal text when letter is "".
    text: str = ""

    @property
    def numeric(self) -> bool:
        return self.letter in _NUMERIC or (self.letter == "M" and self.width < 3)


#: Letters that are read as another one.
_SAME = {"Y": "y", "z": "Z"}
_SECONDS_AND_MILLIS = (_Field("s", 2), _Field("", 0, "."), _Field("S", 3))


def zone_of(name: str, where: str) -> datetime.tzinfo:
    """A time zone by id (`UTC`, `Europe/Berlin`) or offset (`+02:00`). Raises InvalidConfig."""
    if name.upper() in ("UTC", "Z", "GMT"):
        return datetime.UTC
    found = _OFFSET.fullmatch(name)
    try:
        return _fixed(found) if found else zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidConfig(f"{where}: unknown time zone {name!r}", hint="for example UTC or Europe/Berlin") from error


def _fixed(found: re.Match[str]) -> datetime.tzinfo:
    offset = datetime.timedelta(hours=int(found[2]), minutes=int(found[3]), seconds=int(found[4] or 0))
    return datetime.timezone(-offset if found[1] == "-" else offset)


class TimePattern:
    """A compiled pattern in a zone. `parse` and `format` are inverse as far as the pattern goes."""

    def __init__(self, fields: tuple[_Field, ...], zone: datetime.tzinfo, source: str, zone_name: str = "UTC") -> None:
        self.source = source
        self.zone_name = zone_name
        self._fields = fields
        self._zone = zone
        self._regex = re.compile("".join(_regex_of(fields, at) for at in range(len(fields))), re.IGNORECASE)

    @classmethod
    def compile(cls, pattern: str, zone: str, where: str) -> TimePattern:
        """Raises InvalidConfig for letters that are not known, and for unknown zones."""
        fields = []
        at = 0
        while at < len(pattern):
            found = _TOKEN.match(pattern, at)
            if found is None:
                raise InvalidConfig(f"{where}: unterminated quote in date pattern {pattern!r}")
            at = found.end()
            if found[2] is None:
                quoted = found[1]
                fields.append(_Field("", 0, found[0] if quoted is None else (quoted.replace("''", "'") or "'")))
            elif found[2] not in _LETTERS:
                raise InvalidConfig(
                    f"{where}: letter {found[2]!r} in date pattern {pattern!r} is not supported",
                    hint=f"known letters: {' '.join(sorted(_LETTERS))}; quote literal text",
                )
            else:
                fields.append(_Field(found[2], len(found[0])))
        if not fields:
            raise InvalidConfig(f"{where}: empty date pattern")
        return cls(tuple(fields), zone_of(zone, where), pattern, zone)

    def parse(self, text: str) -> int:
        """Epoch ms. Raises ValueError."""
        found = self._regex.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} does not fit the pattern {self.source!r}")
        part = {name: value for name, value in found.groupdict().items() if value is not None}
        zone = _parse_zone(part["Z"]) if "Z" in part else self._zone
        day = _date_of(part)
        hour = _hour_of(part)
        fraction_ms = int(part["S"].ljust(3, "0")[:3]) if "S" in part else 0
        moment = datetime.datetime(
            day.year, day.month, day.day, hour, int(part.get("m", 0)), int(part.get("s", 0)), tzinfo=zone
        )
        elapsed = moment - _EPOCH
        return elapsed.days * 86_400_000 + elapsed.seconds * 1000 + fraction_ms

    def format(self, ms: int) -> str:
        """Raises ValueError or OverflowError outside years 1 to 9999."""
        return self._format(ms, 0)

    def format_any(self, ms: int) -> str:
        """Years beyond 1 to 9999 take the calendar of a year 400 times n away, which is the same."""
        plain = _PLAIN_MS[0] <= ms <= _PLAIN_MS[1]
        return self._format(ms, 0 if plain else (ms - _PLAIN_MS[0]) // _CYCLE_MS - 5)

    def _format(self, ms: int, cycles: int) -> str:
        seconds, millis = divmod(ms - cycles * _CYCLE_MS, 1000)
        moment = (_EPOCH + datetime.timedelta(seconds=seconds)).astimezone(self._zone)
        return "".join(_format(field, moment, millis, moment.year + 400 * cycles) for field in self._fields)

    @property
    def shows_millis(self) -> bool:
        return any(field.letter == "S" for field in self._fields)

    def strftime(self) -> str | None:
        """The same as a strftime format, in which %S has the milliseconds if `shows_millis`; None if there is none."""
        parts: list[str] = []
        at = 0
        while at < len(self._fields):
            if self._fields[at : at + 3] == _SECONDS_AND_MILLIS:
                parts.append("%S")
                at += 3
                continue
            field = self._fields[at]
            part = _STRFTIME.get((field.letter, field.width)) if field.letter else field.text.replace("%", "%%")
            if part is None:
                return None
            parts.append(part)
            at += 1
        return None if self.shows_millis and parts.count("%S") > 1 else "".join(parts)


def _regex_of(fields: tuple[_Field, ...], at: int) -> str:
    letter, width, text = fields[at]
    if not letter:
        return re.escape(text)
    squeezed = at + 1 < len(fields) and fields[at + 1].numeric
    name = _SAME.get(letter, letter)
    if any(_SAME.get(field.letter, field.letter) == name for field in fields[:at]):
        name = ""
    if letter in ("M",) and width >= 3:
        body = "[A-Za-z]{3,9}"
    elif letter in ("E", "a"):
        body = "[A-Za-z]{3,9}" if letter == "E" else "[AaPp][Mm]"
    elif letter in ("Z", "z"):
        body = r"Z|[+-]\d{2}:?\d{2}|[A-Za-z]+(?:/[A-Za-z_+\-0-9/]+)?"
    elif letter == "S":
        body = rf"\d{{{width}}}" if squeezed else r"\d{1,9}"
    elif squeezed:
        body = rf"\d{{{width}}}"
    else:
        body = r"[+-]?\d{1,9}" if letter in ("y", "Y") else r"\d{1,3}" if letter == "D" else r"\d{1,2}"
    return f"(?P<{name}>{body})" if name else f"(?:{body})"


def _date_of(part: dict[str, str]) -> datetime.date:
    year = int(part.get("y", 1970))
    if "y" in part and len(part["y"]) == 2:
        year += 2000 if year < 70 else 1900
    if "D" in part and "M" not in part:
        return datetime.date(year, 1, 1) + datetime.timedelta(days=int(part["D"]) - 1)
    month = part.get("M", "1")
    number = int(month) if month.isdigit() else _month_number(month)
    return datetime.date(year, number, int(part.get("d", 1)))


def _month_number(name: str) -> int:
    for number, month in enumerate(_MONTHS, 1):
        if name.lower() in (month.lower(), month[:3].lower()):
            return number
    raise ValueError(f"{name!r} is not a month")


def _hour_of(part: dict[str, str]) -> int:
    if "H" in part:
        return int(part["H"])
    if "k" in part:
        return int(part["k"]) % 24
    half = int(part.get("h", part.get("K", 0))) % 12
    return half + 12 if part.get("a", "").lower() == "pm" else half


def _parse_zone(text: str) -> datetime.tzinfo:
    if text.upper() == "Z":
        return datetime.UTC
    found = _OFFSET.fullmatch(text)
    if found:
        return _fixed(found)
    try:
        return zone_of(text, "text")
    except InvalidConfig as error:
        raise ValueError(error.message) from error


def _format(field: _Field, moment: datetime.datetime, millis: int, year: int) -> str:
    letter, width, text = field
    match letter:
        case "":
            return text
        case "y" | "Y":
            sign = "-" if year < 0 else ""
            return f"{abs(year) % 100:02d}" if width == 2 else sign + str(abs(year)).rjust(width, "0")
        case "M":
            name = _MONTHS[moment.month - 1]
            return str(moment.month).rjust(width, "0") if width < 3 else name[:3] if width == 3 else name
        case "E":
            name = _DAYS[moment.weekday()]
            return name if width > 3 else name[:3]
        case "a":
            return "AM" if moment.hour < 12 else "PM"
        case "S":
            return f"{millis:03d}".ljust(width, "0")[:width]
        case "Z":
            return _format_offset(moment, width)
        case "z":
            return moment.tzname() or "UTC"
        case _:
            return str(_number(letter, moment)).rjust(width, "0")


def _number(letter: str, moment: datetime.datetime) -> int:
    match letter:
        case "d":
            return moment.day
        case "D":
            return moment.timetuple().tm_yday
        case "H":
            return moment.hour
        case "k":
            return moment.hour or 24
        case "K":
            return moment.hour % 12
        case "h":
            return moment.hour % 12 or 12
        case "m":
            return moment.minute
        case _:
            return moment.second


def _format_offset(moment: datetime.datetime, width: int) -> str:
    if width >= 3:
        return str(moment.tzinfo) if moment.tzinfo is not datetime.UTC else "UTC"
    minutes = int((moment.utcoffset() or datetime.timedelta()).total_seconds() // 60)
    sign = "-" if minutes < 0 else "+"
    hours, rest = divmod(abs(minutes), 60)
    return f"{sign}{hours:02d}{':' if width == 2 else ''}{rest:02d}"
