# SPDX-License-Identifier: Apache-2.0
"""Functions against other libraries: Python's datetime, zoneinfo, json, re, decimal; over generated, extreme and
missing values."""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import itertools
import json
import math
import re
import struct
import urllib.parse
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datafusion import SessionContext
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.exec import functions
from cremant.exec.lists import any_of, kept
from cremant.exec.scalar_decimal import sort_key
from cremant.model.decimals import stored_decimal
from cremant.sql.regex import JavaPattern, replacement

UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)
ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Asia/Kolkata", "Australia/Lord_Howe",
    "Asia/Beirut", "Pacific/Apia", "Africa/Casablanca",
)  # fmt: skip
#: 1972 to 2096: clock changes of the past, and rules of the future.
MOMENTS = st.integers(63_072_000_000, 4_000_000_000_000)


def call(name: str, *columns: pa.Array) -> list[Any]:
    """A function of ours inside DataFusion, over columns."""
    session = SessionContext()
    batch = pa.RecordBatch.from_arrays(list(columns), [f"c{index}" for index in range(len(columns))])
    session.register_record_batches("t", [[batch]])
    sql = f"SELECT {name}({', '.join(batch.schema.names)}) FROM t"
    functions.register(session, sql)
    return pa.Table.from_batches(session.sql(sql).collect()).column(0).to_pylist()


def repeated(value: Any, kind: pa.DataType, like: list[Any]) -> pa.Array:
    return pa.array([value] * len(like), kind)


def local(ms: int, zone: str) -> datetime.datetime:
    return (EPOCH + datetime.timedelta(milliseconds=ms)).astimezone(zoneinfo.ZoneInfo(zone))


FLOORS: dict[str, Callable[[datetime.datetime], datetime.datetime]] = {
    "hour": lambda t: t.replace(minute=0, second=0, microsecond=0),
    "day": lambda t: t.replace(hour=0, minute=0, second=0, microsecond=0),
    "week": lambda t: t.replace(hour=0, minute=0, second=0, microsecond=0) - datetime.timedelta(days=t.weekday()),
    "month": lambda t: t.replace(day=1, hour=0, minute=0, second=0, microsecond=0),
    "quarter": lambda t: t.replace(month=(t.month - 1) // 3 * 3 + 1, day=1, hour=0, minute=0, second=0, microsecond=0),
    "year": lambda t: t.replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(MOMENTS, min_size=1, max_size=60), st.sampled_from(ZONES), st.sampled_from(sorted(FLOORS)))
def test_truncation_shows_the_floored_local_time_and_is_the_last_such_instant(
    times: list[int], zone: str, unit: str
) -> None:
    found = call(
        "fn_time_truncate", repeated(unit, pa.string(), times), pa.array(times), repeated(zone, pa.string(), times)
    )
    for ms, begin in zip(times, found, strict=True):
        wanted = FLOORS[unit](local(ms, zone).replace(tzinfo=None))
        shown = local(begin, zone).replace(tzinfo=None)
        assert begin <= ms
        skipped = wanted.replace(tzinfo=zoneinfo.ZoneInfo(zone)).astimezone(UTC).astimezone(zoneinfo.ZoneInfo(zone))
        if skipped.replace(tzinfo=None) == wanted:
            assert shown == wanted, (ms, zone, unit)
        else:  # a clock change skips it: the instant of the change
            assert wanted < shown <= wanted + datetime.timedelta(hours=24)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-60_000_000_000_000, 250_000_000_000_000), min_size=1, max_size=30),
    st.sampled_from(ZONES),
    st.sampled_from(
        ["yyyy-MM-dd HH:mm:ss.SSS", "yyyy-MM-dd'T'HH:mm", "dd/MM/yyyy", "EEE MMM d yyyy hh a", "yyyyMMddHHmmss"]
    ),
)
def test_date_texts_are_those_of_pythons_datetime(times: list[int], zone: str, pattern: str) -> None:
    formats = {
        "yyyy-MM-dd HH:mm:ss.SSS": "%Y-%m-%d %H:%M:%S.{ms:03d}", "yyyy-MM-dd'T'HH:mm": "%Y-%m-%dT%H:%M",
        "dd/MM/yyyy": "%d/%m/%Y", "EEE MMM d yyyy hh a": "%a %b {day} %Y %I %p", "yyyyMMddHHmmss": "%Y%m%d%H%M%S",
    }  # fmt: skip
    found = call(
        "fn_format_time", pa.array(times), repeated(pattern, pa.string(), times), repeated(zone, pa.string(), times)
    )
    for ms, text in zip(times, found, strict=True):
        moment = local(ms, zone)
        year = f"{moment.year:04d}"
        expected = moment.strftime(formats[pattern].replace("%Y", year)).format(ms=ms % 1000, day=moment.day)
        assert text == expected, (ms, zone)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(MOMENTS, st.integers(-400, 400)), min_size=1, max_size=40))
