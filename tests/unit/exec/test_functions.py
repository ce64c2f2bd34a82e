# SPDX-License-Identifier: Apache-2.0
"""Scalar functions, from SQL text to the JSON value of the answer: one row, every function, Pinot's and Java's rules.

What other libraries can say is asked of them over generated values in test_function_properties.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from tests.support.sqlrun import Sql, schema_of

from cremant.exec.engine import Engine
from cremant.model.errors import QueryError
from cremant.sql.fold import fold_constants
from cremant.sql.ir import Literal
from cremant.sql.planner import parse_query

SCHEMA = schema_of(
    "t",
    {
        "i": "INT", "n": "LONG", "f": "FLOAT", "d": "DOUBLE", "p": "BIG_DECIMAL", "b": "BOOLEAN", "ts": "TIMESTAMP",
        "s": "STRING", "j": "JSON", "y": "BYTES", "ss": "STRING[]", "ii": "INT[]", "dd": "DOUBLE[]", "day": "STRING",
        "num": "STRING", "secs": "INT",
    },
)  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {
        "i": 7, "n": 1234567890123, "f": 0.1, "d": -2.5, "p": Decimal("12.5"), "b": True, "ts": 1700000000123,
        "s": "Hello, Wörld", "j": '{"a":{"b":[1,2,{"c":"x"}]},"n":"12","f":1.5,"t":true,"z":null}',
        "y": b"\x01\xfeab", "ss": ["k1", "k2", "k3"], "ii": [3, 1, 3], "dd": [1.5, -2.0], "day": "2023-03-26 03:15",
        "num": "42", "secs": 1700000000,
    },
    {
        "i": -3, "n": 2, "f": 2.5, "d": 1e300, "p": Decimal("-0.001"), "b": False, "ts": 0, "s": "", "j": "no json",
        "y": b"", "ss": ["a"], "ii": [5], "dd": [0.0], "day": "1969-12-31 23:59", "num": "7", "secs": 0,
    },
    {"num": "7", "day": "1970-01-01 00:00"},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def table(engine: Engine) -> Sql:
    return Sql(engine, SCHEMA, ROWS)


CASES: list[tuple[str, Any]] = [
    ('ln(7)', 1.9459101490553132),
    ('ln(d)', 'NaN'),
    ('log10(n)', 12.091514977212539),
    ('log2(8)', 3.0),
    ('truncate(d)', -2.0),
    ('truncate(d, 1)', -2.5),
    ('truncate(2.789, 2)', 2.78),
    ('rounddecimal(2.675, 2)', 2.68),
    ('rounddecimal(d)', -2.0),
    ('mod(i, 4)', 3.0),
    ('mod(d, 0)', 'NaN'),
    ('intdiv(d, 2)', -2),
    ('intdivorzero(i, 0)', 0),
    ('i / 0', 'Infinity'),
    ('bitand(i, 3)', 3),
    ('bitor(i, 8)', 15),
    ('bitxor(i, 2)', 5),
    ('bitnot(i)', -8),
    ('gcd(i, 21)', 7),
    ('div(i, 2)', 3.5),
    ('p * 2', '25'),
    ('p / 3', '4.166666666666666666666666666666667'),
    ('p + 0.25', '12.75'),
    ('p - 1', '11.5'),
    ('mod(p, 5)', '2.5'),
    ('p > 12.4', True),
    ('p between 12 and 13', True),
    ('p = 12.50', True),
    ('greatest(i, d)', 7.0),
    ('substr(s, 7)', 'Wörld'),
    ('substr(s, 0, 5)', 'Hello'),
    ("strpos(s, 'l')", 2),
    ("strpos(s, 'l', 2)", 3),
    ("strpos(s, 'l', 9)", -1),
    ("strrpos(s, 'l')", 10),
    ('codepoint(s)', 72),
    ('chr(8364)', '€'),
    ('repeat(num, 2)', '4242'),
    ("repeat('a', '-', 3)", 'a-a-a'),
    ('leftsubstr(s, 4)', 'Hell'),
    ('rightsubstr(s, 4)', 'örld'),
    ("lpad(num, 5, 'xy')", 'xyx42'),
    ("rpad(s, 3, 'x')", 'Hello, Wörld'),
    ("split(s, ', ')", ['Hello', 'Wörld']),
    ("splitpart(s, 'l', 1)", 'o, Wör'),
    ("splitpart(s, 'l', -1)", 'd'),
    ("splitpart(s, 'l', 9)", 'null'),
    ("hammingdistance('abcd', 'abed')", 1),
    ("hammingdistance(s, 'x')", -1),
    ("levenshteindistance(s, 'Hello')", 7),
    ("strcmp('a', 'c')", -2),
    ('reverse(s)', 'dlröW ,olleH'),
    ("initcap('ab cd')", 'Ab Cd'),
    ("replace(s, 'l', 'LL')", 'HeLLLLo, WörLLd'),
    ("remove(s, 'l')", 'Heo, Wörd'),
    ("concat(s, num, '|')", 'Hello, Wörld|42'),
    ("concat_ws('-', s, num, 'x')", 'Hello, Wörld-42-x'),
    ("trim('  x ')", 'x'),
    ("trim(both 'H' from s)", 'ello, Wörld'),
    ("ltrim('  x ')", 'x '),
    ("regexp_extract(s, '(\\w+), (W.*)', 2)", 'Wörld'),
    ("regexp_extract(s, '[a-z]+')", 'ello'),
    ("regexp_extract(s, 'zzz', 0, 'none')", 'none'),
    ("regexp_replace(s, '(l+)', '<$1>')", 'He<ll>o, Wör<l>d'),
    ("regexp_replace(s, 'L+', '_', 0, 0, 'i')", 'He_o, Wörld'),
    ('md5(y)', '14e823b54263785d5f2e2f048b456304'),
    ("sha(toUtf8('abc'))", 'a9993e364706816aba3e25717850c26c9cd0d89d'),
    ("sha256(toUtf8('abc'))", 'ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'),
    ("crc32(toUtf8('abc'))", 891568578),
    ("adler32(toUtf8('abc'))", 38600999),
    ("murmurhash2(toUtf8('21'))", -973932308),
    ('tobase64(s)', 'SGVsbG8sIFfDtnJsZA=='),
    ('frombase64(tobase64(s))', 'Hello, Wörld'),
    ("encodeurl('a b&~*é')", 'a+b%26%7E*%C3%A9'),
    ("decodeurl('a+b%26')", 'a b&'),
    ('bytestohex(y)', '01fe6162'),
    ("hextobytes('cafe')", 'cafe'),
    ('fromutf8(toutf8(s))', 'Hello, Wörld'),
    ('isjson(j)', True),
    ("json_extract_scalar(j, '$.a.b[0]', 'INT')", 1),
    ("json_extract_scalar(j, '$.a.b[*]', 'STRING')", '[1,2,{"c":"x"}]'),
    ("json_extract_scalar(j, '$.a.b[2].c', 'STRING')", 'x'),
    ("json_extract_scalar(j, '$.n', 'LONG')", 12),
    ("json_extract_scalar(j, '$.f', 'DOUBLE')", 1.5),
    ("json_extract_scalar(j, '$.f', 'INT')", 1),
    ("json_extract_scalar(j, '$.t', 'BOOLEAN')", True),
    ("json_extract_scalar(j, '$.zz', 'STRING', 'dflt')", 'dflt'),
    ("json_extract_scalar(j, '$.zz', 'INT', -1)", -1),
    ("json_extract_scalar(j, '$.z', 'INT', 5)", 5),
    ("json_extract_scalar(j, '$.a.b[0:2]', 'INT_ARRAY')", [1, 2]),
    ("jsonextractkey(j, '$.*')", ["$['a']", "$['n']", "$['f']", "$['t']", "$['z']"]),
    ("jsonpathstring(j, '$.a')", '{"b":[1,2,{"c":"x"}]}'),
    ("jsonpathstring(j, '$.none')", ''),
    ("jsonpathstring(j, '$.none', 'x')", 'x'),
    ("jsonpathlong(j, '$.n')", 12),
    ("jsonpathlong(j, '$.none')", -9223372036854775808),
    ("jsonpathdouble(j, '$.none')", 'NaN'),
    ("jsonpatharray(j, '$.a.b')", ['1', '2', '{"c":"x"}']),
    ("jsonpathexists(j, '$.a.b[1]')", True),
    ("j['n']", '12'),
    ('arraylength(ss)', 3),
    ("valuein(ss, 'k1', 'k3', 'zz')", ['k1', 'k3']),
    ('valuein(ii, 3)', [3, 3]),
    ("mapvalue(ss, 'k2', ii)", 1),
    ("mapvalue(ss, 'nope', ii)", 0),
    ('arraymin(ii)', 1),
    ('arraysum(dd)', -0.5),
    ('arrayaverage(ii)', 2.3333333333333335),
    ('arraysortint(ii)', [1, 3, 3]),
    ('arrayreversestring(ss)', ['k3', 'k2', 'k1']),
    ('arraydistinctint(ii)', [3, 1]),
    ('arrayindexofint(ii, 1)', 1),
    ('arrayindexofint(ii, 9)', -1),
    ('arrayindexesofint(ii, 3)', [0, 2]),
    ("arraycontainsstring(ss, 'k3')", True),
    ('arrayslicestring(ss, 0, 2)', ['k1', 'k2']),
    ('arrayconcatint(ii, ii)', [3, 1, 3, 3, 1, 3]),
    ('arrayunionint(ii, array[1, 2])', [3, 1, 2]),
    ('arrayremoveint(ii, 3)', [1, 3]),
    ("arraypushbackstring(ss, 'z')", ['k1', 'k2', 'k3', 'z']),
    ('arraypushfrontint(ii, 0)', [0, 3, 1, 3]),
    ('arrayelementatint(ii, 1)', 3),
    ('arrayelementatint(ii, 9)', 0),
    ('ss[2]', 'k2'),
    ("arraytostring(ss, '-')", 'k1-k2-k3'),
    ('generateintarray(1, 7, 3)', [1, 4, 7]),
    ("arraysoverlap(ss, split('k3,zz', ','))", True),
    ('cast(i as string)', '7'),
    ('cast(f as string)', '0.1'),
    ('cast(d as string)', '-2.5'),
    ('cast(cast(n as double) as string)', '1.234567890123E12'),
    ('cast(p as string)', '12.5'),
    ('cast(b as string)', 'true'),
    ('cast(ts as string)', '2023-11-14 22:13:20.123'),
    ('cast(y as string)', '01fe6162'),
    ('cast(num as int)', 42),
    ('cast(num as double)', 42.0),
    ('cast(num as big_decimal)', '42'),
    ("cast('2024-01-01 00:00:00' as timestamp)", '2024-01-01 00:00:00.0'),
    ('cast(d as int)', -2),
    ('cast(n as int)', 1912276171),
    ('cast(1e30 as long)', 9223372036854775807),
    ('cast(i as boolean)', True),
    ('cast(i as timestamp)', '1970-01-01 00:00:00.007'),
    ('cast(d as big_decimal)', '-2.5'),
    ('cast(p as long)', 12),
    ("cast('cafe' as bytes)", 'cafe'),
    ('cast(ii as double)', [3.0, 1.0, 3.0]),
    ("month(ts, 'Asia/Tokyo')", 11),
    ('week(ts)', 46),
    ('dayofweek(ts)', 2),
    ('dayofyear(ts)', 318),
    ("hour(ts, 'America/New_York')", 17),
    ('millisecond(ts)', 123),
    ('yearofweek(ts)', 2023),
    ('extract(minute from ts)', 13),
    ("datetrunc('week', ts)", 1699833600000),
    ("datetrunc('month', ts, 'MILLISECONDS', 'Europe/Berlin')", 1698793200000),
    ("datetrunc('day', secs, 'SECONDS', 'Asia/Kolkata', 'MILLISECONDS')", 1699986600000),
    ("datetrunc('hour', secs * 1000)", 1699999200000),
    ("timeconvert(n, 'MILLISECONDS', 'DAYS')", 14288),
    ("todatetime(ts, 'yyyy-MM-dd HH:mm:ss.SSS')", '2023-11-14 22:13:20.123'),
    ("todatetime(ts, 'EEE, d MMM yyyy h:mm a', 'America/New_York')", 'Tue, 14 Nov 2023 5:13 PM'),
    ("fromdatetime(day, 'yyyy-MM-dd HH:mm', 'Europe/Berlin')", 1679793300000),
    ("fromdatetime('x', 'yyyy', 'UTC', -1)", -1),
    ("datetimeconvert(ts, '1:MILLISECONDS:EPOCH', '1:SECONDS:EPOCH', '15:MINUTES')", 1699999200),
    (
        "datetimeconvert(secs, '1:SECONDS:EPOCH', "
        "'1:DAYS:SIMPLE_DATE_FORMAT:yyyy-MM-dd HH:mm tz(Asia/Kolkata)', '30:MINUTES')",
        '2023-11-15 03:30',
    ),
    ("datetimeconvert(day, '1:DAYS:SIMPLE_DATE_FORMAT:yyyy-MM-dd HH:mm', '1:HOURS:EPOCH', '1:HOURS')", 466611),
    ("datetimeconvert(ts, 'EPOCH|MILLISECONDS', 'SIMPLE_DATE_FORMAT|yyyyMMdd', '1:DAYS')", '20231114'),
    (
        "datetimeconvert(ts, '1:MILLISECONDS:EPOCH', '1:MILLISECONDS:EPOCH', '1:DAYS', 'America/New_York')",
        1699938000000,
    ),
    ('toepochseconds(ts)', 1700000000),
    ('toepochminutesbucket(ts, 5)', 5666666),
    ('toepochhoursrounded(ts, 6)', 472218),
    ('fromepochdays(19675)', 1699920000000),
    ('fromepochminutesbucket(100, 5)', 30000000),
    ('round(ts, 300000)', 1699999800000),
    ("dateadd('month', 1, fromdatetime('2024-01-31', 'yyyy-MM-dd'))", 1709164800000),
    ('timestampadd(DAY, -1, ts)', 1699913600123),
    ("datediff('month', 1706659200000, 1709164800000)", 1),
    ('timestampdiff(HOUR, 0, ts)', 472222),
    ("datebin('15 minutes', ts, 0)", '2023-11-14 22:00:00.0'),
    ('toiso8601(ts)', '2023-11-14T22:13:20.123Z'),
    ("fromiso8601('2023-11-14T22:13:20.123Z')", 1700000000123),
    ("case when i > 5 then 'big' end", 'big'),
    ('case when i > 50 then d end', 0.0),
    ('i is distinct from 7', False),
    ("ts = '2023-11-14 22:13:20.123'", True),
    ('ts > 1700000000122', True),
    ("y = '01fe6162'", True),
    ('json_match(j, \'"$.a.b[*].c" = \'\'x\'\'\')', True),
    ("s like 'H%!, W_rld' escape '!'", True),
    ("s not like 'h%'", True),
    ("regexp_like(s, 'w.rld$', 'i')", True),
    ('"$partitionId"', ['0']),
    ('"$segmentName"', 'segment_0'),
    ('"$docId"', 0),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), CASES, ids=[expression for expression, _ in CASES])
def test_a_function_gives_pinots_value(table: Sql, expression: str, expected: Any) -> None:
    assert table.value(expression) == (pytest.approx(expected, rel=1e-12) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(("query", "expected"), [
    ("select b, count(*) from t group by now(), b order by 3 - 1, b", [[False, 2], [True, 1]]),
    ("select b, count(*) from t group by 2 - 1, b order by cast(9 as int), b desc", [[True, 1], [False, 2]]),
    ("select now() > 5, count(*) from t group by now()", [[True, 3]]),
    ("select i from t order by 2 - 1, i", [[-2147483648], [-3], [7]]),
    ("select distinct b from t order by 9 + 0, 1", [[False], [True]]),
    ("select b, count(*) from t group by b order by 2 desc, 1", [[False, 2], [True, 1]]),
])  # fmt: skip
def test_a_written_number_is_a_position_and_a_computed_one_is_not(
    table: Sql, query: str, expected: list[list[Any]]
) -> None:
    assert table.rows(query) == expected


@pytest.mark.parametrize("expression", [expression for expression, _ in CASES if "json_match" not in expression])
def test_a_function_of_missing_cells_is_no_error_and_null_without_a_default(table: Sql, expression: str) -> None:
    """Null handling on, the row whose cells are missing: NULL, or what the function makes of its literals."""
    rows = table.rows(f"SET enableNullHandling=true; SELECT {expression} FROM t WHERE i IS NULL LIMIT 1")
    assert len(rows) == 1


@pytest.mark.parametrize(("expression", "expected"), [
    ("upper(s)", None), ("i + 1", None), ("cast(d as string)", None), ("split(s, ',')", None), ("md5(y)", None),
    ("json_extract_scalar(j, '$.a', 'STRING')", None), ("datetrunc('day', ts)", None), ("todatetime(ts, 'yyyy')", None),
    ("regexp_extract(s, 'a')", None), ("p * 2", None), ("arraylength(ss)", None), ("coalesce(s, 'x')", "x"),
    ("case when i > 1 then 'a' else 'b' end", "b"), ("i is distinct from 3", True),
    ("i is not distinct from null", True),
    ("i = 3", None), ("not i = 3", None), ("i = 3 or true", True), ("i = 3 and false", False), ("i in (1, 2)", None),
    ("i not in (1, 2)", None), ("s like 'a%'", None), ("i between 1 and 2", None), ("nullif(i, 7)", None),
    ("json_extract_scalar(j, '$.zz', 'INT')", None), ("concat_ws('-', s, 'a')", "a"), ("array_length(ii)", None),
])  # fmt: skip
def test_null_handling_is_three_valued(table: Sql, expression: str, expected: Any) -> None:
    assert table.rows(f"SET enableNullHandling=true; SELECT {expression} FROM t WHERE i IS NULL")[0][0] == expected


@pytest.mark.parametrize(("where", "expected"), [
    ("ss = 'k2'", 1), ("ss <> 'k2'", 2), ("ss >= 'k2'", 2), ("ss < 'b'", 1), ("ss in ('a', 'k1')", 2),
    ("ss not in ('a')", 2),
    ("ss between 'k2' and 'k9'", 1), ("ss not between 'k2' and 'k9'", 2), ("regexp_like(ss, '^K', 'i')", 1),
    ("not regexp_like(ss, '^k')", 2), ("ss like 'k_'", 1), ("ss not like 'k_'", 2), ("ii > 4", 1), ("ii > 4.5", 1),
    ("ii <= 1e30", 3), ("ii = 2.5", 0), ("ii <> 2.5", 3), ("ii between 1.5 and 3.5", 1), ("dd < 0", 2), ("dd = 0", 1),
    ("arraylength(valuein(ss, 'k1')) = 1", 1), ("mapvalue(ss, 'k1', ii) = 3", 1), ("\"$partitionId\" = '0'", 3),
    ("y = '01fe6162'", 1), ("y <> ''", 1), ("b", 1), ("b = 'false'", 2), ("ts = '1970-01-01'", 2), ("p < 0", 1),
    ("p in (12.50, 3)", 1), ("n > 1.5e12 or n = 2", 1), ("json_match(j, '\"$.n\" = ''12''')", 1),
    ("i is distinct from -3", 2), ("s = '' and num = 7", 1), ("i in (7, n)", 1),
    ("datetrunc('day', ts) = fromdatetime('2023-11-14', 'yyyy-MM-dd')", 1),
])  # fmt: skip
def test_predicates_hold_for_the_rows_they_should(engine: Engine, table: Sql, where: str, expected: int) -> None:
    assert table.count(where) == expected
    assert Sql(engine, SCHEMA, []).count(where) == 0, "and for no rows of an empty server"


@pytest.mark.parametrize(("sql", "expected"), [
    ("select distinct b from t order by b", [[False], [True]]),
    ("select i as x, count(*) from t group by x order by x desc limit 1", [[7, 1]]),
    ("select i, count(*) from t group by 1 order by 1 desc limit 1", [[7, 1]]),
    ("select upper(num), count(*) from t group by upper(num) order by 2 desc, 1", [["7", 2], ["42", 1]]),
    ("select sum(secs) from t having count(*) > 2", [[-447483648.0]]),
    ("select count(*) from t having count(*) > 3", []),
    ("select t.i, t.\"s\" from t where \"t\".\"i\" = 7;", [[7, "Hello, Wörld"]]),
    ("select i from t order by i limit 1, 1", [[-3]]),
    ("set a = 1; set b = 'x'; select /* why */ i from t -- because\n where i = 7;", [[7]]),
    ("select count(*) from t where ln(-1 - i) / 0 > 1e300 or 0 / (i - i) > 1e308", [[3]]),
    ("select i from t where i > 0 order by (d - d) / (i - i) limit 1", [[7]]),
    ("select greatest(5, (d - d) / (i - i)), least(5, mod(d, 0)) from t where i = 7", [["NaN", 5.0]]),
    ("select i as 'The i' from t where i = 7 option(timeoutMs=1000, x=y)", [[7]]),
    ("select 1 from t", [[1]]),
    ("select d from t order by d desc limit 1", [[1e300]]),
    ("select p from t order by p", [["-0.001"], ["0"], ["12.5"]]),
    ("select p, count(*) from t group by p order by p desc limit 2", [["12.5", 1], ["0", 1]]),
    ("select valuein(ii, 3), count(*) from t group by valuein(ii, 3)", [[3, 2]]),
    ("set enableNullHandling=true; select i from t order by i", [[-3], [7], [None]]),
    ("set enableNullHandling=true; select i from t order by i desc", [[None], [7], [-3]]),
    ("set enableNullHandling=true; select i from t order by i desc nulls last", [[7], [-3], [None]]),
    ("set enableNullHandling=true; select i from t order by i nulls first", [[None], [-3], [7]]),
])  # fmt: skip
def test_the_dialect_means_what_pinot_means(table: Sql, sql: str, expected: list[list[Any]]) -> None:
    assert table.rows(sql) == expected


@pytest.mark.parametrize(("sql", "code", "text"), [
    ("select json_extract_scalar(j, '$.zz', 'INT') from t", 200, "Cannot resolve JSON path $.zz on some records"),
    ("select cast(s as int) from t", 200, "'Hello, Wörld' is not a value of type INT"),
    ("select p / 0 from t", 200, "division of BIG_DECIMAL by zero"),
    ("select sumprecision(s) from t", 200, "is not a value of type BIG_DECIMAL"),
    ("select repeat(repeat(s, 30000), 30000) from t", 200, "are allowed"),
    ("select levenshteinDistance(repeat(s, 30000), repeat(s, 29000)) from t", 200, "shorten them with SUBSTR"),
    ("select fromdatetime(s, 'yyyy') from t", 200, "does not fit the pattern"),
    ("select count(*) from t where text_match(s, 'x')", 700, "TEXT_MATCH is not supported"),
    ("select regexp_replace(s, '(?=x)', 'y') from t", 700, "lookahead"),
    ("select regexp_extract(s, '(a)\\1') from t", 700, "backreference"),
    ("select count(*) from t where regexp_like(s, '[a')", 700, "is not closed"),
    ("select json_extract_scalar(j, 'a.b', 'INT') from t", 700, "does not begin with $"),
    ("select json_extract_scalar(j, '$.a', 'INTEGERS') from t", 700, "unknown type"),
    ("select todatetime(ts, 'yyyy-QQ') from t", 700, "letter 'Q'"),
    ("select hour(ts, 'Mars/Olympus') from t", 700, "unknown time zone"),
    ("select datetimeconvert(ts, 'x', 'y', 'z') from t", 700, "not a date-time format"),
    ("select md5(s) from t", 700, "takes BYTES"),
    ("select substr(s, 5, 2) from t", 700, "SUBSTR"),
    ("select upper(i) from t", 700, "takes a STRING"),
    ("select lpad(s, 3) from t", 700, "lpad takes 3 arguments, found 2"),
    ("select i + s from t", 700, "takes a number"),
    ("select uper(s) from t", 700, "did you mean 'upper'?"),
    ("select numm from t", 710, "did you mean 'num'?"),
])  # fmt: skip
def test_what_cannot_be_computed_says_why(table: Sql, sql: str, code: int, text: str) -> None:
    with pytest.raises(QueryError) as raised:
        table.rows(sql)
    assert (int(raised.value.code), text in str(raised.value)) == (code, True), str(raised.value)


@pytest.mark.parametrize("expression", [
    "fromdatetime('2024-02-29 23:59', 'yyyy-MM-dd HH:mm', 'Asia/Tokyo')", "fromiso8601('2024-02-29T01:02:03.004Z')",
    "datetrunc('week', 1700000000123)", "datetrunc('quarter', 1700000000123)", "datetrunc('day', -1)",
    "dateadd('hour', -3, 1700000000123)", "toepochdays(-1)", "toepochhours(1700000000123)", "fromepochminutes(-7)",
    "toepochseconds(-1999)", "datetrunc('year', fromdatetime('1999', 'yyyy'))", "dateadd('week', -2, 5)",
])  # fmt: skip
def test_what_is_computed_at_the_broker_is_what_the_engine_computes(table: Sql, expression: str) -> None:
    query, _ = parse_query(f"select {expression}")
    folded = fold_constants(query.items[0].expr)
    assert isinstance(folded, Literal)
    assert folded.value == table.rows(f"select {expression}, i from t limit 1")[0][0]


@pytest.mark.parametrize(("sql", "expected"), [
    ("select json_extract_scalar(j, '$.q', 'LONG', n) from t where i <> 7 order by i", [[-(2**63)], [2]]),
    ("select json_extract_scalar(j, '$.n', 'STRING', num) from t where num <> '' order by num", [["12"], ["7"], ["7"]]),
    ("select jsonpathlong(j, '$.q', i) from t order by i desc", [[7], [-3], [-(2**31)]]),
    ("select fromdatetime(num, 'yyyy-MM-dd', 'UTC', n) from t order by n desc", [[1234567890123], [2], [-(2**63)]]),
    ("select fromdatetime(day, 'yyyy-MM-dd HH:mm', 'UTC', n) from t where i = -3", [[-60000]]),
])  # fmt: skip
def test_a_default_that_is_a_column_is_that_of_its_row(table: Sql, sql: str, expected: list[list[Any]]) -> None:
    assert table.rows(sql) == expected


@pytest.mark.parametrize("expression", [
    "lpad(num, 6, day)", "rpad(num, 6, day)", "repeat(num, day, 2)", "arraytostring(ss, num)",
    "arraytostring(ss, ',', num)",
])  # fmt: skip
def test_what_is_one_for_all_rows_must_be_a_literal(table: Sql, expression: str) -> None:
    with pytest.raises(QueryError, match="must be a literal"):
        table.rows(f"select {expression} from t")


@pytest.mark.parametrize("sql", [
    "select i from t where datetrunc(5, 7) = 3", "select i from t where ts > dateadd(1, 2, 3)",
    "select cast('inf' as long) from t", "select cast('-Infinity' as int)", "select cast('99999999999' as int) from t",
    "select bitand(n, 1e999) from t", "select json_extract_scalar(j, '$.a', 'INT', 1e999) from t",
    "select arraycontains(ii, 1e999) from t", "select arrayindexof(ii, 99999999999) from t",
])  # fmt: skip
def test_a_literal_that_is_no_value_of_the_type_is_refused(table: Sql, sql: str) -> None:
    with pytest.raises(QueryError) as raised:
        table.rows(sql)
    assert int(raised.value.code) == 700


@pytest.mark.parametrize(("where", "expected"), [
    ("100000000000000000 = 1e17", 3), ("n = 1.234567890123e12", 1), ("n < 1e999", 3), ("n in (1e18, 2)", 1),
    ("ii = 99999999999", 0), ("ii <> 99999999999", 3), ("ii < 99999999999", 3), ("ii > -99999999999", 3),
    ("ii in (99999999999, 5)", 1), ("ii not in (99999999999)", 3), ("ii between 1 and 1e999", 2),
    ("ii between 99999999999 and 999999999999", 0), ("ii between '-inf' and 'inf'", 3),
    ("ts > fromiso8601(5)", 1),
])  # fmt: skip
def test_literals_beyond_the_type_of_a_column_mean_what_they_say(table: Sql, where: str, expected: int) -> None:
    assert table.count(where) == expected


@pytest.mark.parametrize(("expression", "expected"), [
    ("timeconvert(n, 'MICROSECONDS', 'MICROSECONDS')", 1234567890123),
    ("timeconvert(n, 'MICROSECONDS', 'NANOSECONDS')", 1234567890123000),
    ("timeconvert(n, 'NANOSECONDS', 'MICROSECONDS')", 1234567890),
    ("strrpos(s, 'l', -5)", -1),
    ("cast(99999999999 as int)", 1215752191),
    ("mod(1e999, 3)", "NaN"),
    ("""json_extract_scalar('{"a\\"b": 5}', '$[''a"b'']', 'INT')""", 5),
    ("""json_extract_scalar('{"a\\\\b": 6}', '$[''a\\\\b'']', 'INT')""", 6),
    ("p is distinct from n", True),
    ("p is not distinct from cast(12.5 as big_decimal)", True),
])  # fmt: skip
def test_an_odd_argument_gives_pinots_value(table: Sql, expression: str, expected: Any) -> None:
    assert table.value(expression) == expected


def test_an_infinite_literal_is_shown_as_a_text(table: Sql) -> None:
    assert table.rows("select 1e308 * 10") == [["Infinity"]]


@pytest.mark.parametrize("part", ["year", "quarter", "month", "week", "dayOfYear", "dayOfWeek", "hour", "millisecond"])
@pytest.mark.parametrize("zone", ["", ", 'Europe/Berlin'"])
def test_parts_of_a_missing_time_do_not_end_the_query(table: Sql, part: str, zone: str) -> None:
    """The default of a LONG is a time of no calendar."""
    values = [row[0] for row in table.rows(f"select {part}(n{zone}) from t order by n")]
    assert None not in values
    long_text = "n" + " + 0" * 40
    assert values == [row[0] for row in table.rows(f"select {part}({long_text}{zone}) from t order by n")]


def test_a_null_time_has_no_parts(table: Sql) -> None:
    assert table.rows("set enableNullHandling = true; select year(n) from t where n is null") == [[None]]


@pytest.mark.parametrize("arguments", ["ss, ','", "ss, ',', 'none'"])
def test_a_null_list_has_no_text(table: Sql, arguments: str) -> None:
    sql = f"set enableNullHandling = true; select arraytostring({arguments}) from t where ss is null"
    assert table.rows(sql) == [[None]]


@pytest.mark.parametrize("expression", [
    "arraymax(array[p, 2])", "arraymin(array[p, 10])", "arraysort(array[p, 9, 10])",
])  # fmt: skip
def test_texts_of_decimals_are_not_put_in_order(table: Sql, expression: str) -> None:
    with pytest.raises(QueryError, match="of BIG_DECIMAL is not supported"):
        table.rows(f"select {expression} from t")


@pytest.mark.parametrize("expression", [
    "hour(ts, '+99:99')", "fromdatetime('x', 'yyyy', '+25:00')", "datetrunc('day', ts, 'SECONDS', '-24:00')",
])  # fmt: skip
def test_an_offset_of_more_than_a_day_is_no_zone(table: Sql, expression: str) -> None:
    with pytest.raises(QueryError, match="unknown time zone"):
        table.rows(f"select {expression} from t")
