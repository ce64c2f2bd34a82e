# SPDX-License-Identifier: Apache-2.0
"""Parses texts that differ in their literals only once per shape.

    SELECT a FROM t WHERE id = 7 LIMIT 5                      shape: all words, and where whole numbers and strings are
    SELECT a FROM t WHERE id = 2000000000 LIMIT 2000000001    the same with a mark in place of each of them

What the parser leaves as a literal of the query is *free*: another value can stand there. What it does not (a limit, a
position, an option, an alias, arithmetic that was folded) is *fixed*, and part of the key.

Rules:

- Only parsing is saved. The query with a text's own literals in it is bound as ever: whatever depends on a literal's
  type or value (comparisons, pruning, functions) is decided there.
- A template must give exactly the query of the text that it was made from; else the shape is parsed each time.
- It is made for the second text of its shape: most shapes come once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from sqlglot.errors import TokenError
from sqlglot.tokenizer_core import Token, TokenType

from cremant.model.errors import QueryError
from cremant.sql.dialect import check_characters, tokens_of
from cremant.sql.ir import Call, Expr, Item, Literal, Order, Query
from cremant.sql.recent import Recent

#: A query, and the options in its text.
Parsed = tuple[Query, dict[str, str]]

#: Whole numbers up to 18 digits are alike to the parser; other numbers are words of the shape.
_DIGITS_MAX = 18
#: Small enough for a limit. Letters of both cases: a mark that the parser changes is no mark any more.
_FIRST_MARK = 2_000_000_000
_TEXT_MARK = "aMarkOfLiteral"
#: Mark -> number of the literal in whose place it stands.
_Marks = dict[str | int, int]


@dataclass(frozen=True, slots=True)
class _Template:
    query: Query
    options: dict[str, str]
    marks: _Marks

    def filled(self, texts: Sequence[str]) -> Parsed:
        def change(literal: Literal) -> Literal:
            number = _number_of(literal, self.marks)
            return literal if number is None else _filled(literal, texts[number])

        return _mapped(self.query, change), self.options


class Shapes:
    """`parse` reads any text. Thread-safe as `Recent` is."""

    def __init__(self, parse: Callable[[str], Parsed], cached_max: int) -> None:
        self._parse = parse
        #: Numbers of the free literals by shape; None in a tuple: seen once.
        self._free: Recent[tuple[frozenset[int] | None]] = Recent(cached_max)
        self._templates: Recent[_Template] = Recent(cached_max)

    def parse(self, text: str) -> Parsed:
        """As `parse`, and equal to what it gives. Raises QueryError."""
        check_characters(text, "the query")
        try:
            shape, literals = _shape_of(text)
        except TokenError:
            return self._parse(text)  # which says what is wrong
        if not literals:
            return self._parse(text)
        known = self._free.get(shape)
        if known is None:
            self._free.put(shape, (None,))
            return self._parse(text)
        (free,) = known
        texts = [token.text for token in literals]
        if free is not None:
            if not free:
                return self._parse(text)
            template = self._templates.get(_key(shape, texts, free))
            if template is not None:
                return template.filled(texts)
        parsed = self._parse(text)
        if free is None:
            free = self._found(text, literals, frozenset(range(len(literals))))
        made = self._template(text, literals, free) if free else None
        if made is None or made.filled(texts) != parsed:
            self._free.put(shape, (frozenset(),))
        else:
            self._free.put(shape, (free,))
            self._templates.put(_key(shape, texts, free), made)
        return parsed

    def _template(self, text: str, literals: Sequence[Token], free: frozenset[int]) -> _Template | None:
        if self._found(text, literals, free) != free:
            return None
        return _Template(*self._parse(_marked(text, literals, free)), _marks(literals, free))

    def _found(self, text: str, literals: Sequence[Token], free: frozenset[int]) -> frozenset[int]:
        """Which of the marks, put in place of `free`, the query has as literals. None, if it cannot be told."""
        marks = _marks(literals, free)
        if _TEXT_MARK in text or not {str(mark) for mark in marks}.isdisjoint(token.text for token in literals):
            return frozenset()
        try:
            query, _ = self._parse(_marked(text, literals, free))
        except QueryError:
            return frozenset()
        found: set[int] = set()

        def look(literal: Literal) -> Literal:
            number = _number_of(literal, marks)
            if number is not None:
                found.add(number)
            return literal

        _mapped(query, look)
        return frozenset(found)


def _shape_of(text: str) -> tuple[tuple[Hashable, ...], list[Token]]:
    """The words of a text, and its literals. Raises TokenError."""
    words: list[Hashable] = []
    literals: list[Token] = []
    for token in tokens_of(text):
        kind, word = token.token_type, token.text
        if kind == TokenType.STRING:
            words.append("text")
        elif kind == TokenType.NUMBER and len(word) <= _DIGITS_MAX and word.isdecimal() and word.isascii():
            words.append("number")
        else:
            words.append((kind, word))
            continue
        literals.append(token)
    return tuple(words), literals


def _key(shape: Hashable, texts: Sequence[str], free: frozenset[int]) -> Hashable:
    return shape, tuple(text for number, text in enumerate(texts) if number not in free)


def _mark(number: int, token: Token) -> str | int:
    return f"{_TEXT_MARK}{number}" if token.token_type == TokenType.STRING else _FIRST_MARK + number


def _marks(literals: Sequence[Token], free: frozenset[int]) -> _Marks:
    return {_mark(number, literals[number]): number for number in free}


def _marked(text: str, literals: Sequence[Token], free: frozenset[int]) -> str:
    """`text` with marks in place of its free literals."""
    pieces, at = [], 0
    for number, token in enumerate(literals):
        if number in free:
            mark = _mark(number, token)
            pieces += [text[at : token.start], f"'{mark}'" if isinstance(mark, str) else str(mark)]
            at = token.end + 1
    return "".join([*pieces, text[at:]])


def _number_of(literal: Literal, marks: _Marks) -> int | None:
    """The number of the mark that a literal is."""
    match literal.value:
        case str(value):
            return marks.get(value)
        case int(value):
            return marks.get(abs(value))
    return None


def _filled(mark: Literal, text: str) -> Literal:
    if isinstance(mark.value, str):
        return Literal(text, text)
    negative = mark.text.startswith("-")
    return Literal(-int(text), f"-{text}") if negative else Literal(int(text), text)


def _mapped(query: Query, change: Callable[[Literal], Literal]) -> Query:
    """The query with each literal changed."""

    def mapped(expr: Expr) -> Expr:
        match expr:
            case Literal():
                return change(expr)
            case Call(name, args):
                return Call(name, tuple(mapped(arg) for arg in args))
            case _:
                return expr

    return replace(
        query,
        items=tuple(Item(mapped(item.expr), item.alias) for item in query.items),
        where=mapped(query.where) if query.where is not None else None,
        group_by=tuple(mapped(key) for key in query.group_by),
        having=mapped(query.having) if query.having is not None else None,
        order_by=tuple(Order(mapped(order.expr), order.descending, order.nulls_first) for order in query.order_by),
    )