def test_adding_months_and_counting_them_agree_with_the_calendar(pairs: list[tuple[int, int]]) -> None:
    times, counts = [ms for ms, _ in pairs], [count for _, count in pairs]
    later = call("fn_add_months", pa.array(times), pa.array(counts))
    for ms, count, found in zip(times, counts, later, strict=True):
        moment, shifted = local(ms, "UTC"), local(found, "UTC")
        months = moment.year * 12 + moment.month - 1 + count
        assert (shifted.year, shifted.month - 1) == divmod(months, 12)
        assert shifted.day == moment.day or (shifted + datetime.timedelta(days=1)).day == 1
        assert shifted.time() == moment.time()
    assert call("fn_months_between", pa.array(times), pa.array(later)) == counts


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.floats(), st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("d", b)[0]))
    )
)
def test_texts_of_doubles_read_back_as_the_same_number(values: list[float | None]) -> None:
    texts = call("fn_double_text", pa.array(values, pa.float64())) if values else []
    for value, text in zip(values, texts, strict=True):
        if value is None:
            assert text is None
            continue
        read = float(text.replace("Infinity", "inf"))
        assert (math.isnan(read) and math.isnan(value)) or struct.pack("d", read) == struct.pack("d", value)
        assert re.fullmatch(r"NaN|-?Infinity|-?\d+\.\d+(E-?\d+)?", text)
        plain = 1e-3 <= abs(value) < 1e7 or value == 0 or not math.isfinite(value)
        assert ("E" in text) != plain


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e15, 1e15), st.integers(-(10**6), 10**6).map(lambda n: n / 1000)), min_size=1),
    st.integers(-3, 6),
    st.sampled_from([("fn_round", decimal.ROUND_HALF_UP), ("fn_truncate", decimal.ROUND_DOWN)]),
)
def test_rounding_is_that_of_the_decimal_digits(values: list[float], digits: int, how: tuple[str, str]) -> None:
    name, mode = how
    found = call(name, pa.array(values, pa.float64()), repeated(digits, pa.int64(), values))
    with decimal.localcontext(prec=60):
        expected = [float(decimal.Decimal(repr(v)).quantize(decimal.Decimal(1).scaleb(-digits), mode)) for v in values]
    assert found == expected


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["a", "b", "c d", "é"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(DOCUMENTS, min_size=1, max_size=8), st.lists(st.sampled_from(["a", "b", "c d", "é", 0, 1, -1]), max_size=3)
)
def test_json_paths_find_what_pythons_json_finds(documents: list[Any], steps: list[str | int]) -> None:
    path = "$" + "".join(f"['{step}']" if isinstance(step, str) else f"[{step}]" for step in steps)
    texts = [json.dumps(document) for document in documents]
    found = call(
        "fn_json_text", pa.array(texts), repeated(path, pa.string(), texts), repeated(None, pa.string(), texts),
        repeated(False, pa.bool_(), texts),
    )  # fmt: skip
    for document, text in zip(documents, found, strict=True):
        value = document
        for step in steps:
            keyed = isinstance(step, str) and isinstance(value, dict)
            indexed = isinstance(step, int) and isinstance(value, list) and -len(value) <= step < len(value)
            value = value.get(step) if keyed else value[step] if indexed else None
        if value is None:
            assert text is None
        elif isinstance(value, str):
            assert text == value
        else:
            assert json.loads(text) == value


REGEXES = (
    r"\w+", r"(\d+)-(\d+)", r"^a|b$", r"[^\s,]+", r"\bfoo\b", r"(?<first>[a-c])(.)", r"\p{Upper}\p{Lower}*", r"x{2,3}?",
    r"[\]\\a]",
    r"\Qa.b\E", r"(?i)foo", r"a\.b", r"\s\S", r"(a|b)*c", r"é|Ω",
)  # fmt: skip
TEXTS = st.lists(
    st.text(st.sampled_from("abcxfoFO012-.,\\]é Ω\t\n"), max_size=12), min_size=1, max_size=20
)  # fmt: skip


def python_regex(pattern: str) -> re.Pattern[str]:
    """The same in Python's dialect, ASCII classes as in Java; `$` is the end, never the place before a last newline."""
    pattern = re.sub(r"\\Q(.*?)\\E", lambda found: re.escape(found[1]), pattern)
    pattern = pattern.replace("(?<first>", "(?P<first>").replace(r"\p{Upper}", "[A-Z]").replace(r"\p{Lower}", "[a-z]")
    return re.compile(pattern.replace("$", r"\Z"), re.ASCII)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from(REGEXES))
