# SPDX-License-Identifier: Apache-2.0
"""Generates typed SQL of the supported surface, each piece in two dialects: ours (Pinot's) and DuckDB's.

A fragment is `(ours, theirs)`. Where Pinot means something else than DuckDB, `theirs` says what Pinot means: arithmetic
is DOUBLE, `substr` counts from 0 with an exclusive end, a positive predicate on a multi-value column holds if any
element does and an exclusive one if all do, aggregations of no rows have Pinot's values. What has no answer that both
can give exactly (sums of doubles of very different size, signed zeros, casts out of range) is not generated.

Everything is drawn from one `random.Random`: a seed is a query.
"""

from __future__ import annotations

import random
from typing import NamedTuple

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

#: (name, Pinot's type, multi-value, metric). `d` holds quarters, so that its sums are exact in any order; `x` extremes.
#: `j` is read by functions only: its text is the producer's.
COLUMNS: tuple[tuple[str, str, bool, bool], ...] = (
    ("i", "INT", False, False),
    ("n", "INT", False, True),
    ("l", "LONG", False, False),
    ("d", "DOUBLE", False, True),
    ("x", "DOUBLE", False, True),
    ("f", "FLOAT", False, True),
    ("p", "BIG_DECIMAL", False, True),
    ("s", "STRING", False, False),
    ("w", "STRING", False, False),
    ("b", "BOOLEAN", False, False),
    ("t", "TIMESTAMP", False, False),
    ("y", "BYTES", False, False),
    ("j", "JSON", False, False),
    ("ss", "STRING", True, False),
    ("ii", "INT", True, False),
)

WORDS = (
    "",
    "a",
    "b",
    "ab",
    "A%b_c",
    "it's",
    "é",
    "Ωmega",
    "日本",
    "😀 smile",
    "back\\slash",
    " pad ",
    "null",
    "z" * 40,
)
LONGS = (0, 1, -1, 7, 2**31, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63) + 1)
INTS = (0, 1, 2, 3, -1, -2, 10, 2**31 - 1, -(2**31) + 1)
EXTREMES = (0.0, 0.5, 1e308, -1e308, 5e-324, 1e-9, -2.5, 1e18, 123456789.125)
FLOATS = (0.0, 0.1, 0.5, -2.25, 7.0, 1e-40, 3.4e38, -3.4e38, 1e10, 0.30000001192092896)
#: What DuckDB holds as DECIMAL(38, 6); some differ in their last digit only.
DECIMALS = (
    "0", "0.1", "-2.25", "0.000001", "100", "12345678901234567890.123456", "12345678901234567890.123457",
    "-12345678901234567890.123456", "9223372036854775808", "0.3", "7",
)  # fmt: skip
BYTES = ("", "00", "01", "0100", "ff", "7f00ff", "deadbeef")
PATTERNS = ("a%", "%b", "_", "%'%", "%本%", "A\\%b\\_c", "%", "", "é", "_b%", "%%s%")
REGEXES = ("^a", "b$", "[a-z]+", "é|Ω", "^$", ".*s", "A%b", "\\s")


class Pair(NamedTuple):
    ours: str
    theirs: str


class Query(NamedTuple):
    ours: str
    theirs: str
    ordered: bool


def json_of(dice: random.Random) -> dict[str, object]:
    """`a` is a number, its text, null or missing, `b` a word, `c` a list of small numbers."""
    document: dict[str, object] = {"b": dice.choice(WORDS), "c": [dice.randrange(4) for _ in range(dice.randrange(4))]}
    if dice.random() < 0.8:
        document["a"] = dice.choice([0, 1, 7, -3, "7", None])
    return document


def text(value: str) -> Pair:
    literal = "'" + value.replace("'", "''") + "'"
    return Pair(literal, literal)


def _decimal(value: str) -> str:
    return f"'{value}'::decimal(38, 6)"


_JSON_NUMBER = Pair(
    "jsonextractscalar(j, '$.a', 'LONG', 5)",
    "case when j is not null then coalesce(try_cast(json_extract_string(j, '$.a') as bigint), 5) end",
)
_JSON_WORD = Pair(
    "jsonextractscalar(j, '$.b', 'STRING', 'none')",
    "case when j is not null then coalesce(json_extract_string(j, '$.b'), 'none') end",
)


