# SPDX-License-Identifier: Apache-2.0
"""Periods, sizes, formats of date-time columns, date patterns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.model.errors import InvalidConfig
from cremant.model.timeformat import check_granularity, parse_period_ms, parse_size_bytes, parse_time_format
from cremant.model.timepattern import TimePattern

MS = 1_577_934_245_678  # 2020-01-02 03:04:05.678 UTC


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1d", 86_400_000), ("12h", 43_200_000), ("30m", 1_800_000), ("45s", 45_000), ("500ms", 500), ("1d12h30m",
    131_400_000),
     (3600000, 3_600_000), ("0", 0), (" 6H ", 21_600_000)],
)  # fmt: skip
def test_periods(text: object, ms: int) -> None:
    assert parse_period_ms(text, "here") == ms


@pytest.mark.parametrize("text", ["", "d", "1x", "-5", "1.5h", "h1", "1h1d", None, "²", "9" * 5_000])
def test_what_is_not_a_period_is_refused(text: object) -> None:
    with pytest.raises(InvalidConfig, match=r"here.*not a period"):
        parse_period_ms(text, "here")


def test_sizes() -> None:
    assert [parse_size_bytes(text, "here") for text in ("200M", "1.5G", "7", "1 KB", "2T")] == [
        200 * 2**20, 3 * 2**29, 7, 1024, 2**41,
    ]  # fmt: skip
    with pytest.raises(InvalidConfig, match="not a size"):
        parse_size_bytes("-1M", "here")
    with pytest.raises(InvalidConfig, match="not a size"):
        parse_size_bytes("9" * 400 + "G", "here")


@pytest.mark.parametrize("parse", [parse_period_ms, parse_size_bytes])
def test_numbers_beyond_64_bits_are_refused(parse: Callable[[object, str], int]) -> None:
    with pytest.raises(InvalidConfig, match="is more than"):
        parse("9" * 30, "here")


@pytest.mark.parametrize(
    ("text", "value", "ms"),
    [
        ("1:MILLISECONDS:EPOCH", MS, MS),
        ("1:DAYS:EPOCH", 3, 3 * 86_400_000),
        ("5:MINUTES:EPOCH", 2, 600_000),
        ("EPOCH|DAYS", 3, 3 * 86_400_000),
        ("EPOCH|MINUTES|5", 2, 600_000),
        ("EPOCH", MS, MS),
        ("1:MICROSECONDS:EPOCH", 5_000_000, 5_000),
        ("TIMESTAMP", MS, MS),
        ("1:MILLISECONDS:TIMESTAMP", MS, MS),
        ("1:DAYS:SIMPLE_DATE_FORMAT:yyyyMMdd", "20200102", 1_577_923_200_000),
        ("1:DAYS:SIMPLE_DATE_FORMAT:yyyyMMdd tz(Europe/Berlin)", "20200102", 1_577_919_600_000),
        ("1:SECONDS:SIMPLE_DATE_FORMAT:yyyy-MM-dd HH:mm:ss", "2020-01-02 03:04:05", 1_577_934_245_000),
        ("SIMPLE_DATE_FORMAT|yyyyMMdd|Europe/Berlin", "20200102", 1_577_919_600_000),
        ("SIMPLE_DATE_FORMAT", "2020-01-02T03:04:05.678+00:00", MS),
    ],
)
def test_formats_of_date_time_columns(text: str, value: int | str, ms: int) -> None:
    assert parse_time_format(text, "here").to_ms(value) == ms


@pytest.mark.parametrize(
    "text",
    ["", "DAYS", "1:DAYS", "x:DAYS:EPOCH", "0:DAYS:EPOCH", "1:MOONS:EPOCH", "1:DAYS:LUNAR",
    "1:DAYS:SIMPLE_DATE_FORMAT",
     "EPOCH|MOONS", "EPOCH|DAYS|0", "SIMPLE_DATE_FORMAT|QQ", "SIMPLE_DATE_FORMAT|yyyy|Mars/Olympus"],
)  # fmt: skip
def test_what_is_not_a_format_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="here"):
        parse_time_format(text, "here")


def test_granularities() -> None:
    for text in ("1:MILLISECONDS", "MILLISECONDS|1", "DAYS", "15:MINUTES"):
        check_granularity(text, "here")
    for text in ("", "1", "DAYS|DAYS", "1:MOONS", "1:DAYS:EPOCH"):
        with pytest.raises(InvalidConfig, match="here"):
            check_granularity(text, "here")


@pytest.mark.parametrize(
    ("pattern", "zone", "text"),
    [
        ("yyyy-MM-dd'T'HH:mm:ss.SSSZ", "UTC", "2020-01-02T03:04:05.678+0000"),
        ("yyyy-MM-dd'T'HH:mm:ss.SSSZZ", "Europe/Berlin", "2020-01-02T04:04:05.678+01:00"),
        ("yyyyMMddHHmmssSSS", "UTC", "20200102030405678"),
        ("EEE, d MMM yyyy HH:mm:ss.SSS ZZ", "UTC", "Thu, 2 Jan 2020 03:04:05.678 +00:00"),
        ("EEEE d. MMMM yyyy 'at' h:mm:ss.SSS a", "America/New_York", "Wednesday 1. January 2020 at 10:04:05.678 PM"),
        ("yyyy/D HH:mm:ss.SSS", "UTC", "2020/2 03:04:05.678"),
        ("yy-M-d k:m:s.SSS", "UTC", "20-1-2 3:4:5.678"),
        ("''yyyy''-MM-dd HH:mm:ss.SSS", "UTC", "'2020'-01-02 03:04:05.678"),
        ("yyyy-MM-dd HH:mm:ss.SSS Z zzz", "UTC", "2020-01-02 03:04:05.678 +0000 UTC"),
        ("yyyy YYYY MM-MMM-dd HH:mm:ss.SSS", "UTC", "2020 2020 01-Jan-02 03:04:05.678"),
    ],
)
def test_patterns_format_and_parse(pattern: str, zone: str, text: str) -> None:
    compiled = TimePattern.compile(pattern, zone, "here")
    assert compiled.format(MS) == text
    assert compiled.parse(text) == MS


@given(st.integers(min_value=-62_135_596_800_000, max_value=253_402_300_799_999))
def test_a_full_pattern_is_its_own_inverse(ms: int) -> None:
    pattern = TimePattern.compile("yyyy-MM-dd HH:mm:ss.SSS", "UTC", "here")
    assert pattern.parse(pattern.format(ms)) == ms


@pytest.mark.parametrize("text", ["", "2020-01-02x", "2020-02-30", "2020-13-01", "x", "2020"])
def test_text_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TimePattern.compile("yyyy-MM-dd", "UTC", "here").parse(text)


def test_an_offset_in_the_text_wins_over_the_zone() -> None:
    pattern = TimePattern.compile("yyyy-MM-dd HH:mm Z", "Europe/Berlin", "here")
    assert pattern.parse("2020-01-02 03:00 +0000") == 1_577_934_000_000
    assert pattern.parse("2020-01-02 03:00 Z") == 1_577_934_000_000