def test_both_engines_match_as_java_does(texts: list[str], pattern: str) -> None:
    java, python = JavaPattern(pattern), python_regex(pattern)
    assert java.groups == python.groups
    expected = [python.search(text) is not None for text in texts]
    session = SessionContext()
    session.register_record_batches("t", [[pa.RecordBatch.from_arrays([pa.array(texts)], ["s"])]])
    rust = java.rust().replace("'", "''")
    rows = session.sql(f"SELECT regexp_like(s, '{rust}') FROM t").collect()
    assert pa.Table.from_batches(rows).column(0).to_pylist() == expected
    for group in range(java.groups + 1):
        pick = repeated(java.re2_group(group), pa.string(), texts)
        found = call("fn_regexp_extract", pa.array(texts), pick, repeated("<none>", pa.string(), texts))
        matches = [python.search(text) for text in texts]
        assert found == ["<none>" if match is None else match[group] or "" for match in matches]


@settings(max_examples=60, deadline=None)
@given(
    TEXTS,
    st.sampled_from(
        [(r"(\d+)-(\d+)", "$2/$1", r"\2/\1"), (r"[a-c]+", r"\$", "$"), ("o", "", ""), (r"(?i)F", "<$0>", r"<\g<0>>")]
    ),
)
def test_replacements_are_those_of_pythons_re(texts: list[str], case: tuple[str, str, str]) -> None:
    pattern, ours, theirs = case
    java = JavaPattern(pattern)
    found = call(
        "fn_regexp_replace", pa.array(texts), repeated(java.re2(), pa.string(), texts),
        repeated(replacement(ours, java.groups), pa.string(), texts), repeated(0, pa.int64(), texts),
        repeated(-1, pa.int64(), texts),
    )  # fmt: skip
    assert found == [re.sub(pattern, theirs, text, flags=re.ASCII) for text in texts]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=20))
def test_encodings_go_there_and_back(texts: list[str]) -> None:
    column = pa.array(texts)
    encoded = call("fn_to_base64", column)
    assert encoded == [base64.b64encode(text.encode()).decode() for text in texts]
    assert call("fn_from_base64", pa.array(encoded)) == texts
    urls = call("fn_encode_url", column)
    assert [urllib.parse.unquote_plus(url) for url in urls] == texts
    assert call("fn_decode_url", pa.array(urls)) == texts
    data = pa.array([text.encode() for text in texts], pa.binary()).cast(pa.binary_view())
    assert call("fn_sha256", data) == [hashlib.sha256(text.encode()).hexdigest() for text in texts]


NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=None).filter(
    lambda number: len(number.as_tuple().digits) + abs(int(number.as_tuple().exponent)) < 900
)


@settings(max_examples=100, deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=12))
def test_keys_of_decimals_are_in_the_order_of_the_numbers(numbers: list[decimal.Decimal]) -> None:
    texts = [stored_decimal(number) for number in numbers]
    by_key = sorted(texts, key=sort_key)
    with decimal.localcontext(prec=4000, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN):
        assert [decimal.Decimal(text) for text in by_key] == sorted(decimal.Decimal(text) for text in texts)
        left, right = pa.array(texts[:-1]), pa.array(texts[1:])
        sums = call("fn_decimal_plus", left, right)
        assert [decimal.Decimal(text) for text in sums] == [
            decimal.Decimal(a) + decimal.Decimal(b) for a, b in itertools.pairwise(texts)
        ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=12), st.integers(0, 4)
)
def test_elements_are_kept_and_counted_in_slices_of_lists_too(rows: list[list[int] | None], skip: int) -> None:
    lists = pa.array(rows, pa.list_(pa.int64()))[min(skip, len(rows)) :]
    holds = pa.array(np.asarray(lists.values) > 2)
    wanted = rows[min(skip, len(rows)) :]
    assert any_of(lists, holds).to_pylist() == [None if row is None else any(v > 2 for v in row) for row in wanted]
    assert kept(lists, holds).to_pylist() == [None if row is None else [v for v in row if v > 2] for row in wanted]


def test_a_function_of_no_rows_has_its_type() -> None:
    assert call("fn_split", pa.array([], pa.string()), pa.array([], pa.string()), pa.array([], pa.int64())) == []


@pytest.mark.parametrize("name", sorted(name for name in functions._factories() if name.startswith("fn_")))
def test_every_function_can_be_made(name: str) -> None:
    session = SessionContext()
    functions.register(session, f"SELECT {name}(1)")
