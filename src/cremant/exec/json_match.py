# SPDX-License-Identifier: Apache-2.0
"""JSON_MATCH by evaluation: `"$.items[*].id" = 7 AND "$.items[*].ok" = 'true'` over a parsed document.

Rules, as of Pinot's JSON index:

- A document is flattened: one record per choice of an element of each array that the filter mentions. The document
  matches if one record satisfies the whole filter, so conditions on `[*]` of one array speak of one element.
- An exclusive condition (`!=`, NOT IN, IS NULL, NOT) stands alone and speaks of the document: no record satisfies
  the opposite.
- Equality compares texts (and numbers as numbers); order compares numbers with number literals, else texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.errors import QueryError
from cremant.model.jsonpath import Every, parse_path
from cremant.sql.ir import Call, Column, Expr, Literal
from cremant.sql.jsons import filter_condition

#: Records of one document: beyond it the arrays of a filter multiply.
_RECORDS_MAX = 10_000

Way = tuple[str | int, ...]
Record = dict[Way, Any]
_EVERY = "[*]"
_OPPOSITES = {"not_equals": "equals", "not_in": "in", "is_null": "is_not_null", "not_like": "like"}
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "greater_than": lambda a, b: a > b,
    "greater_than_or_equal": lambda a, b: a >= b,
    "less_than": lambda a, b: a < b,
    "less_than_or_equal": lambda a, b: a <= b,
}


class JsonFilter:
    """A parsed filter. Raises ValueError for one that is not supported."""

    def __init__(self, text: str) -> None:
        try:
            where = filter_condition(text)
        except QueryError as error:
            raise ValueError(str(error)) from error
        self._negated = False
        if isinstance(where, Call) and where.name == "not":
            self._negated, where = True, where.args[0]
        elif isinstance(where, Call) and where.name in _OPPOSITES:
            self._negated, where = True, Call(_OPPOSITES[where.name], where.args)
        self._ways: dict[Way, None] = {}
        self._holds = self._compile(where)
        self._tree: dict[Any, Any] = {}
        for way in self._ways:
            node = self._tree
            for step in way:
                node = node.setdefault(step, {})

    def holds(self, document: Any) -> bool:
        found = any(self._holds(record) for record in _records(document, self._tree, ()))
        return found != self._negated

    def _compile(self, expr: Expr) -> Callable[[Record], bool]:
        match expr:
            case Call("and", args):
                parts = [self._compile(arg) for arg in args]
                return lambda record: all(part(record) for part in parts)
            case Call("or", args):
                parts = [self._compile(arg) for arg in args]
                return lambda record: any(part(record) for part in parts)
            case Call("is_not_null", (path,)):
                way = self._way(path)
                return lambda record: record.get(way) is not None
            case Call("equals", (path, Literal() as value)):
                return self._test(path, _equal_to(value))
            case Call("in", (path, *values)) if all(isinstance(value, Literal) for value in values):
                tests = [_equal_to(value) for value in values if isinstance(value, Literal)]
                return self._test(path, lambda found: any(test(found) for test in tests))
            case Call("between", (path, Literal() as low, Literal() as high)):
                above, below = _ordered("greater_than_or_equal", low), _ordered("less_than_or_equal", high)
                return self._test(path, lambda found: above(found) and below(found))
            case Call("regexplike", (path, Literal(str() as pattern))):
                return self._test(path, lambda found: _contains_match(_text(found), pattern))
            case Call(name, (path, Literal() as value)) if name in _ORDERS:
                return self._test(path, _ordered(name, value))
            case Call(name) if name in _OPPOSITES or name == "not":
                raise ValueError("JSON_MATCH: an exclusive condition (!=, NOT IN, IS NULL, NOT) must stand alone")
        raise ValueError("JSON_MATCH: supported are =, <, <=, >, >=, IN, BETWEEN, REGEXP_LIKE, IS NOT NULL, AND, OR")

    def _test(self, path: Expr, test: Callable[[Any], bool]) -> Callable[[Record], bool]:
        way = self._way(path)

        def holds(record: Record) -> bool:
            found = record.get(way)
            return found is not None and test(found)

        return holds

    def _way(self, path: Expr) -> Way:
        name = path.name if isinstance(path, Column) else path.value if isinstance(path, Literal) else None
        if not isinstance(name, str):
            raise ValueError('JSON_MATCH: a condition begins with a path in double quotes, like "$.a.b"')
        steps: list[str | int] = []
        for step in parse_path(name).steps:
            if not isinstance(step, str | int | Every):
                raise ValueError(f"JSON_MATCH: path {name!r} may have keys, [n] and [*] only")
            steps.append(_EVERY if isinstance(step, Every) else step)
        way = tuple(steps)
        self._ways[way] = None
        return way


def _contains_match(text: str, pattern: str) -> bool:
    """RE2, as everywhere: its time is bounded by the text's length."""
    return bool(pc.match_substring_regex(pa.scalar(text), pattern).as_py())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _equal_to(literal: Literal) -> Callable[[Any], bool]:
    number = literal.value if isinstance(literal.value, int | float) and not isinstance(literal.value, bool) else None

    def test(found: Any) -> bool:
        if number is not None and isinstance(found, int | float) and not isinstance(found, bool):
            return bool(found == number)
        return _text(found) == literal.text

    return test


def _ordered(name: str, literal: Literal) -> Callable[[Any], bool]:
    compare, value = _ORDERS[name], literal.value

    def test(found: Any) -> bool:
        if isinstance(value, str):
            return compare(_text(found), value)
        try:
            return compare(float(found), value)
        except (TypeError, ValueError):
            return False

    return test


def _records(value: Any, tree: dict[Any, Any], way: Way) -> Iterator[Record]:
    """The document as flat records of the ways in `tree`."""
    base: Record = {way: value} if way or not tree else {}
    partials = [base]
    keys = [step for step in tree if isinstance(step, str) and step != _EVERY]
    for key in keys:
        if isinstance(value, dict) and key in value:
            found = list(_records(value[key], tree[key], (*way, key)))
            partials = _product(partials, found)
    elements = [step for step in tree if step == _EVERY or isinstance(step, int)]
    if elements and isinstance(value, list) and value:
        found = []
        for index, element in enumerate(value):
            choices: list[Record] = [{}]
            for step in elements:
                if step == _EVERY or step in (index, index - len(value)):
                    choices = _product(choices, list(_records(element, tree[step], (*way, step))))
            found += choices
        partials = _product(partials, found)
    yield from partials


def _product(left: list[Record], right: list[Record]) -> list[Record]:
    if len(left) * len(right) > _RECORDS_MAX:
        raise ValueError(f"JSON_MATCH: the arrays of a document have more than {_RECORDS_MAX} combinations")
    return [{**a, **b} for a in left for b in right] if right else left