class Grammar:
    """One query after the other from `dice`. `nulls`: null handling is on (three-valued logic, aggregates skip)."""

    def __init__(self, dice: random.Random, *, nulls: bool) -> None:
        self._dice = dice
        self._nulls = nulls

    # --- expressions ---

    def pick(self, *options: Pair | str) -> Pair:
        chosen = self._dice.choice(options)
        return chosen if isinstance(chosen, Pair) else Pair(chosen, chosen)

    def number(self, depth: int) -> Pair:
        if depth <= 0 or self._dice.random() < 0.4:
            kind = self._dice.randrange(8)
            if kind < 5:
                return self.pick("i", "n", "l", "d", "x", "f", _JSON_NUMBER)
            value = self._dice.choice(INTS) if kind == 5 else self._dice.randrange(-12, 40) / 4
            return Pair(f"{value}", f"({value})")
        a, b = self.number(depth - 1), self.number(depth - 1)
        form = self._dice.randrange(10)
        if form < 4:
            sign = self._dice.choice("+-*")
            return self._unsigned_zero(a.ours, sign, b.ours, f"({a.theirs}::double {sign} {b.theirs}::double + 0)")
        if form == 4:
            return self._unsigned_zero(a.ours, "/", b.ours, f"({a.theirs}::double / {b.theirs}::double + 0)")
        if form == 5:
            name = self._dice.choice(["abs", "floor", "ceil"])
            return Pair(f"({name}({a.ours}) + 0)", f"({name}({a.theirs}::double) + 0)")
        if form == 6:
            c = self.condition(depth - 1)
            fallback = "null" if self._nulls else "0"
            return self.pick(
                Pair(f"case when {c.ours} then {a.ours} else {b.ours} end",
                     f"case when {c.theirs} then {a.theirs}::double else {b.theirs}::double end"),
                Pair(f"case when {c.ours} then {a.ours} end",
                     f"case when {c.theirs} then {a.theirs}::double else {fallback} end"),
            )  # fmt: skip
        if form == 7:
            name = self._dice.choice(["least", "greatest"])
            return Pair(f"{name}({a.ours}, {b.ours})", f"{name}({a.theirs}::double, {b.theirs}::double)")
        if form == 8:
            word = self.word(depth - 1)
            return Pair(f"length({word.ours})", f"length({word.theirs})")
        return self.pick(
            Pair("year(t)", "year(epoch_ms(t))"), Pair("month(t)", "month(epoch_ms(t))"),
            Pair("hour(t)", "hour(epoch_ms(t))"), Pair("dayofweek(t)", "isodow(epoch_ms(t))"),
            Pair("datetrunc('hour', t)", f"((t // {HOUR_MS}) * {HOUR_MS})"),
            Pair("datetrunc('month', t)", "epoch_ms(date_trunc('month', epoch_ms(t)))"),
        )  # fmt: skip

    def _unsigned_zero(self, a: str, sign: str, b: str, theirs: str) -> Pair:
        """Pinot orders -0.0 before 0.0 (Java's Double.compare), DuckDB holds them equal: adding 0 makes both 0.0."""
        return Pair(f"({a} {sign} {b} + 0)", theirs)

    def word(self, depth: int) -> Pair:
        if depth <= 0 or self._dice.random() < 0.5:
            return text(self._dice.choice(WORDS)) if self._dice.random() < 0.2 else self.pick("s", "w", "s", _JSON_WORD)
        a, b = self.word(depth - 1), self.word(depth - 1)
        first, length = self._dice.randrange(3), self._dice.randrange(1, 4)
        c = self.condition(depth - 1)
        guarded = f"({a.theirs} || '-' || {b.theirs})"
        return self.pick(
            Pair(f"upper({a.ours})", f"upper({a.theirs})"),
            Pair(f"lower({a.ours})", f"lower({a.theirs})"),
            Pair(f"concat({a.ours}, {b.ours}, '-')", guarded),
            Pair(f"substr({a.ours}, {first}, {first + length})", f"substring({a.theirs}, {first + 1}, {length})"),
            Pair(f"replace({a.ours}, 'a', 'xy')", f"replace({a.theirs}, 'a', 'xy')"),
            Pair(f"trim({a.ours})", f"trim({a.theirs})"),
            Pair(f"case when {c.ours} then {a.ours} else {b.ours} end",
                 f"case when {c.theirs} then {a.theirs} else {b.theirs} end"),
        )  # fmt: skip

    # --- conditions ---

    def condition(self, depth: int) -> Pair:
        if depth > 0 and self._dice.random() < 0.45:
            a, b = self.condition(depth - 1), self.condition(depth - 1)
            word = self._dice.choice(["and", "or"])
            return self.pick(
                Pair(f"({a.ours} {word} {b.ours})", f"({a.theirs} {word} {b.theirs})"),
                Pair(f"not ({a.ours})", f"not ({a.theirs})"),
            )
        kinds = [self._compare_numbers, self._compare_words, self._member, self._other, self._multi, self._stored]
        return self._dice.choice(kinds)(depth - 1)

    def _compare_numbers(self, depth: int) -> Pair:
        sign = self._dice.choice(["=", "<>", "<", "<=", ">", ">="])
        a, b = self.number(depth), self.number(depth)
        if self._dice.random() < 0.25:
            low, high = sorted((self._dice.randrange(-5, 12), self._dice.randrange(-5, 12)))
            word = self._dice.choice(["between", "not between"])
            return Pair(f"{a.ours} {word} {low} and {high}", f"{a.theirs} {word} {low} and {high}")
        return Pair(f"{a.ours} {sign} {b.ours}", f"{a.theirs} {sign} {b.theirs}")

    def _compare_words(self, depth: int) -> Pair:
        a, b = self.word(depth), self.word(depth)
        sign = self._dice.choice(["=", "<>", "<", "<=", ">", ">="])
        return Pair(f"{a.ours} {sign} {b.ours}", f"{a.theirs} {sign} {b.theirs}")

    def _member(self, depth: int) -> Pair:
        word = self._dice.choice(["in", "not in"])
        if self._dice.random() < 0.5:
            a = self.word(depth)
            listed = ", ".join(text(self._dice.choice(WORDS)).ours for _ in range(self._dice.randrange(1, 5)))
        else:
            a = self.pick("i", "n", "l")
            pool = LONGS if a.ours == "l" else INTS
            listed = ", ".join(str(self._dice.choice(pool)) for _ in range(self._dice.randrange(1, 5)))
        return Pair(f"{a.ours} {word} ({listed})", f"{a.theirs} {word} ({listed})")

    def _other(self, depth: int) -> Pair:
        column = self._dice.choice([name for name, _, multi, _ in COLUMNS if not multi])
        a, pattern = self.word(depth), self._dice.choice(PATTERNS)
        regex = self._dice.choice(REGEXES)
        null_test = column if self._nulls else f"null_{column}"
        is_null = (
            (f"{null_test} is null", f"{null_test} is not null") if self._nulls else (null_test, f"not {null_test}")
        )
        quoted = text(pattern).ours
        return self.pick(
            "b", "not b", "b = true", "b <> false",
            Pair(f"{a.ours} like {quoted}", f"{a.theirs} like {quoted} escape '\\'"),
            Pair(f"{a.ours} not like {quoted}", f"{a.theirs} not like {quoted} escape '\\'"),
            Pair(f"regexp_like({a.ours}, '{regex}')", f"regexp_matches({a.theirs}, '{regex}')"),
            Pair(f"{column} is null", is_null[0]), Pair(f"{column} is not null", is_null[1]),
        )  # fmt: skip

    def _multi(self, depth: int) -> Pair:
        """Predicates on multi-value columns: any element for positive ones, all for exclusive ones."""
        if self._dice.random() < 0.5:
            column, value = "ss", text(self._dice.choice(WORDS)).ours
            listed = ", ".join(text(self._dice.choice(WORDS)).ours for _ in range(self._dice.randrange(1, 4)))
        else:
            column, value = "ii", str(self._dice.choice(INTS))
            listed = ", ".join(str(self._dice.choice(INTS)) for _ in range(self._dice.randrange(1, 4)))
        sign = self._dice.choice(["=", "<", ">="])

        def some(test: str) -> str:
            return f"len(list_filter({column}, lambda e: {test})) > 0"

        return self.pick(
            Pair(f"{column} {sign} {value}", some(f"e {sign} {value}")),
            Pair(f"{column} <> {value}", f"not ({some(f'e = {value}')})"),
            Pair(f"{column} in ({listed})", some(f"e in ({listed})")),
            Pair(f"{column} not in ({listed})", f"not ({some(f'e in ({listed})')})"),
        )

    def _stored(self, depth: int) -> Pair:
        """Columns whose stored form is not what engines compute with: literals take the column's type."""
        sign = self._dice.choice(["=", "<>", "<", "<=", ">", ">="])
        negated = self._dice.choice(["", "not "])
        listed = self._dice.sample(FLOATS, 3)
        floats = ", ".join(f"{value}" for value in listed), ", ".join(f"{value}::real" for value in listed)
        decimals = self._dice.sample(DECIMALS, 3)
        low, high = sorted(self._dice.sample(DECIMALS, 2), key=float)
        number = self._dice.choice(["i", "n", "l", "d"])
        data = self._dice.sample(BYTES, 2)
        held = "', '".join(data), ", ".join(f"unhex('{value}')" for value in data)
        return self.pick(
            Pair(f"f {sign} {listed[0]}", f"f {sign} {listed[0]}::real"),
            Pair(f"f {negated}in ({floats[0]})", f"f {negated}in ({floats[1]})"),
            Pair(f"f {sign} {number}", f"f::double {sign} {number}::double"),
            Pair(f"p {sign} '{decimals[0]}'", f"p {sign} {_decimal(decimals[0])}"),
            Pair(f"p {sign} {decimals[1]}", f"p {sign} {_decimal(decimals[1])}"),
            Pair(f"p {negated}in ({', '.join(repr(value) for value in decimals)})",
                 f"p {negated}in ({', '.join(_decimal(value) for value in decimals)})"),
            Pair(f"p {negated}between '{low}' and '{high}'",
                 f"p {negated}between {_decimal(low)} and {_decimal(high)}"),
            Pair(f"p {sign} {number}", f"p {sign} {number}::decimal(38, 6)"),
            Pair(f"y {sign} '{data[0]}'", f"y {sign} unhex('{data[0]}')"),
            Pair(f"y {negated}in ('{held[0]}')", f"y {negated}in ({held[1]})"),
        )  # fmt: skip

    # --- aggregations ---

    def aggregate(self) -> Pair:
        """The templates' `theirs`: SQL with `@` where a FILTER goes, `|`, and Pinot's value for no rows."""
        pair = self._dice.choice([self._sums, self._bounds, self._counts])()
        inner, empty = pair.theirs.split("|")
        ours, where = pair.ours, ""
        if self._dice.random() < 0.2:
            c = self.condition(1)
            ours, where = f"{ours} filter (where {c.ours})", f" filter (where {c.theirs})"
        sql = inner.replace("@", where)
        return Pair(ours, sql if self._nulls or not empty else f"coalesce({sql}, {empty})")

    def _sums(self) -> Pair:
        column = self._dice.choice(["n", "d", "case when b then d else 1 end"])
        return self.pick(
            Pair(f"sum({column})", f"(sum({column})@)::double|0"),
            Pair(f"avg({column})", f"(avg({column})@)::double|'-inf'::double"),
            Pair("sumprecision(p)", "rtrim(rtrim((sum(p)@)::varchar, '0'), '.')|'0'"),
        )

    def _bounds(self) -> Pair:
        column = self._dice.choice(["i", "n", "l", "d", "x", "t", "f", "p"])
        return self.pick(
            Pair(f"min({column})", f"(min({column})@)::double|'inf'::double"),
            Pair(f"max({column})", f"(max({column})@)::double|'-inf'::double"),
            Pair(f"minmaxrange({column})",
                 f"((max({column})@)::double - (min({column})@)::double)|'-inf'::double"),
        )  # fmt: skip

    def _counts(self) -> Pair:
        column = self._dice.choice(["i", "n", "l", "s", "w", "b", "x", "t", "f", "p", "y"])
        of_column = f"count({column})@|" if self._nulls else "count(*)@|"
        return self.pick(
            Pair("count(*)", "count(*)@|"), Pair(f"count({column})", of_column),
            Pair(f"distinctcount({column})", f"count(distinct {column})@|"),
            Pair(f"count(distinct {column})", f"count(distinct {column})@|"),
        )  # fmt: skip

    # --- queries ---

    def query(self) -> Query:
        return self._dice.choice([self._rows, self._groups, self._groups, self._distinct])()

    def _expression(self) -> Pair:
        depth = self._dice.randrange(3)
        kind = self._dice.randrange(7)
        if kind < 3:
            return self.number(depth)
        if kind < 5:
            return self.word(depth)
        return self.pick("b", "t", "ss", "ii", "f", "p", "y")

    def _where(self) -> tuple[str, str]:
        if self._dice.random() < 0.3:
            return "", ""
        c = self.condition(self._dice.randrange(4))
        return f" where {c.ours}", f" where {c.theirs}"

    def _rows(self) -> Query:
        # Literals alone are answered by a broker without asking anybody, as in Pinot: one column is always there.
        exprs = [self.pick("i", "s", "t"), *(self._expression() for _ in range(self._dice.randrange(4)))]
        ours_where, theirs_where = self._where()
        tail, ordered = " limit 100000", False
        if self._dice.random() < 0.6:
            ordered = True
            limit, offset = self._dice.randrange(30), self._dice.choice([0, 0, 3])
            tail = f" order by {self._sort_key()} limit {limit} offset {offset}"
        return Query(
            f"select {self._list(exprs, 'ours')} from events{ours_where}{tail}",
            f"select {self._list(exprs, 'theirs')} from events{theirs_where}{tail}", ordered,
        )  # fmt: skip

    def _sort_key(self) -> str:
        column = self._dice.choice(["i", "n", "l", "d", "x", "s", "w", "t", "b", "f", "p", "y"])
        direction = self._dice.choice(["asc", "desc"])
        nulls = self._dice.choice(["first", "last"])
        return f'{column} {direction} nulls {nulls}, "$offset"'

    def _keys(self) -> list[Pair]:
        keys: list[Pair] = []
        for _ in range(self._dice.randrange(1, 4)):
            key = self.pick(
                "i", "n", "l", "s", "w", "b", "t", "d", "f", "p", "y", self.word(1),
                Pair("(n % 3)", "(n::double % 3::double + 0)"),
                Pair("datetrunc('day', t)", f"((t // {DAY_MS}) * {DAY_MS})"),
                Pair("case when n > 2 then 'hi' else 'lo' end", "case when n > 2 then 'hi' else 'lo' end"),
            )  # fmt: skip
            if key not in keys and not key.ours.startswith("'"):
                keys.append(key)
        return keys or [Pair("s", "s")]

    def _groups(self) -> Query:
        keys = self._keys() if self._dice.random() < 0.8 else []
        exprs = [*keys, *(self.aggregate() for _ in range(self._dice.randrange(1, 4)))]
        ours_where, theirs_where = self._where()
        group = f" group by {', '.join(str(n + 1) for n in range(len(keys)))}" if keys else ""
        having = " having count(*) > 1" if keys and self._dice.random() < 0.2 else ""
        order, ordered = " limit 100000", not keys
        if keys and self._dice.random() < 0.5:
            ordered = True
            sort = ", ".join(
                f"{n + 1} {self._dice.choice(['asc', 'desc'])} nulls {self._dice.choice(['first', 'last'])}"
                for n in range(len(keys))
            )
            order = f" order by {sort} limit {self._dice.randrange(1, 20)} offset {self._dice.choice([0, 0, 2])}"
        tail = group + having + order
        return Query(
            f"select {self._list(exprs, 'ours')} from events{ours_where}{tail}",
            f"select {self._list(exprs, 'theirs')} from events{theirs_where}{tail}", ordered,
        )  # fmt: skip

    def _distinct(self) -> Query:
        keys = self._keys()
        ours_where, theirs_where = self._where()
        sort = ", ".join(f"{n + 1} asc nulls last" for n in range(len(keys)))
        tail = f" order by {sort} limit {self._dice.randrange(1, 50)}"
        return Query(
            f"select distinct {self._list(keys, 'ours')} from events{ours_where}{tail}",
            f"select distinct {self._list(keys, 'theirs')} from events{theirs_where}{tail}", True,
        )  # fmt: skip

    def _list(self, exprs: list[Pair], side: str) -> str:
        return ", ".join(f"{getattr(pair, side)} as c{index}" for index, pair in enumerate(exprs))
