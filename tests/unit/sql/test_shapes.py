# SPDX-License-Identifier: Apache-2.0
"""Texts of one shape: what is read from a template is what parsing gives, whatever the literals are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sqlfuzz
from tests.unit.sql.test_plans import CASES, NOW_MS, lookup

from cremant.model.errors import QueryError
from cremant.model.limits import PLANS_CACHED_MAX
from cremant.sql import shapes
from cremant.sql.dialect import tokens_of
from cremant.sql.planner import Planner, parse_query
from cremant.sql.shapes import Parsed, Shapes

#: Literals that parsers have ideas of their own about.
TEXTS = ("", "it's", "both", "DAY", "option", "1 day", "aMarkOfLiteral1", "2000000001", "'", "--", "😀", "a\nb", "true")
NUMBERS = ("0", "1", "2", "007", "2000000000", "2000000001", "2147483648", "123456789012345678", "9" * 19, "1" * 400)


def varied(text: str, dice: random.Random) -> str:
    """The same text with other literals."""
    pieces, at = [], 0
    for token in tokens_of(text):
        kind = token.token_type.name
        if kind in ("STRING", "NUMBER"):
            other = dice.choice(TEXTS).replace("'", "''") if kind == "STRING" else dice.choice(NUMBERS)
            pieces += [text[at : token.start], f"'{other}'" if kind == "STRING" else other]
            at = token.end + 1
    return "".join([*pieces, text[at:]])


def outcome(parse: Any, text: str) -> Parsed | str:
    try:
        found: Parsed = parse(text)
    except QueryError as error:
        return f"{int(error.code)} {error}"
    return found


def corpus() -> list[str]:
    dice = random.Random(5)
    generated = [sqlfuzz.Grammar(dice, nulls=bool(number % 2)).query().ours for number in range(150)]
    fixtures = [case.values[0]["query"] for case in CASES]
    return [text for text in [*generated, *fixtures] if isinstance(text, str)]


def test_what_a_template_gives_is_what_parsing_gives() -> None:
    dice, parses = random.Random(7), []

    def parse(text: str) -> Parsed:
        parses.append(text)
        return parse_query(text)

    asked = 0
    for text in corpus():
        known = Shapes(parse, PLANS_CACHED_MAX)
        others = [] if "closed" in str(outcome(parse_query, text)) else [varied(text, dice) for _ in range(12)]
        for other in [text, text, *others, text]:
            asked += 1
            assert outcome(known.parse, other) == outcome(parse_query, other), other
    assert len(parses) < asked * 1.5, "more is parsed than without"


POINT = "select user_id, country, clicks from gold where user_id = {} and country = '{}' limit 5"


def test_texts_of_one_shape_are_parsed_once() -> None:
    parses = []

    def parse(text: str) -> Parsed:
        parses.append(text)
        return parse_query(text)

    known = Shapes(parse, 10)
    for number in range(100):
        text = POINT.format(number, f"c{number}")
        assert known.parse(text) == parse_query(text)
    assert len(parses) == 5, "two texts, once with marks for all literals, and twice with the limit as it is"
    known.parse(POINT.format(1, "x").replace("limit 5", "limit 6"))
    assert len(parses) == 8, "another limit is another query"


@pytest.mark.parametrize(("first", "second"), [
    ("select clicks, ok from gold order by 1", "select clicks, ok from gold order by 2"),
    ("select clicks from gold limit 3", "select clicks from gold limit 4"),
    ("set timeoutMs = 10; select clicks from gold", "set timeoutMs = 20; select clicks from gold"),
    ("select clicks from gold option(timeoutMs=10)", "select clicks from gold option(timeoutMs=20)"),
    ("select clicks 'a' from gold", "select clicks 'b' from gold"),
    ("select 1 + 2 from gold", "select 1 + 3 from gold"),
    ("select clicks + 5 / 2 from gold", "select clicks + 5 / 0 from gold"),
    ("select 'a' from gold", "select 'b' from gold"), ("select clicks from gold where clicks = 1 or clicks = 2",
                                                     "select clicks from gold where clicks = 1 or clicks = 'x'"),
    ("select clicks from gold where ok = 1", "select clicks from gold where ok = 7"),
    ("select trim('x') from gold", "select trim('both') from gold"),
    ("select extract('year' from ts) from gold", "select extract('month' from ts) from gold"),
    ("select percentile(clicks, 50) from gold", "select percentile(clicks, 99) from gold"),
    ("select clicks from gold where user_id in (-1, 2)", "select clicks from gold where user_id in (-3, 0)"),
    ("select - 5, clicks - 5, clicks - -5 from gold", "select - 0, clicks - 7, clicks - -8 from gold"),
    # Arithmetic that gives what would be a mark, had the literal of its number been a whole number.
    ("select clicks from gold where country = 'x' and clicks < 1000000000 + 1000000000",
     "select clicks from gold where country = 'y' and clicks < 1000000000 + 1000000000"),
])  # fmt: skip
def test_a_plan_of_known_shape_is_the_plan_of_its_own_literals(first: str, second: str) -> None:
    planner = Planner()
    for text in (first, first + " ", first + "  ", second, second + " ", first + "   "):
        found = outcome(lambda text: planner.plan(text, "", lookup, NOW_MS), text)
        assert found == outcome(lambda text: Planner().plan(text, "", lookup, NOW_MS), text)


def test_a_shape_whose_template_would_say_something_else_is_parsed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Shapes(parse_query, 10)
    monkeypatch.setattr(shapes, "_filled", lambda literal, texts: literal)
    for number in range(5):
        text = POINT.format(number, "x")
        assert known.parse(text) == parse_query(text)
